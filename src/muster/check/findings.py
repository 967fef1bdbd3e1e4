"""The nouns of a check: what the plan wants of each host, what was heard, and what it means. Pure values."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "unknown"]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What the plan puts on one host. ``address`` is what other tasks dial; ``ports`` are by task ("ps/0")."""

    host: str
    address: str
    python: str
    cwd: str = ""
    script: str = ""
    checkpoints: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()  # indices that tasks on this host get
    names: tuple[str, ...] = ()  # further names that must mean the same everywhere
    tasks: tuple[str, ...] = ()  # all that run here, also those without a port
    bind: str = ""  # the address that tasks listen at, if not ``address``,
    bound: Mapping[str, int] = field(default_factory=dict)  # and their ports, where others than ``ports``
    env: Mapping[str, str] = field(default_factory=dict)  # what the plan gives them, as far as a rule wants to know

    def listens(self) -> list[tuple[str, str, int]]:
        """(task, address, port) of each that listens, as it is on the host itself."""
        return [(task, self.bind or self.address, self.bound.get(task, port)) for task, port in self.ports.items()]


@dataclass(frozen=True)
class Job:
    """What of the run matters to a check. ``parameters`` is the size of the model whose step time is foretold."""

    engine: Literal["muster", "tensorflow"] = "muster"
    kind: Literal["v1", "pss", "mwms"] = "v1"
    parameters: int = 1_000_000


@dataclass(frozen=True)
class Finding:
    """One row: what is wrong at ``host`` (towards ``peer``, where it is about a pair), because of what, and what to
    try.

    ``kind`` is a word for programs that stays the same when the sentences change.
    """

    severity: Severity
    host: str
    what: str
    because: str
    try_: str
    kind: str = ""
    peer: str = ""


@dataclass(frozen=True)
class Need:
    """Tasks on ``src`` dial ``task`` on ``dst``. Without a task nobody needs it: it was tried to learn which way is
    cut."""

    src: str
    dst: str
    task: str
    address: str
    port: int
    bound: int = 0  # the port of ``dst`` that this one leads to, where it is another

    @property
    def id(self) -> str:
        return f"{self.dst} {self.port}"


@dataclass(frozen=True)
class Reach:
    """What became of one ``Need``: ``outcome`` as ``pairs.knock`` has it."""

    need: Need
    outcome: str
    because: str = ""


@dataclass(frozen=True)
class Link:
    """One measured pair. ``forth`` is a to b. Loss is a share; None where it was not measured."""

    a: str
    b: str
    rtt_p50: float | None = None  # ms
    rtt_p99: float | None = None
    rtt_min: float | None = None
    pings: int = 0
    loss_forth: float | None = None
    loss_back: float | None = None
    segments: int = 0
    mbit_forth: float | None = None
    mbit_back: float | None = None
    error: str = ""

    @property
    def loss(self) -> float:
        return max(self.loss_forth or 0.0, self.loss_back or 0.0)

    @property
    def mbit(self) -> float | None:
        known = [mbit for mbit in (self.mbit_forth, self.mbit_back) if mbit is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Pairs:
    reaches: tuple[Reach, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Limit:
    """From ``warning`` on it is worth a row, from ``error`` on the run would not be worth starting."""

    warning: float
    error: float
    below: bool = False  # too little is the trouble, not too much

    def severity(self, value: float | None) -> Severity | None:
        if value is None:
            return None
        sign = -1 if self.below else 1
        if sign * value >= sign * self.error:
            return "error"
        return "warning" if sign * value >= sign * self.warning else None


# The one table of numbers. Loss: 1 % halves the rate of a softmax model (measured), 5 % costs nine tenths; three lost
# segments of a thousand are more than chance. Round trip: within one building it is under 1 ms, and a step of a small
# model takes 0.2 ms. Bandwidth: under 200 Mbit/s a card has fallen back to 100. Clock: certificates made for the run
# are valid from one minute before they are made.
LIMITS: Mapping[str, Limit] = {
    "clock s": Limit(2.0, 60.0),
    "rtt ms": Limit(5.0, 500.0),
    "loss": Limit(0.003, 0.2),
    "mbit": Limit(200.0, 5.0, below=True),
    "open files": Limit(1023, 63, below=True),
    "disk GiB": Limit(2.0, 0.1, below=True),
    "gpu memory used": Limit(0.1, 2.0),
}
OLDEST_PYTHON = (3, 10)


def needs(wanted: Sequence[Wanted], job: Job) -> list[Need]:
    """Every (host, port) that tasks of another host will dial.

    Muster's workers dial each ps and nobody else. TensorFlow's tasks dial one another, ps to worker too.
    """
    return [
        Need(src.host, dst.host, task, dst.address, port, dst.bound.get(task, port))
        for dst in wanted
        for task, port in dst.ports.items()
        for src in wanted
        if src.host != dst.host and dials(src, task, job)
    ]


def dials(src: Wanted, task: str, job: Job) -> bool:
    if job.engine == "tensorflow":
        return bool(roles(src) - {"evaluator"})  # which reads checkpoints, and dials nobody
    return task.startswith("ps/") and bool(roles(src) - {"ps"})


def roles(wanted: Wanted) -> set[str]:
    return {task.partition("/")[0] for task in (*wanted.tasks, *wanted.ports)}


def trains(wanted: Wanted, job: Job) -> bool:
    """Does a task here need TensorFlow and the script? A ps of ours needs NumPy only."""
    return job.engine == "tensorflow" or bool(roles(wanted) - {"ps"})


def dialled(wanted: Sequence[Wanted]) -> list[str]:
    """The names, not plain addresses, that must mean the same on every host."""
    names = dict.fromkeys(name for w in wanted for name in (w.address, *w.names))
    return [name for name in names if not is_address(name)]


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(text: str) -> bool:
    return is_address(text) and ipaddress.ip_address(text).is_loopback


def chief_host(wanted: Sequence[Wanted]) -> str:
    """The host that the others are compared with when there is no majority."""
    for task in ("chief/0", "worker/0", "ps/0"):
        for w in wanted:
            if task in w.tasks or task in w.ports:
                return w.host
    return wanted[0].host if wanted else ""


def usual(values: Mapping[str, Any], chief: str) -> Any:
    """The commonest value; on a tie the chief's, else the first."""
    counted: dict[Any, int] = {}
    for value in values.values():
        counted[value] = counted.get(value, 0) + 1
    most = max(counted.values(), default=0)
    best = [value for value, count in counted.items() if count == most]
    return values[chief] if chief in values and values[chief] in best else (best or [None])[0]


def odd(values: Mapping[str, Any], chief: str) -> Iterator[tuple[str, Any]]:
    """The hosts whose value is not the usual one."""
    reference = usual(values, chief)
    return ((host, value) for host, value in values.items() if value != reference)
