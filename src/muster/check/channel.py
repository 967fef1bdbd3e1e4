"""A pipe to one host's examination: a child process that ends, one way or the other, within its time.

The argv is anything that connects standard input and output to ``serve`` on the host: a Python of this machine, or
``ssh -- HOST`` in front of it. What it writes to standard error is kept for the verdict.
"""

import json
import os
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from muster.check import serve


class ChannelBroken(Exception):
    """The host did not answer: ``returncode`` of the pipe (None: it still ran, and hung) and what it said."""

    def __init__(self, returncode: int | None, stderr: str, waited: float) -> None:
        super().__init__(
            f"no answer for {waited:.0f} s" if returncode is None else f"exit {returncode}: {stderr.strip()}"
        )
        self.returncode, self.stderr, self.waited = returncode, stderr, waited


class Channel(Protocol):
    def ask(self, request: Mapping[str, Any], within: float) -> dict[str, Any]:
        """The answer to ``request``. Raises ChannelBroken, at the latest ``within`` seconds from now."""

    def close(self) -> None:
        """Ends the examination on the host. Never raises, never waits long."""


class Pipe:
    """The ``Channel`` over a child process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (open until close)
        self._noise = b""  # of a login shell: what it says when it ends instead of letting us begin
        pipe = subprocess.PIPE
        environ = {**os.environ, **(env or {})}
        self._child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=self._said, env=environ)
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()
        self._requests.put(serve.program())

    def ask(self, request: Mapping[str, Any], within: float) -> dict[str, Any]:
        began = time.monotonic()
        self._requests.put(json.dumps(request).encode() + b"\n")
        try:
            line = self._answers.get(timeout=within)
            return dict(json.loads(line)) if line else self._broken(began)
        except (queue.Empty, ValueError):
            return self._broken(began)

    def close(self) -> None:
        self._requests.put(b"")
        try:
            self._child.wait(1.0)
        except subprocess.TimeoutExpired:  # a pipe to a host that is gone: ssh would wait for it for minutes
            self._child.kill()
            self._child.wait()
        self._said.close()

    def _broken(self, began: float) -> dict[str, Any]:
        waited = time.monotonic() - began
        try:
            returncode: int | None = self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            returncode = None
        raise ChannelBroken(returncode, self._last_words(), waited)

    def _last_words(self) -> str:
        try:
            self._said.seek(0)
            return (self._said.read() or self._noise).decode(errors="replace")
        except ValueError:  # closed by another thread: the check was broken off, and nobody reads this any more
            return ""

    def _read(self) -> None:
        """A thread's work, because a line may come in pieces or never: only the queue has a time limit."""
        assert self._child.stdout is not None
        with self._child.stdout as out:
            for line in out:
                if line.startswith(serve.MARK.encode()):
                    self._answers.put(line[len(serve.MARK) :])
                else:
                    self._noise = (self._noise + line)[-4096:]
        self._answers.put(b"")

    def _write(self) -> None:
        """A thread's work too: a pipe to a host that hangs is full after 64 KB."""
        assert self._child.stdin is not None
        try:
            with self._child.stdin as into:
                while data := self._requests.get():
                    into.write(data)
                    into.flush()
        except OSError:  # the pipe is closed; the reader says so, and why
            pass


def local_argv(python: str) -> list[str]:
    return serve.command(python)


def ssh_argv(destination: str, python: str, options: Sequence[str] = ()) -> list[str]:
    """``ssh [options] -- destination exec python ...``, each word quoted for the shell at the far end."""
    remote = "exec " + " ".join(shlex.quote(word) for word in serve.command(python))
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", *options, "--", destination, remote]
