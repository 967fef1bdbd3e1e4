"""Who am I? What a task knows of its run, from the environment that its agent gave it.

The same script runs alone, without Muster: then there is one worker, it has index 0 and it is the chief.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALONE = "worker/0"


@dataclass(frozen=True)
class Context:
    """``cluster`` maps a role to the addresses of its tasks (empty when alone); ``chief`` is a task's id."""

    run: str = ""
    task: str = ALONE
    attempt: int = 1
    cluster: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chief: str = ALONE
    engine: str = ""
    kind: str = ""
    mode: str = "async"
    spare: int = 0
    max_staleness: int | None = None
    checkpoints: str = ""
    evaluator: bool = False  # whether the run has one

    @property
    def alone(self) -> bool:
        return not self.cluster

    @property
    def role(self) -> str:
        return self.task.partition("/")[0]

    @property
    def index(self) -> int:
        return int(self.task.partition("/")[2])

    @property
    def is_chief(self) -> bool:
        return self.task == self.chief

    @property
    def chief_computes(self) -> bool:
        """MultiWorkerMirroredStrategy counts a separate chief as its first worker; the other kinds do not."""
        return self.kind == "mwms" and "chief" in self.cluster

    @property
    def workers(self) -> int:
        return max(len(self.cluster.get("worker", ())) + self.chief_computes, 1)

    @property
    def worker_index(self) -> int:
        return self.index + (self.chief_computes and self.role == "worker")


def context(environ: Mapping[str, str] | None = None) -> Context:
    """The context that the environment describes; ``Context()`` for a script that runs alone."""
    env = os.environ if environ is None else environ
    if "MUSTER_TASK" not in env or "MUSTER_CLUSTER" not in env:
        return Context()
    told: dict[str, Any] = json.loads(env["MUSTER_CLUSTER"])
    known = ("chief", "engine", "kind", "mode", "spare", "max_staleness", "checkpoints", "evaluator")
    return Context(
        run=env.get("MUSTER_RUN", ""),
        task=env["MUSTER_TASK"],
        attempt=int(env.get("MUSTER_ATTEMPT", "1")),
        cluster={role: tuple(addresses) for role, addresses in told.get("cluster", {}).items()},
        **{name: told[name] for name in known if name in told},
    )


def task() -> str:
    """The id of this task, such as ``worker/1``."""
    return context().task


def worker_index() -> int:
    """Which of the ``workers()`` this task is, from 0; for another role its index there. Alone: 0."""
    return context().worker_index


def workers() -> int:
    """How many tasks share the training data. Alone: 1."""
    return context().workers


def is_chief() -> bool:
    """Whether this task is the one that saves, evaluates and reports results. Alone: True."""
    return context().is_chief
