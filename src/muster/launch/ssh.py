"""Machines behind the user's own OpenSSH: one connection a host, with the agent at its far end.

Everything that the user's ssh knows (aliases, ProxyJump, agents, keys, a port and user per host) is left to it. We add
only what a program needs: no prompt may hide (BatchMode), a host that is gone is noticed (ServerAlive), and host keys
are checked as the user has it, or new ones accepted where the cluster file asks for that; never ``no``.

A login shell may print what it likes before the agent speaks: the agent's first line is a mark, and what came before it
is shown on failure only. The far side needs Python; the agent itself travels down the pipe.
"""

import base64
import contextlib
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from muster.check.unreachable import ssh_verdict
from muster.cluster import Cluster, Host
from muster.errors import Refused, RunFailed
from muster.launch import agent
from muster.launch.pipe import Connection

OPTIONS = ("BatchMode=yes", "ConnectTimeout=8", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ForwardX11=no")

# Reads the length of the agent's source, then the source, byte by byte from the descriptor: nothing may be read ahead.
BOOT = """
import os
def line():
    text = b""
    while not text.endswith(b"\\n"):
        got = os.read(0, 1)
        if not got: raise SystemExit("muster: the launcher hung up")
        text += got
    return int(text)
def whole(size):
    text = b""
    while len(text) < size:
        got = os.read(0, size - len(text))
        if not got: raise SystemExit("muster: the launcher hung up")
        text += got
    return text
exec(compile(whole(line()), "muster-agent", "exec"), {"__name__": "__main__"})
"""


def must_be_here() -> None:
    """Raises Refused where this machine has no ssh."""
    if shutil.which("ssh") is None:
        raise Refused(
            "there is no ssh on this machine",
            at="PATH",
            because='launcher = "ssh" reaches the hosts with your own OpenSSH',
            try_="install OpenSSH's client (Debian: apt install openssh-client)",
        )


def options(cluster: Cluster) -> list[str]:
    """What we add to the user's own ssh settings."""
    found = ["-T"]
    if cluster.ssh_config:
        found += ["-F", str(Path(cluster.source).parent / Path(cluster.ssh_config).expanduser())]
    for option in OPTIONS:
        found += ["-o", option]
    if cluster.accept_new_keys:
        found += ["-o", "StrictHostKeyChecking=accept-new"]
    return found


def destination(host: Host) -> str:
    return host.ssh or host.address


def argv(cluster: Cluster, host: Host, command: list[str]) -> list[str]:
    """``ssh ... -- host command``: the command's words are quoted one by one for whatever shell is there."""
    remote = "exec " + " ".join(shlex.quote(word) for word in command)
    return ["ssh", *options(cluster), "--", destination(host), remote]


def boot(python: str) -> list[str]:
    """The command that becomes the agent once its source has come down the pipe."""
    return inline(python, BOOT)


def inline(python: str, source: str) -> list[str]:
    """A command that runs ``source``: one line, and safe in every shell."""
    packed = base64.b64encode(source.encode()).decode()
    return [python, "-c", f"exec(__import__('base64').b64decode('{packed}'))"]


class Ssh:
    """``connect`` for ``AgentLauncher``. ``verdict`` says in words why a connection has failed."""

    def __init__(self, cluster: Cluster, python: str) -> None:
        must_be_here()
        self._cluster, self._python = cluster, python
        source = Path(agent.__file__).read_bytes()
        self._preamble = b"%d\n%s" % (len(source), source)

    def __call__(self, host: Host) -> Connection:
        said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the connection)
        process = subprocess.Popen(
            argv(self._cluster, host, boot(host.python or self._python)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        return Connection(process, self._preamble, said)


@contextlib.contextmanager
def program(cluster: Cluster, host: Host, source: str, failed: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A small program of ours on ``host``, with its stdin and stdout. Raises RunFailed, beginning with ``failed`` and
    with what ssh or the program said, where the talk over them breaks off."""
    must_be_here()
    command = argv(cluster, host, inline(host.python or "python3", source))
    with tempfile.TemporaryFile() as said:  # not a pipe, which a talkative shell would fill
        far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
        try:
            yield far
        except (BrokenPipeError, EOFError, ValueError, tarfile.TarError) as error:
            code = _hang_up(far)
            said.seek(0)
            text = said.read().decode("utf-8", "replace")
            what, because, try_, _ = verdict(host, text or str(error), code)
            raise RunFailed(f"{failed}: {what}", at=host.name, because=because, try_=try_) from None
        finally:
            _hang_up(far)


def _hang_up(far: "subprocess.Popen[bytes]") -> int | None:
    """Closes both pipes first: the far end may be waiting for either."""
    for pipe in (far.stdin, far.stdout):
        with contextlib.suppress(OSError):
            assert pipe
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return far.wait(5.0)
    far.kill()
    far.wait()
    return None


def verdict(host: Host, said: str, code: int | None) -> tuple[str, str, str, bool]:
    """(what, because, try, whether trying again may help) for a connection that ended before the agent spoke."""
    found = ssh_verdict(said, code, destination(host))
    return f"{host.name} {found.what}", found.because, found.try_, found.kind == "busy sshd"
