"""Parameter servers as their agent starts them, for tests: real processes, real sockets, a secret down a pipe."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from muster.ps import scratch, tls, wire
from muster.ps.client import Client
from muster.ps.link import Identity, Place


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """``ps`` servers for ``workers`` workers. ``tcp`` puts the workers on another host of the plan: a port opens."""

    def __init__(self, ps: int = 2, workers: int = 3, tcp: bool = False, **settings: Any) -> None:
        self.run, self.secret, self.tcp = f"test-{secrets.token_hex(4)}", secrets.token_bytes(32), tcp
        self.ports = [free_port() for _ in range(ps)]
        seat = "127.0.0.2" if tcp else "127.0.0.1"
        seats = {"ps": [f"127.0.0.1:{port}" for port in self.ports], "worker": [f"{seat}:{i}" for i in range(workers)]}
        self.cluster = {"cluster": seats, "chief": "worker/0", "engine": "muster", "mode": "async", **settings}
        self.papers: dict[str, dict[str, str]] = {}  # certificates by task, for TLS
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[socket.socket] = []
        self.clients: list[Client] = []

    def env(self, task: str) -> dict[str, str]:
        own = {"MUSTER_RUN": self.run, "MUSTER_TASK": task, "MUSTER_ATTEMPT": "1"}
        return {**os.environ, **own, "MUSTER_CLUSTER": json.dumps(self.cluster)}

    def __enter__(self) -> Fleet:
        for index in range(len(self.ports)):
            self.start(index)
        for agent in self.agents:
            assert b"Ready" in agent.recv(4096)
        return self

    def start(self, index: int) -> None:
        process, agent = self.spawn([sys.executable, "-m", "muster.ps"], f"ps/{index}")
        self.processes.append(process)
        self.agents.append(agent)

    def spawn(self, command: list[str], task: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        env = {**self.env(task), "MUSTER_FD": str(theirs.fileno())}
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        hello = {"kind": "Hello", "secret": self.secret.hex(), "tls": self.papers.get(task)}
        ours.sendall(json.dumps(hello).encode() + b"\n")
        return process, ours

    def places(self) -> list[Place]:
        if self.tcp:
            return [Place(i, host="127.0.0.1", port=port) for i, port in enumerate(self.ports)]
        return [Place(i, scratch.socket_path(self.run, i)) for i in range(len(self.ports))]

    def client(self, worker: int, attempt: int = 1, **settings: Any) -> Client:
        task = f"worker/{worker}"
        shown = self.papers.get(task)
        certificate = tls.context(shown, server=False) if shown else None
        who = Identity(task, attempt, os.urandom(16), wire.task_key(self.secret, task), certificate)
        client = Client(self.places(), who, chief=worker == 0, **{"patience": 5.0, **settings})
        self.clients.append(client)
        return client

    def rss(self, index: int) -> int:
        """Resident bytes of a ps."""
        with open(f"/proc/{self.processes[index].pid}/statm") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.close()
        for agent in self.agents:
            agent.close()  # the agent's end is the end of its ps
        end = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr:
                process.stderr.close()
