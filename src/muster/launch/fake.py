"""A cluster in memory, on a clock that jumps. For our tests, and for yours.

A script says what each attempt of each task does: a list of (seconds after its start, what), where ``what`` is an exit
code, an event without time, task and attempt (``Beat(step)``, ``READY``), or bytes that it prints.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muster.events import Event, Exited, HostUp, Spawned, StopAsked, TaskEvent
from muster.launch import Output
from muster.plan import Task


@dataclass(frozen=True)
class Says:
    """An event of a task, to be stamped when its time comes: ``Says(Step, step=3, local=1)``."""

    kind: type[TaskEvent]
    fields: tuple[tuple[str, Any], ...] = ()


def says(kind: type[TaskEvent], **fields: Any) -> Says:
    return Says(kind, tuple(fields.items()))


What = int | bytes | Says | Exited
Script = Callable[[Task, int], Iterable[tuple[float, What]]]


class FakeLauncher:
    """``user`` is a list of (at, StopAsked...) that happen whatever the tasks do.

    ``concludes``: what a task does once it is told that training has ended, as a script has it; by default it ends.
    """

    def __init__(
        self,
        script: Script,
        stop_takes: float = 0.1,
        user: Iterable[StopAsked] = (),
        concludes: "Iterable[tuple[float, What]]" = ((0.5, 0),),
    ) -> None:
        self.script, self.stop_takes, self.clock = script, stop_takes, 0.0
        self.alive: dict[str, int] = {}
        self.released: list[str] = []
        self.concludes = list(concludes)
        self.concluded: list[tuple[float, str, int]] = []
        self.starts: list[tuple[float, str, int]] = []
        self.stops: list[tuple[float, str, float]] = []
        self.closed = False
        self._queue: list[tuple[float, int, str, int, What | Event]] = []
        self._posted = 0
        self._post(0.0, "", 0, HostUp(0.0, "fake"))
        for asked in user:
            self._post(asked.at, "", 0, asked)

    def now(self) -> float:
        return self.clock

    def start(self, task: Task, attempt: int) -> None:
        assert task.id not in self.alive, f"{task.id} is started twice"
        self.alive[task.id] = attempt
        self.starts.append((self.clock, task.id, attempt))
        self._post(self.clock, task.id, attempt, says(Spawned, pid=1000 + len(self.starts)))
        for after, what in self.script(task, attempt):
            self._post(self.clock + after, task.id, attempt, what)

    def release(self, task: Task) -> None:
        self.released.append(task.id)

    def conclude(self, task: Task, step: int) -> None:
        self.concluded.append((self.clock, task.id, step))
        for after, what in self.concludes if task.id in self.alive else ():
            self._post(self.clock + after, task.id, self.alive[task.id], what)

    def stop(self, task: Task, grace: float) -> None:
        self.stops.append((self.clock, task.id, grace))
        if task.id in self.alive:
            takes = min(self.stop_takes, grace)
            self._post(self.clock + takes, task.id, self.alive[task.id], -15 if self.stop_takes <= grace else -9)

    def wait(self, until: float) -> list[Event | Output]:
        self.clock = max(self.clock, min([until, *(item[0] for item in self._queue[:1])]))
        if self.clock == float("inf"):
            raise AssertionError("everything waits for ever: no task is alive and nothing is due")
        news: list[Event | Output] = []
        while self._queue and self._queue[0][0] <= self.clock:
            at, _, name, attempt, what = heapq.heappop(self._queue)
            if isinstance(what, Event) and not name:
                news.append(what)
            elif self.alive.get(name) == attempt:
                news.append(self._news(at, name, attempt, what))
        return news

    def _news(self, at: float, name: str, attempt: int, what: "What | Event") -> Event | Output:
        if isinstance(what, bytes):
            return Output(name, attempt, what)
        if isinstance(what, Says):
            return what.kind(at, name, attempt, **dict(what.fields))
        del self.alive[name]
        if isinstance(what, int):
            return Exited(at, name, attempt, what)
        assert isinstance(what, Exited)
        return Exited(at, name, attempt, what.code, what.error, what.trace, what.tail, what.swept, what.oom)

    def close(self) -> None:
        self.alive.clear()
        self.closed = True

    def _post(self, at: float, name: str, attempt: int, what: "What | Event") -> None:
        self._posted += 1
        heapq.heappush(self._queue, (at, self._posted, name, attempt, what))
