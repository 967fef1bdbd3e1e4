"""What happened (events) and what to do about it (actions).

An event is one JSON line, and it is the same line everywhere: a task reports it, the journal stores it, the page
streams it, recovery replays it. This module travels to every machine, so it needs the standard library only (3.10+).

An event of a task (``TaskEvent``) always names the attempt of the task that it speaks of, since a line can arrive
after the attempt that sent it is over: state drops those instead of mistaking them for news.
"""

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """``at`` is in seconds since the run began, by the clock of the launcher."""

    at: float
    kinds: ClassVar[dict[str, type["Event"]]] = {}
    names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def line(self) -> str:
        return json.dumps({"kind": type(self).__name__, **self.__dict__}, separators=(",", ":"))


@dataclass(frozen=True)
class TaskEvent(Event):
    task: str
    attempt: int


# --- about the run


@dataclass(frozen=True)
class RunStarted(Event):
    """``wall`` is the time of day (seconds since 1970) at ``at``: the only place where a wall clock is written."""

    run: str
    wall: float
    pid: int  # of the launcher
    born: float  # start time of that process in clock ticks since boot, so that a reused pid is not mistaken for it


@dataclass(frozen=True)
class StopAsked(Event):
    """The run is to end. ``how``: ctrl-c, sigterm, stop, or lease (hosts gave us up); ``now`` skips the grace time."""

    how: str
    now: bool = False


@dataclass(frozen=True)
class Warned(Event):
    """Something that a person should read, which changes nothing by itself."""

    text: str
    task: str = ""


@dataclass(frozen=True)
class Waiting(Event):
    """``who`` waits for ``whom`` since ``since``, most likely because of ``why``."""

    who: str
    whom: str
    where: str  # host and port of whom
    since: float
    why: str


@dataclass(frozen=True)
class HostUp(Event):
    host: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostLost(Event):
    host: str
    why: str


@dataclass(frozen=True)
class RunEnded(Event):
    ok: bool
    cause: str = ""


# --- about a task: intents of the supervisor (journalled before the act)


@dataclass(frozen=True)
class Started(TaskEvent):
    """Written before the process exists, so that a crash in between is seen on replay."""


@dataclass(frozen=True)
class Released(TaskEvent):
    """The start barrier is open for this task."""


@dataclass(frozen=True)
class Concluded(TaskEvent):
    """The evaluator is told that training ended, at global step ``step``: the newest checkpoint is the last one."""

    step: int


@dataclass(frozen=True)
class Stopping(TaskEvent):
    """We asked it to go. Its exit, whatever the code, is our doing, unless it is to ``blame`` (it stalled)."""

    why: str = ""
    blame: bool = False


# --- about a task: facts from its agent


@dataclass(frozen=True)
class Spawned(TaskEvent):
    pid: int


@dataclass(frozen=True)
class Listening(TaskEvent):
    port: int


@dataclass(frozen=True)
class PortTaken(TaskEvent):
    """Another process holds the port of this task."""

    port: int
    pid: int  # 0: not ours to see
    holder: str  # its command, user, and run if it is one of ours


@dataclass(frozen=True)
class Frozen(TaskEvent):
    """The process is stopped (state T): it lives and does nothing."""


@dataclass(frozen=True)
class Thawed(TaskEvent):
    pass


@dataclass(frozen=True)
class GpuUse(TaskEvent):
    """Bytes that the task holds on each GPU that it was given, 0 where it does not use it; a GPU is left out where that
    cannot be told. ``elsewhere``: GPUs that it uses besides; ``others``: who else is on its own ones.

    The rest helps to guess why one is idle: the value of CUDA_VISIBLE_DEVICES that hides it, the libraries of interest
    in its memory, and the line in which its TensorFlow said that it goes on without.
    """

    used: dict[str, int]
    elsewhere: list[int] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)
    hidden: str | None = None
    loaded: list[str] = field(default_factory=list)
    no_cuda: str = ""


@dataclass(frozen=True)
class Exited(TaskEvent):
    """``code`` is the exit code, or minus the signal; ``error`` the last line of the Python traceback ``trace``.

    ``swept`` counts processes that the task had left behind and that were ended with it.
    """

    code: int
    error: str = ""
    trace: str = ""
    tail: str = ""
    swept: int = 0
    oom: bool = False
    lost: bool = False  # nobody saw it end: its host does not answer


# --- about a task: what it reports itself


@dataclass(frozen=True)
class Ready(TaskEvent):
    """It has a session (or its parameters) and waits for the others at the start barrier."""


@dataclass(frozen=True)
class Total(TaskEvent):
    """The step at which the run will be over."""

    steps: int


@dataclass(frozen=True)
class Step(TaskEvent):
    """``step`` is the global step, ``local`` the steps of this task in this attempt. Sent a few times a second."""

    step: int
    local: int
    loss: float | None = None


@dataclass(frozen=True)
class Metrics(TaskEvent):
    """Results worth keeping, such as accuracy. The chief's go into the end table."""

    values: dict[str, float]


@dataclass(frozen=True)
class Said(TaskEvent):
    """A notice from our task-side code, shown once on the screen."""

    text: str


@dataclass(frozen=True)
class Mismatch(TaskEvent):
    """The script made itself another task than the one it is. Ends the run, naming both."""

    claims: str


@dataclass(frozen=True)
class Joined(TaskEvent):
    """The script called ``muster.fit`` or ``muster.connect``: it takes part in the run."""


@dataclass(frozen=True)
class Finished(TaskEvent):
    """Training is over though the script goes on (exporting, evaluating): the ps may go."""


@dataclass(frozen=True)
class Evaluating(TaskEvent):
    """The evaluator works on ``checkpoint``; with none, it waits for the next one."""

    checkpoint: str


@dataclass(frozen=True)
class Account(TaskEvent):
    """What this worker's share came to, over Muster's parameter servers. ``staleness``: mean updates by others."""

    samples: int
    staleness: float
    staleness_max: int
    dropped: int  # gradients that came after their round was closed


@dataclass(frozen=True)
class Data(TaskEvent):
    """Samples in all gradients that were applied, and how many an undisturbed run would have had. Told by the chief."""

    samples: int
    planned: int


REPORTS: tuple[type[TaskEvent], ...] = (
    Ready, Total, Step, Metrics, Said, Mismatch, Joined, Finished, Evaluating, Account, Data
)  # fmt: skip


def parse(line: str | bytes) -> Event:
    """The event that ``line`` says. Raises ValueError for anything else."""
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError(f"not an event: {line!r}")
    kind = Event.kinds.get(str(told.pop("kind", "")))
    if kind is None:
        raise ValueError(f"not an event: {line!r}")
    try:
        return kind(**told)
    except TypeError as error:
        raise ValueError(f"not an event: {line!r} ({error})") from None


def report_fields(kind: type[TaskEvent]) -> tuple[str, ...]:
    """The fields that a task itself fills in; the agent adds time, task and attempt."""
    return tuple(f.name for f in fields(kind) if f.name not in ("at", "task", "attempt"))


# --- what to do


@dataclass(frozen=True)
class Start:
    task: str
    attempt: int


@dataclass(frozen=True)
class Release:
    task: str


@dataclass(frozen=True)
class Conclude:
    """Tell the evaluator that training ended at global step ``step``."""

    task: str
    step: int


@dataclass(frozen=True)
class Stop:
    task: str
    why: str
    grace: float  # seconds between TERM and KILL
    blame: bool = False  # it counts as a failure of the task


@dataclass(frozen=True)
class Finish:
    ok: bool


Action = Start | Release | Conclude | Stop | Finish
