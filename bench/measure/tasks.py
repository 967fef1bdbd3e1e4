"""Processes of one measurement: started here, given orders, stopped and continued, and ended by their own pids."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START = 240.0  # seconds that a task may take until it is ready
ENV = {
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Died(Exception):
    """A task ended or fell silent; its last lines are in the text."""


class Task:
    """``python -m MODULE ARGS``. With ``agent`` it has a pipe as from Muster's agent, and what it reports is kept."""

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        hello: Mapping[str, Any] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.name = f"{module.rpartition('.')[2]}-{len(list(folder.glob('*.log')))}"
        self.log = folder / f"{self.name}.log"
        self.reports: list[tuple[float, dict[str, Any]]] = []
        self.agent: socket.socket | None = None
        whole, theirs = {**os.environ, **ENV, **(env or {})}, None
        if hello is not None:
            self.agent, theirs = socket.socketpair()
            whole["MUSTER_FD"] = str(theirs.fileno())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", module, *args],
                env=whole,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[theirs.fileno()] if theirs else [],
                start_new_session=True,
            )
        self._unread = b""
        if theirs is not None and self.agent is not None:
            theirs.close()
            lines = [{"kind": "Hello", **(hello or {})}, {"kind": "Go"}]
            self.agent.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            threading.Thread(target=self._listen, args=(self.agent,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _listen(self, agent: socket.socket) -> None:
        unread = b""
        while True:
            try:
                data = agent.recv(1 << 16)
            except OSError:  # closed by us at the end
                return
            if not data:
                return
            now = time.monotonic()
            *lines, unread = (unread + data).split(b"\n")
            self.reports += [(now, json.loads(line)) for line in lines]

    def tell(self, order: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Died(self._last("took no order")) from None

    def hear(self, limit: float) -> dict[str, Any]:
        """The next line of its stdout that is JSON; ``{"ready": ...}`` for the word ready."""
        end = time.monotonic() + limit
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if found:
                self._unread = rest
                if line.strip() == b"ready":
                    return {"ready": []}
                if line.startswith(b"{"):
                    told: dict[str, Any] = json.loads(line)
                    return told
                continue
            self._unread += self._more(end - time.monotonic())

    def _more(self, limit: float) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        if limit <= 0 or not select.select([fd], [], [], limit)[0]:
            raise Died(self._last("said nothing in time"))
        data = os.read(fd, 1 << 16)
        if not data:
            raise Died(self._last("ended"))
        return data

    def _last(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-6:]
        return f"{self.name} {what} (exit {self.process.poll()})\n" + "\n".join(f"    {line}" for line in lines)

    def drain(self) -> None:
        """A progress bar goes to stdout, and somebody has to read it."""
        assert self.process.stdout is not None
        out = self.process.stdout
        threading.Thread(target=lambda: [None for _ in iter(lambda: out.read1(1 << 16), b"")], daemon=True).start()

    def hold(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """The pipe to its agent goes first, which is how a ps of ours ends; then the process."""
        if self.agent is not None:
            self.agent.shutdown(socket.SHUT_RDWR)
            self.agent.close()
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what it had not read is lost, as it should be
                pass


def ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for sock in held:
        sock.bind(("127.0.0.1", 0))
    found = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return found
