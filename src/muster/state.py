"""What is true now: a fold over events. No I/O, no clock, no decisions.

The supervisor, ``muster status``, the screens and recovery all get here the same way, by feeding events to ``apply``;
they cannot disagree.

Phases are a table. Facts about a living task (it listens, it reports a step) change no phase. An event of an attempt
that is over is late, not wrong, and is dropped; anything else that is not in the table is a bug, and tells its story.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from muster.events import (
    Account,
    Concluded,
    Data,
    Evaluating,
    Event,
    Exited,
    Finished,
    Frozen,
    GpuUse,
    HostLost,
    HostUp,
    Joined,
    Listening,
    Metrics,
    Mismatch,
    PortTaken,
    Ready,
    Released,
    RunEnded,
    RunStarted,
    Said,
    Spawned,
    Started,
    Step,
    StopAsked,
    Stopping,
    TaskEvent,
    Thawed,
    Total,
    Waiting,
    Warned,
)


class Phase(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"


ALIVE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.STOPPING})
IDLE = frozenset({Phase.WAITING, Phase.STOPPED, Phase.FAILED})

NEXT: dict[tuple[Phase, type[Event]], Phase] = {
    (Phase.WAITING, Started): Phase.STARTING,
    (Phase.STOPPED, Started): Phase.STARTING,
    (Phase.FAILED, Started): Phase.STARTING,
    (Phase.DONE, Started): Phase.STARTING,  # it had ended well, and everyone goes back to the checkpoint
    (Phase.STARTING, Spawned): Phase.RUNNING,
    (Phase.STARTING, Stopping): Phase.STOPPING,
    (Phase.STARTING, Exited): Phase.FAILED,  # an exit with code 0 makes DONE of FAILED, in apply()
    (Phase.RUNNING, Ready): Phase.READY,
    (Phase.RUNNING, Released): Phase.RUNNING,
    (Phase.RUNNING, Concluded): Phase.RUNNING,
    (Phase.RUNNING, Stopping): Phase.STOPPING,
    (Phase.RUNNING, Exited): Phase.FAILED,
    (Phase.READY, Released): Phase.RUNNING,
    (Phase.READY, Ready): Phase.READY,
    (Phase.READY, Stopping): Phase.STOPPING,
    (Phase.READY, Exited): Phase.FAILED,
    (Phase.STOPPING, Spawned): Phase.STOPPING,  # the stop was journalled while the process came up
    (Phase.STOPPING, Ready): Phase.STOPPING,
    (Phase.STOPPING, Exited): Phase.STOPPED,  # our doing, whatever the code
}
FACTS = frozenset(
    {
        Listening, PortTaken, Frozen, Thawed, GpuUse, Total, Step, Metrics, Said, Mismatch, Joined, Finished,
        Evaluating, Account, Data,
    }
)  # fmt: skip
BESIDE = "evaluator/"  # tasks beside the training: their failures are their own, their steps none of the run's


class Surprise(Exception):
    """An event that the table does not allow."""


@dataclass(slots=True)
class TaskState:
    phase: Phase = Phase.WAITING
    since: float = 0.0  # when this phase began
    attempt: int = 0
    started: float = 0.0  # when this attempt began
    pid: int = 0
    failures: list[float] = field(default_factory=list)  # when, over the whole run
    echoes: int = 1  # how often in a row the last failure had the same traceback
    trace: str = ""  # of the last failure
    code: int | None = None
    error: str = ""
    host_lost: bool = False  # it ended because its host went away
    listening: bool = False
    taken: PortTaken | None = None
    released: bool = False
    frozen: bool = False
    joined: bool = False
    finished: bool = False
    step: int = -1
    local: int = 0  # steps done in this attempt
    before: int = 0  # steps done in attempts that are over
    stepped: float = 0.0  # when the last step was reported
    loss: float | None = None
    forced: bool = False
    blamed: str = ""  # why it was asked to go, where that was its own fault
    account: Account | None = None
    gpus: GpuUse | None = None  # the newest look, in this attempt
    checkpoint: str | None = None  # an evaluator: what it works on, "" while it waits for the next one, None: not said
    evaluations: int = 0  # checkpoints that it has begun, over all attempts
    evaluated: str = ""  # the newest of them
    concluded: int | None = None  # the global step at which training ended, once it was told that
    stuck: int = 0  # failures in a row during which the global step of the run did not grow
    stuck_at: int = -1  # the highest global step of the run at the last of them

    @property
    def steps(self) -> int:
        return self.before + self.local


@dataclass(frozen=True, slots=True)
class Setback:
    """The global step went backwards: what was learned in between is lost."""

    at: float
    task: str
    was: int
    now: int


@dataclass(slots=True)
class State:
    tasks: dict[str, TaskState]
    run: str = ""
    wall: float = 0.0
    pid: int = 0
    born: float = 0.0
    stop: StopAsked | None = None
    stop_at: float = 0.0  # when somebody first asked for it
    cause: TaskEvent | None = None  # the first failure of the trouble that we are in: later ones are mostly its echoes
    cause_from: float = 0.0  # when the attempt that failed had started
    ended: RunEnded | None = None
    ended_at: float = 0.0
    now: float = 0.0  # when the last event happened
    total: int = 0
    high: int = 0  # the highest global step seen
    low: int = -1  # the first one
    low_at: float = 0.0
    high_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    data: Data | None = None
    setbacks: list[Setback] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)  # name -> "up", or why it is lost
    waits: list[Waiting] = field(default_factory=list)
    story: deque[TaskEvent] = field(default_factory=lambda: deque(maxlen=200), compare=False)
    members: dict[Phase, dict[str, None]] = field(default_factory=dict)  # the tasks in each phase, in order of arrival

    def __post_init__(self) -> None:
        self.members = {phase: {} for phase in Phase}
        for name, task in self.tasks.items():
            self.members[task.phase][name] = None

    def apply(self, event: Event) -> None:
        self.now = max(self.now, event.at)
        if isinstance(event, TaskEvent):
            self._task(event)
        elif isinstance(event, StopAsked):
            self.stop_at = self.stop_at if self.stop else event.at
            if self.stop is None or event.now:
                self.stop = event
        elif isinstance(event, RunStarted):
            self.run, self.wall, self.pid, self.born = event.run, event.wall - event.at, event.pid, event.born
        elif isinstance(event, RunEnded):
            self.ended, self.ended_at = event, event.at
        elif isinstance(event, HostUp):
            self.hosts[event.host] = "up"
        elif isinstance(event, HostLost):
            self.hosts[event.host] = event.why
        elif isinstance(event, Waiting):
            self.waits = [*[w for w in self.waits if w.whom != event.whom][-20:], event]
        else:
            assert isinstance(event, Warned)

    def _task(self, event: TaskEvent) -> None:
        task = self.tasks.get(event.task)
        if task is None:
            raise Surprise(f"the plan has no {event.task}: {event.line()}")
        if event.attempt < task.attempt and not isinstance(event, Started):
            return  # late news of an attempt that is over
        kind = type(event)
        if kind not in FACTS:
            self.story.append(event)
        if kind in FACTS:
            if task.phase not in ALIVE or event.attempt != task.attempt:
                return  # reported just before an end that we have already seen
            self._fact(event, task)
            return
        phase = NEXT.get((task.phase, kind))
        if phase is None or (event.attempt != task.attempt and kind is not Started):
            raise Surprise(self._tell(task, event))
        if isinstance(event, Started):
            _begin(task, event)
        elif isinstance(event, Spawned):
            task.pid = event.pid
        elif isinstance(event, Ready) and event.task.startswith("ps/"):
            self._well_again(event)  # over Muster's engine it serves now; it has no port to show it, and makes no steps
        elif isinstance(event, Released):
            task.released = True
        elif isinstance(event, Concluded):
            task.concluded = event.step
        elif isinstance(event, Stopping):
            task.forced, task.blamed = True, event.why if event.blame else ""
        elif isinstance(event, Exited):
            phase = self._exit(event, task, phase)
        if phase is not task.phase:
            del self.members[task.phase][event.task]
            self.members[phase][event.task] = None
            task.phase, task.since = phase, event.at

    def _exit(self, event: Exited, task: TaskState, phase: Phase) -> Phase:
        task.code, task.error, task.listening, task.frozen = event.code, event.error, False, False
        if phase is Phase.STOPPED and not task.blamed:
            return phase
        if event.code == 0 and not task.blamed:
            return Phase.DONE
        if task.blamed:
            event = replace(event, error=event.error or task.blamed)
            task.error = event.error
        task.failures.append(event.at)
        task.echoes = task.echoes + 1 if event.trace and event.trace == task.trace else 1
        task.trace = event.trace
        task.host_lost = event.lost
        task.stuck = task.stuck + 1 if task.stuck_at == self.high else 1
        task.stuck_at = self.high
        if self.cause is None and not event.task.startswith(BESIDE):
            self.cause, self.cause_from = event, task.started
        return Phase.FAILED

    def _fact(self, event: TaskEvent, task: TaskState) -> None:
        if isinstance(event, Step | Mismatch | Total) and event.task.startswith(BESIDE):
            return  # it speaks of the checkpoint in its hands
        if isinstance(event, Step):
            self._step(event, task)
        elif isinstance(event, Total):
            self.total = event.steps
        elif isinstance(event, Metrics):
            self.metrics.update(event.values)
        elif isinstance(event, Listening):
            task.listening, task.taken = True, None
            self._well_again(event)
        elif isinstance(event, PortTaken):
            task.taken = event
            self.cause = self.cause or event
        elif isinstance(event, Mismatch):
            self.cause = event
        elif isinstance(event, Frozen | Thawed):
            task.frozen = isinstance(event, Frozen)
        elif isinstance(event, GpuUse):
            task.gpus = event
        elif isinstance(event, Joined):
            task.joined = True
        elif isinstance(event, Account):
            task.account = event
        elif isinstance(event, Evaluating):
            task.checkpoint = event.checkpoint
            task.evaluations += bool(event.checkpoint)
            task.evaluated = event.checkpoint or task.evaluated
        elif isinstance(event, Data):
            self.data = event
        elif isinstance(event, Finished):
            task.finished = True

    def _step(self, event: Step, task: TaskState) -> None:
        if event.step < task.step:
            self.setbacks.append(Setback(event.at, event.task, task.step, event.step))
        task.step, task.local, task.stepped = event.step, event.local, event.at
        task.loss = event.loss if event.loss is not None else task.loss
        if self.low < 0:
            self.low, self.low_at = event.step, event.at
        if event.step > self.high:
            self.high, self.high_at = event.step, event.at
        self._well_again(event)

    def _well_again(self, event: TaskEvent) -> None:
        """The task that failed first is at work again: that trouble is over, the next failure will be a new one."""
        if self.cause and self.cause.task == event.task and event.attempt > self.cause.attempt:
            self.cause = None

    def _tell(self, task: TaskState, event: TaskEvent) -> str:
        told = "\n  ".join(e.line() for e in self.story if e.task == event.task)
        return f"{event.task} is {task.phase.value}: it cannot have {type(event).__name__}. Its story:\n  {told}"


def _begin(task: TaskState, event: Started) -> None:
    task.attempt, task.started, task.before = event.attempt, event.at, task.steps
    task.local, task.step, task.stepped, task.pid, task.code = 0, -1, 0.0, 0, None
    task.listening = task.released = task.frozen = task.forced = task.joined = task.finished = False
    task.blamed = ""
    task.taken, task.loss, task.gpus = None, None, None
    task.checkpoint = task.concluded = None


def blank(tasks: Iterable[str]) -> State:
    return State({name: TaskState() for name in tasks})
