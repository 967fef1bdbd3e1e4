"""The user's code, copied to the hosts before a run: changed files only, over the same ssh as everything else.

At the far end runs a small program (Python 3.8+, standard library) that compares a list of files (size and SHA-256)
with what it has, answers which it wants, and writes them. Nothing is deleted there. Hidden folders, bytecode and
virtual environments stay at home.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from muster.cluster import Cluster, Host
from muster.errors import Refused, RunFailed
from muster.launch import ssh
from muster.launch.jumps import Turns, ways
from muster.plan import Script

MOST_BYTES = 200 << 20
LEFT_OUT = {"__pycache__", "node_modules", "venv", "site-packages"}
FAR = """
import hashlib, json, os, sys, tempfile
read, write = sys.stdin.buffer.readline, lambda told: (print(json.dumps(told)), sys.stdout.flush())
told = json.loads(read())
root = os.path.abspath(os.path.expanduser(told["root"]))
os.makedirs(root, exist_ok=True)
def same(path, size, digest):
    try:
        return os.path.getsize(path) == size and hashlib.sha256(open(path, "rb").read()).hexdigest() == digest
    except OSError:
        return False
wanted = [name for name, size, digest, mode in told["files"] if not same(os.path.join(root, name), size, digest)]
write({"mark": "--muster-sync--", "root": root, "wanted": wanted})
modes = {name: mode for name, size, digest, mode in told["files"]}
for name in wanted:
    data = sys.stdin.buffer.read(int(read()))
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.chmod(temporary, modes[name])
    os.replace(temporary, path)
write({"mark": "--muster-sync--", "done": len(wanted)})
"""


def sync_cluster(cluster: Cluster, folder: Path, script: Script) -> tuple[Cluster, Script]:
    """Copies ``folder`` to every host; the cluster and script as they are there. Raises Refused, RunFailed."""
    root = folder.absolute()
    if not root.is_dir():
        raise Refused(f"{folder} is no folder", at="command line: --sync")
    try:
        relative = str(Path(script.path).absolute().relative_to(root))
    except ValueError:
        raise Refused(
            "the script is not in the folder that is copied", at=f"--sync {folder}", because=script.path
        ) from None
    if cluster.launcher == "local":
        return cluster, script
    files = list(files_of(root))
    turns = Turns(ways(cluster, cluster.hosts))

    def one(host: Host) -> str:
        with turns.take(host.name):
            return sync_host(cluster, host, root, files)

    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(one, cluster.hosts))
    hosts = [replace(host, cwd=place) for host, place in zip(cluster.hosts, places, strict=True)]
    return replace(cluster, hosts=hosts), Script(relative, script.args)


Row = tuple[str, int, str, int]  # path below the root, size, SHA-256, mode


def files_of(root: Path) -> Iterator[Row]:
    total = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not _stays(Path(folder) / n))
        for name in sorted(files):
            path = Path(folder) / name
            if not path.is_file() or name.endswith(".pyc"):  # a link to a file travels as that file
                continue
            total += path.stat().st_size
            if total > MOST_BYTES:
                raise Refused(
                    f"{root} holds more than {MOST_BYTES >> 20} MB", at="command line: --sync",
                    because=f"{path} is where that was passed", try_="copy data by other means, and sync the code only",
                )  # fmt: skip
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield str(path.relative_to(root)), path.stat().st_size, digest, path.stat().st_mode & 0o777


def _stays(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in LEFT_OUT or (folder / "pyvenv.cfg").exists()


def sync_host(cluster: Cluster, host: Host, root: Path, files: list[Row]) -> str:
    """Brings one host up to date and returns the folder there. Raises RunFailed."""
    target = host.cwd or f"~/.muster/code/{root.name}"
    with ssh.program(cluster, host, FAR, "the code could not be copied") as far:
        assert far.stdin and far.stdout
        far.stdin.write(json.dumps({"root": target, "files": files}).encode() + b"\n")
        far.stdin.flush()
        told = _answer(far.stdout)
        if strange := set(told["wanted"]) - {name for name, *_ in files}:  # it gets what it was offered, and no more
            raise RunFailed(
                "the code could not be copied", at=host.name,
                because=f"it asks for {min(strange)!r}, which was not offered", try_="do not trust that machine",
            )  # fmt: skip
        for name in told["wanted"]:
            data = (root / name).read_bytes()
            far.stdin.write(b"%d\n" % len(data) + data)
        far.stdin.flush()
        _answer(far.stdout)
        return str(told["root"])


def _answer(stream: IO[bytes]) -> dict[str, Any]:
    """The next line with our mark; a login shell may print others."""
    for line in stream:
        if b"--muster-sync--" in line:
            found: dict[str, Any] = json.loads(line)
            return found
    raise EOFError
