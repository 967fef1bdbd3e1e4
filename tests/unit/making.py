"""Small things that many tests are made of: a cluster from a few words, its plan, a state with a history."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from muster.cluster import Cluster, Host, Run
from muster.clusterfile import from_raw
from muster.events import Event, Exited, Ready, Released, Spawned, Started, Step
from muster.placement import Facts
from muster.plan import Plan, Script, make_plan
from muster.state import State, blank
from muster.written import Source

SCRIPT = Script("/project/train.py")


def make(
    hosts: Iterable[Host] = (), facts: dict[str, Facts] | None = None, launcher: str = "local", **run: Any
) -> Plan:
    """A plan on ``hosts`` (by default: one machine) of a run with these settings."""
    cluster = Cluster(hosts=list(hosts), run=Run(**{"engine": "tensorflow", **run}), launcher=launcher)
    return make_plan(cluster, SCRIPT, "/project", facts, python="/usr/bin/python3")


def read(raw: dict[str, Any]) -> Cluster:
    """What a cluster file says that TOML would give as ``raw``."""
    return from_raw(raw, Source("cluster.toml"))


def started(plan: Plan, at: float = 0.0, attempt: int = 1) -> list[Event]:
    """Every task of ``plan`` is up."""
    told: list[Event] = []
    for name in plan.tasks:
        told += [Started(at, name, attempt), Spawned(at, name, attempt, 1)]
    return told


def stepping(plan: Plan, at: float = 1.0, step: int = 5, attempt: int = 1) -> list[Event]:
    """Every worker is past the start barrier and has reported ``step``."""
    told: list[Event] = []
    for task in plan.workers:
        told += [Ready(at, task.id, attempt), Released(at, task.id, attempt), Step(at, task.id, attempt, step, step)]
    return told


def dies(task: str, at: float, attempt: int = 1, code: int = 1, trace: str = "") -> Exited:
    error = trace.splitlines()[-1] if trace else ""
    return Exited(at, task, attempt, code, error, trace)


def after(plan: Plan, *events: Event | Iterable[Event]) -> State:
    """The state once all of ``events`` have happened."""
    state = blank(plan.tasks)
    for each in events:
        for event in [each] if isinstance(each, Event) else each:
            state.apply(event)
    return state


def written(folder: Path, text: str | bytes, name: str = "cluster.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
