"""Which runs of a v1 session are steps of training, and what of them is reported.

A run of the session counts as a step when it reaches the train op: the op that an optimizer of ``tf.train`` returned,
or one that adds to the global step. Global step and loss are asked for four times a second, in a run that trains
anyway: one that only evaluates is never touched. The loss is asked for only if that costs nothing and changes
nothing: everything it needs that is fed, drawn or taken from a queue, the run computes in any case.

The global step is read beside its own update, so it may be one behind; the last read, as the session closes, is exact.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from muster.train.report import EVERY, Channel

WARM = 2
READS = ("Variable", "VariableV2", "VarHandleOp", "ReadVariableOp", "ResourceGather", "VarIsInitializedOp")


@dataclass
class Notes:
    """What the optimizers were given and gave back, in one graph."""

    train: list[Any] = field(default_factory=list)
    loss: Any = None
    step: Any = None
    sync: bool = False


_notes: "weakref.WeakKeyDictionary[Any, Notes]" = weakref.WeakKeyDictionary()


def notes(graph: Any) -> Notes:
    return _notes.setdefault(graph, Notes())


# --- the graph


def ancestors(ops: Iterable[Any]) -> set[Any]:
    """All operations that a run of ``ops`` computes, themselves included."""
    seen: set[Any] = set()
    ahead = list(ops)
    while ahead:
        op = ahead.pop()
        if op not in seen:
            seen.add(op)
            ahead.extend(tensor.op for tensor in op.inputs)
            ahead.extend(op.control_inputs)
    return seen


def trains(computed: set[Any], known: Notes, step: Any) -> bool:
    """Whether a run that computes these operations is a step of training."""
    if any(op in computed for op in known.train):
        return True
    return step is not None and any(op.type.startswith("AssignAdd") and op.inputs[0].op is step.op for op in computed)


def costs_nothing(loss: Any, computed: set[Any]) -> bool:
    """Whether ``loss`` can be fetched beside a run that computes these operations, and changes nothing there."""
    if loss.shape.rank != 0:
        return False
    return all(op in computed for op in ancestors([loss.op]) if _matters(op))


def _matters(op: Any) -> bool:
    if op.type == "Placeholder" or op.type.startswith(("Assign", "Scatter")):
        return True
    return bool(op.op_def.is_stateful) and op.type not in READS


# --- the steps of one session


class Progress:
    """Follows the runs of one session: ask ``before`` what else to fetch, give ``after`` what came of it.

    ``judge(fetches)`` says what a report needs beside a run of them; nothing if that run does not train. ``when_warm``
    is called after the second step: by then the session has prepared both runs it makes, with a report and without.
    """

    def __init__(
        self,
        judge: Callable[[Any], dict[str, Any]],
        to: Channel,
        clock: Callable[[], float] = time.monotonic,
        when_warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._judge, self._to, self._clock, self._when_warm = judge, to, clock, when_warm
        self._runs: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
        self._due = 0.0
        self.local = 0
        self._loss: float | None = None

    def before(self, fetches: Any) -> dict[str, Any]:
        """What to fetch beside ``fetches``: nothing, unless the run trains and a report is due."""
        extra = self._extra(fetches)
        return extra if extra and self._clock() >= self._due else {}

    def after(self, fetches: Any, seen: Mapping[str, Any] | None) -> None:
        """The run went well. ``seen`` is what ``before`` asked for, if it did."""
        if not self._extra(fetches):
            return
        self.local += 1
        if seen:
            self._due = self._clock() + EVERY
            self._loss = seen.get("loss")
            self._to.step(seen["step"], self.local, self._loss)
        if self.local == WARM:
            self._when_warm()

    def close(self, step: int) -> None:
        """``step`` is exact. Sent at once: it is the last."""
        self._to.step(step, self.local, self._loss)
        self._to.flush()

    def _extra(self, fetches: Any) -> dict[str, Any]:
        """What ``judge`` says, looked up, since it is asked at every run."""
        elements = tuple(fetches) if isinstance(fetches, (list, tuple)) else (fetches,)
        key = tuple(each if isinstance(each, str) else id(each) for each in elements)
        if key not in self._runs:
            self._runs[key] = (elements, self._judge(fetches))  # holding the elements, so that no id is used again
        return self._runs[key][1]


def judge(graph: Any) -> Callable[[Any], dict[str, Any]]:
    """For ``Progress``: global step and loss, if a run of the fetches is a step of training in ``graph``."""

    def of(fetches: Any) -> dict[str, Any]:
        known, step = notes(graph), global_step(graph)
        computed = ancestors(_ops(graph, fetches))
        if step is None or not trains(computed, known, step):
            return {}
        loss = known.loss
        return {"step": step, **({"loss": loss} if loss is not None and costs_nothing(loss, computed) else {})}

    return of


def global_step(graph: Any) -> Any:
    """The registered one, else the one that an optimizer was given, else None."""
    try:
        step = import_module("tensorflow.python.training.training_util").get_global_step(graph)
    except TypeError:  # registered, but no whole number: TensorFlow says so to those who use it, which we need not do
        step = None
    return notes(graph).step if step is None else step


def _ops(graph: Any, fetches: Any) -> list[Any]:
    """The operations behind ``fetches``, however nested. What a session would refuse is left to the session."""
    nest = import_module("tensorflow.python.util.nest")
    found = []
    for each in nest.flatten(fetches, expand_composites=True):
        try:
            element = graph.as_graph_element(each)
        except (TypeError, ValueError, KeyError):
            continue
        found.append(getattr(element, "op", element))
    return found
