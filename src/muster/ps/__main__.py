"""``python -m muster.ps``: one parameter server, as its agent starts it.

Reads MUSTER_TASK ("ps/0"), MUSTER_CLUSTER, MUSTER_ATTEMPT, MUSTER_RUN and, on MUSTER_FD, the secret of the run. Reports
Ready once it can be reached.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy: one loop, one thread, and no pool to start

from muster.errors import MusterError, Refused  # noqa: E402
from muster.ps.loop import Loop, listen_at, listen_local, remove_local  # noqa: E402
from muster.ps.server import Rule, Server  # noqa: E402
from muster.ps.tls import context  # noqa: E402


def main() -> int:
    try:
        return serve(os.environ)
    except MusterError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def serve(env: os._Environ[str]) -> int:
    role, _, index = env.get("MUSTER_TASK", "").partition("/")
    if role != "ps" or not index.isdigit() or "MUSTER_CLUSTER" not in env:
        raise Refused(
            "This is started by Muster, with MUSTER_TASK and MUSTER_CLUSTER set",
            because=f"MUSTER_TASK is {env.get('MUSTER_TASK')!r}",
            try_="muster run script.py",
        )
    cluster = json.loads(env["MUSTER_CLUSTER"])
    agent, secret, papers = hear(env.pop("MUSTER_FD", ""))
    run, number = env.get("MUSTER_RUN", ""), int(index)
    listeners = listen(cluster, run, number, secret)
    server = Server(number, rule(cluster), send=lambda peer, *buffers: None, say=Voice(agent).say)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        loop = Loop(server, listeners, secret, agent, context(papers, server=True) if papers else None)
        Voice(agent).tell("Ready")
        loop.run()
    finally:
        remove_local(run, number)
    return 0


def rule(cluster: dict[str, Any]) -> Rule:
    seats = cluster["cluster"]
    tasks = [f"{role}/{i}" for role in ("worker", "chief") for i in range(len(seats.get(role, ())))]
    return Rule(cluster.get("mode", "async"), int(cluster.get("spare", 0)), cluster.get("max_staleness"), tuple(tasks))


def listen(cluster: dict[str, Any], run: str, index: int, secret: bytes | None) -> list[socket.socket]:
    """A local socket; and the plan's address, or what it is bound to instead, where another host needs it."""
    seats = cluster["cluster"]
    own = seats["ps"][index]
    others = [address for role in ("worker", "chief") for address in seats.get(role, ())]
    remote = "near" in cluster or cluster.get("local") is False or any(host(address) != host(own) for address in others)
    if remote and secret is None:
        raise Refused(
            "A parameter server that others reach over a network needs a secret", at=own,
            because="none came down MUSTER_FD", try_="start it with muster run",
        )  # fmt: skip
    return [listen_local(run, index), *([listen_at(cluster.get("bind", own))] if remote else [])]


def host(address: str) -> str:
    return address.rpartition(":")[0]


def hear(fd: str) -> tuple[socket.socket | None, bytes | None, dict[str, str] | None]:
    """The pipe to our agent, and what its first line says: the secret of the run, and our papers for TLS."""
    if not fd.isdigit():
        return None, None, None
    agent = socket.socket(fileno=int(fd))
    agent.set_inheritable(False)
    agent.settimeout(10)
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows the line is for later
        byte = agent.recv(1)
        if not byte:
            return None, None, None
        line += byte
    told = json.loads(line)
    return agent, bytes.fromhex(told["secret"]) if told.get("secret") else None, told.get("tls")


class Voice:
    """Reports to the agent. It may be gone or slow, and that is never an error of ours: the report is lost then."""

    def __init__(self, agent: socket.socket | None) -> None:
        self.agent = agent

    def say(self, text: str) -> None:
        self.tell("Said", text=text)

    def tell(self, kind: str, **fields: Any) -> None:
        if self.agent is None:
            return
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        try:
            self.agent.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # see above


if __name__ == "__main__":
    sys.exit(main())
