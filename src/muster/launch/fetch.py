"""Files of a run, brought back from its hosts: a stream of tar over the same ssh, unpacked here without trusting it."""

import json
import shutil
import tarfile
from pathlib import Path

from muster.cluster import Cluster, Host
from muster.launch import ssh

FAR = """
import json, os, sys, tarfile
told = json.loads(sys.stdin.readline())
base = os.path.expanduser(told["cwd"] or ".")
os.write(1, b"\\n--muster-fetch--\\n")
with tarfile.open(fileobj=os.fdopen(os.dup(1), "wb"), mode="w|") as archive:
    for path in told["paths"]:
        whole = os.path.join(base, os.path.expanduser(path))
        if os.path.exists(whole):
            archive.add(whole, arcname=os.path.basename(os.path.normpath(whole)))
"""
MARK = b"--muster-fetch--\n"


def fetch_host(cluster: Cluster, host: Host, paths: list[str], to: Path) -> int:
    """Copies ``paths`` (relative to the host's working folder) to ``to``; how many files came. Raises RunFailed."""
    to.mkdir(parents=True, exist_ok=True)
    if cluster.launcher == "local":
        return sum(_copy(Path(host.cwd or ".") / path, to) for path in paths)
    with ssh.program(cluster, host, FAR, "nothing was fetched") as far:
        assert far.stdin and far.stdout
        far.stdin.write(json.dumps({"cwd": host.cwd, "paths": paths}).encode() + b"\n")
        far.stdin.close()
        while (line := far.stdout.readline()) != MARK:
            if not line:
                raise EOFError
        with tarfile.open(fileobj=far.stdout, mode="r|") as archive:
            archive.extractall(to, filter=_harmless)
    return sum(1 for path in to.rglob("*") if path.is_file())


def _harmless(member: tarfile.TarInfo, to: str) -> tarfile.TarInfo | None:
    """No absolute paths, no links out, no devices: those stay where they are, and the rest is brought."""
    try:
        return tarfile.data_filter(member, to)
    except tarfile.FilterError:
        return None


def _copy(source: Path, to: Path) -> int:
    if source.is_dir():
        shutil.copytree(source, to / source.name, dirs_exist_ok=True)
        return sum(1 for path in (to / source.name).rglob("*") if path.is_file())
    if source.is_file():
        shutil.copy2(source, to / source.name)
        return 1
    return 0
