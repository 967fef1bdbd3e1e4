"""The task's end of the pipe to its agent: reports go up as JSON lines, three notes come down (Hello, Go, Over).

Three rules hold everywhere here.

*A report never harms the training.* The agent may be gone, frozen or slow; none of that may raise into a user's loop
or hold it up. So writes never block: what the pipe does not take is kept, and once 64 kB are kept, more is dropped.

*A report costs nothing.* Steps and metrics go out at most four times a second, the newest values of each; what was held
back follows when its quarter of a second is over, and at exit.

*The pipe belongs to one process.* A child of the script (a data loader, a shell) must neither report in our name nor
hold the pipe open after us. So the descriptor is closed on exec, MUSTER_FD leaves the environment once it is taken, and
after a fork the child's copy is silent.
"""

import atexit
import json
import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from muster.train.context import context

EVERY = 0.25  # seconds between lines of one kind
KEPT = 64 * 1024  # bytes that wait for an agent which does not read
BARRIER = 900.0  # seconds; the supervisor opens the barrier long before: no wait of ours is without a limit


class Channel:
    """Reports of one process. Without a pipe (a script that runs alone) every report is a no-op. Thread-safe."""

    def __init__(self, pipe: socket.socket | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe, self._clock, self._pid = pipe, clock, os.getpid()
        self._lock = threading.RLock()  # a signal handler of the script may report while its main thread does
        self._held: dict[str, dict[str, Any]] = {}
        self._due = 0.0
        self._timer: threading.Timer | None = None
        self._unsent = bytearray()
        self._reading = threading.Lock()
        self._unread = b""
        self._told: dict[str, dict[str, Any]] = {}
        self._said: set[str] = set()
        self._ready = False
        self._local = 0

    # --- up

    def tell(self, kind: str, **fields: Any) -> None:
        """Send one report now, after those that were held back."""
        with self._lock:
            self._send_held()
            self._send({"kind": kind, **fields})

    def say(self, text: str) -> None:
        """A notice for the screen; the same text is sent once."""
        with self._lock:
            if text not in self._said:
                self._said.add(text)
                self.tell("Said", text=text)

    def step(self, step: int, local: int | None = None, loss: float | None = None) -> None:
        """The global step, the steps of this task so far (by default: one more with each call) and the loss."""
        with self._lock:
            self._local = self._local + 1 if local is None else local
            told: dict[str, Any] = {"step": int(step), "local": self._local}
            if loss is not None and self._finite("loss", loss):
                told["loss"] = float(loss)
            self._hold("Step", told)

    def metrics(self, values: dict[str, float]) -> None:
        with self._lock:
            told = {name: float(value) for name, value in values.items() if self._finite(name, value)}
            if told:
                self._hold("Metrics", {"values": {**self._held.get("Metrics", {}).get("values", {}), **told}})

    def flush(self, within: float = 0.0) -> None:
        """Send what was held back; wait up to ``within`` seconds for the pipe to take it."""
        with self._lock:
            self._send_held()
            self._push()
            end = self._clock() + within
            while self._unsent and self._pipe is not None and (left := end - self._clock()) > 0:
                _wait(self._pipe, select.POLLOUT, left)
                self._push()

    def close(self) -> None:
        """Send all that is left, and read what nobody asked for: closed with that inside, a pipe looks broken above."""
        self.flush(within=1.0)
        with self._reading:
            while self._pipe is not None and os.getpid() == self._pid and self._read(self._pipe, 0.0):
                pass

    def _finite(self, name: str, value: float) -> bool:
        """JSON has no NaN, and a person wants to be told of one rather than see a gap."""
        if math.isfinite(value):
            return True
        self.say(f"{name} is {float(value)}")
        return False

    def _hold(self, kind: str, fields: dict[str, Any]) -> None:
        if self._pipe is None:
            return
        self._held[kind] = fields
        left = self._due - self._clock()
        if left <= 0:
            self._send_held()
        elif self._timer is None:
            self._timer = threading.Timer(left, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def _send_held(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._due = self._clock() + EVERY
        held, self._held = self._held, {}
        for kind, fields in held.items():
            self._send({"kind": kind, **fields})

    def _send(self, report: dict[str, Any]) -> None:
        if self._pipe is not None and os.getpid() == self._pid and len(self._unsent) < KEPT:
            self._unsent += json.dumps(report, separators=(",", ":")).encode() + b"\n"
            self._push()

    def _push(self) -> None:
        try:
            while self._unsent and self._pipe is not None:
                sent = self._pipe.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass  # the agent is slow: kept, and sent with the next report
        except OSError:
            self._pipe = None  # the agent is gone. Whoever should know of that is not this script.

    # --- down

    def hello(self, limit: float = 10.0) -> dict[str, Any]:
        """The agent's first line: our ``key``, and our papers for TLS where there are any. Empty without an agent."""
        hello = self._await("Hello", limit)
        return {} if hello is None else hello

    def ready(self, limit: float = BARRIER) -> None:
        """Say that this task can take its first step, and wait until all can. The second time it returns at once."""
        with self._lock:
            first, self._ready = not self._ready, True
        if first:
            self.tell("Ready")
        if self._pipe is not None and self._await("Go", limit) is None and self._pipe is not None:
            self.say(f"the start barrier did not open within {limit:.0f} s; went on without it")

    def over(self, limit: float = 0.0) -> int | None:
        """The global step at which training ended, as soon as the agent says so; None if not within ``limit``."""
        told = self._await("Over", limit)
        return None if told is None else int(told["step"])

    def _await(self, kind: str, limit: float) -> dict[str, Any] | None:
        end = self._clock() + limit
        with self._reading:
            while kind not in self._told and self._pipe is not None and os.getpid() == self._pid:
                if not self._read(self._pipe, max(0.0, end - self._clock())):
                    break
            return self._told.get(kind)

    def _read(self, pipe: socket.socket, limit: float) -> bool:
        """Take in what the agent sent; False at the end of the limit or of the pipe."""
        if not _wait(pipe, select.POLLIN, limit):
            return False
        try:
            data = pipe.recv(4096)
        except OSError:  # reset by an agent that died: the same as its end of file
            data = b""
        if not data:
            self._pipe = None
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            note = json.loads(line)
            self._told[note["kind"]] = note
        return True


def _wait(pipe: socket.socket, what: int, limit: float) -> bool:
    watch = select.poll()  # not select(), which refuses descriptors above 1023
    watch.register(pipe, what)
    return bool(watch.poll(limit * 1000))


def _inherited() -> socket.socket | None:
    """The pipe that the agent left us, if the number in MUSTER_FD still is one."""
    number = os.environ.pop("MUSTER_FD", "")
    if not number.isdigit():
        return None
    try:
        if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
            return None
    except OSError:  # closed: this process is a child of the task and did not inherit it
        return None
    pipe = socket.socket(fileno=int(number))
    pipe.set_inheritable(False)
    return pipe


_channel: Channel | None = None
_opening = threading.Lock()


def channel() -> Channel:
    """The one channel of this process."""
    global _channel
    with _opening:
        if _channel is None:
            _channel = Channel(_inherited())
            atexit.register(_channel.close)
        return _channel


def report(
    step: int | None = None,
    loss: float | None = None,
    total: int | None = None,
    local: int | None = None,
    **metrics: float,
) -> None:
    """Show how far this task is. Outside Muster it does nothing.

    ``step`` is the global step, ``loss`` a number, ``total`` the step at which the run will be over; any other name is
    a result worth keeping (``report(accuracy=0.91)``). Call it with ``step`` once a step: it is cheap, and each such
    call counts as a step of this task; or say with ``local`` how many it has done.
    """
    to = channel()
    if total is not None:
        to.tell("Total", steps=int(total))
    if step is not None:
        to.step(step, local, loss)
    elif loss is not None:
        metrics = {"loss": loss, **metrics}
    if metrics:
        to.metrics(metrics)


def ready() -> None:
    """Wait at the start barrier until every worker can take its first step. Outside Muster it returns at once.

    An evaluator takes no steps, so it is not held.
    """
    if context().role != "evaluator":
        channel().ready()


def finished() -> None:
    """Training is over, though the script goes on (exporting, evaluating): the parameter servers may go."""
    channel().tell("Finished")
