"""Signals to the launcher, as events of the run."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from muster.events import Event, StopAsked


class Signals:
    """A Doorbell: Ctrl-C once asks for a clean end, twice for one at once; SIGTERM and SIGHUP ask once.

    A SIGHUP that was ignored when we came (``nohup``) stays so: the run is to outlive its terminal.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for sock in (self._read, self._write):
            sock.setblocking(False)
        self._asked: list[tuple[str, bool]] = []
        self.count = 0

    def fileno(self) -> int:
        return self._read.fileno()

    def ring(self, how: str) -> None:
        self.count += 1
        self._asked.append((how, self.count > 1 and how != "sigterm"))  # a closing terminal hangs up twice
        self._write.send(b"!")

    def take(self, now: float) -> list[Event]:
        self._read.recv(4096)
        asked, self._asked = self._asked, []
        return [StopAsked(now, how, at_once) for how, at_once in asked]


HOW = {signal.SIGINT: "ctrl-c", signal.SIGTERM: "sigterm", signal.SIGHUP: "sigterm", signal.SIGUSR1: "stop"}


@contextmanager
def signals() -> Iterator[Signals]:
    bell = Signals()
    heard = [sig for sig in HOW if sig != signal.SIGHUP or signal.getsignal(sig) != signal.SIG_IGN]
    before = {sig: signal.signal(sig, lambda got, _: bell.ring(HOW[signal.Signals(got)])) for sig in heard}
    try:
        yield bell
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
