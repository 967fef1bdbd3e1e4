"""Where tasks run. A launcher is a few verbs; everything else is the supervisor's."""

from typing import NamedTuple, Protocol

from muster.events import Event
from muster.plan import Task


class Output(NamedTuple):
    """Bytes that a task printed, stdout and stderr in the order in which they were written."""

    task: str
    attempt: int
    data: bytes


class Launcher(Protocol):
    """``start``, ``release``, ``conclude`` and ``stop`` return at once; what came of it is seen by ``wait``."""

    def now(self) -> float:
        """Seconds since the run began, on the clock that stamps all events."""
        ...

    def start(self, task: Task, attempt: int) -> None: ...

    def release(self, task: Task) -> None:
        """Opens the start barrier for a task that is ready."""
        ...

    def conclude(self, task: Task, step: int) -> None:
        """Tells an evaluator that training has ended, at this global step: what it does then is its own affair."""
        ...

    def stop(self, task: Task, grace: float) -> None:
        """TERM, then KILL after ``grace`` seconds. An ``Exited`` event follows in any case."""
        ...

    def wait(self, until: float) -> list[Event | Output]:
        """What happened, as soon as anything does; nothing, if nothing did by then."""
        ...

    def close(self) -> None:
        """Nothing that was started here is alive after this returns."""
        ...
