"""What a v1 session does, seen from outside: its steps, its loss, its end; and the start barrier.

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

from muster.train.imports import wrap
from muster.train.report import EVERY, Channel, channel

CLOSING = 5000  # milliseconds that the last read of the global step may take: a ps may have ended before us
NEAR = 200  # steps before the end from which on every worker looks where the run is, after each step
READS = ("Variable", "VariableV2", "VarHandleOp", "ReadVariableOp", "ResourceGather", "VarIsInitializedOp")


@dataclass
class Notes:
    """What the optimizers were given and gave back, in one graph."""

    train: list[Any] = field(default_factory=list)
    loss: Any = None
    step: Any = None


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

    ``judge(fetches)`` says what a report needs beside a run of them; nothing if that run does not train.
    """

    def __init__(
        self, judge: Callable[[Any], dict[str, Any]], to: Channel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._judge, self._to, self._clock = judge, to, clock
        self._runs: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
        self._due = 0.0
        self._local = 0
        self._loss: float | None = None

    def before(self, fetches: Any) -> dict[str, Any]:
        """What to fetch beside ``fetches``: nothing, unless the run trains and a report is due."""
        extra = self._extra(fetches)
        return extra if extra and self._clock() >= self._due else {}

    def after(self, fetches: Any, seen: Mapping[str, Any] | None) -> None:
        """The run went well. ``seen`` is what ``before`` asked for, if it did."""
        if not self._extra(fetches):
            return
        self._local += 1
        if seen:
            self._due = self._clock() + EVERY
            self._loss = seen.get("loss")
            self._to.step(seen["step"], self._local, self._loss)

    def close(self, step: int) -> None:
        """``step`` is exact. Sent at once: it is the last."""
        if self._local:
            self._to.step(step, self._local, self._loss)
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
    step = import_module("tensorflow.python.training.training_util").get_global_step(graph)
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


# --- sessions


class StepHook:
    """A SessionRunHook in all but name (TensorFlow asks for the methods only, and is not imported here)."""

    def __init__(self, graph: Any, to: Channel, tf: Any) -> None:
        self._graph, self._tf = graph, tf
        self._progress = Progress(judge(graph), to)

    def begin(self) -> None:
        pass

    def after_create_session(self, session: Any, coord: Any) -> None:
        pass

    def before_run(self, run_context: Any) -> Any:
        extra = self._progress.before(run_context.original_args.fetches)
        return self._tf.train.SessionRunArgs(extra) if extra else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._progress.after(run_context.original_args.fetches, run_values.results)

    def end(self, session: Any) -> None:
        step = global_step(self._graph)
        if step is None:
            return
        try:
            options = self._tf.RunOptions(timeout_in_ms=CLOSING)
            self._progress.close(int(session.run(step, options=options)))
        except (self._tf.errors.OpError, RuntimeError):
            pass  # the ps that holds it has ended: what was reported last stays the last


def watch_sessions() -> None:
    """Report what monitored sessions and supervisors do, and hold them at the start barrier once they are ready."""
    _watch_optimizers()
    _watch_monitored()
    _stop_in_time()
    _watch_supervisor()


def _watch_optimizers() -> None:
    plain_optimizer = import_module("tensorflow.python.training.optimizer").Optimizer
    sync_optimizer = import_module("tensorflow.python.training.sync_replicas_optimizer").SyncReplicasOptimizer
    wrap(plain_optimizer, "compute_gradients", _note_loss)
    wrap(plain_optimizer, "apply_gradients", _note_train)
    wrap(sync_optimizer, "apply_gradients", _note_train)


def _note_loss(plain: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    graph = getattr(loss, "graph", None)  # none when the loss is a function: eager code
    if graph is not None and notes(graph).loss is None:
        notes(graph).loss = loss
    return plain(self, loss, *args, **kwargs)


def _note_train(plain: Any, self: Any, pairs: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> Any:
    made = plain(self, pairs, global_step, *args, **kwargs)
    graph = getattr(made, "graph", None)
    if graph is not None:
        known = notes(graph)
        known.train.append(getattr(made, "op", made))
        known.step = global_step if known.step is None else known.step
    return made


def _watch_monitored() -> None:
    lib = import_module("tensorflow.python.training.monitored_session")
    tf = import_module("tensorflow.compat.v1")

    def init(plain: Any, self: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
        own = StepHook(tf.get_default_graph(), channel(), tf)
        plain(self, session_creator, [own, *(hooks or [])], *args, **kwargs)
        for hook in hooks or []:
            if isinstance(hook, tf.train.StopAtStepHook) and hook._last_step is not None:
                channel().tell("Total", steps=int(hook._last_step))
        channel().ready()

    wrap(lib._MonitoredSession, "__init__", init)


def _stop_in_time() -> None:
    """Let a run end at most one step a worker late.

    StopAtStepHook judges by a global step that was read during the run, looks again only if that was the last but one,
    and so misses an end that others reach meanwhile. Near the end it looks again after every step.
    """
    lib = import_module("tensorflow.python.training.basic_session_run_hooks")

    def after_run(plain: Any, self: Any, run_context: Any, run_values: Any) -> None:
        left = self._last_step - (run_values.results + 1)
        if 0 < left <= NEAR and run_context.session.run(self._global_step_tensor) >= self._last_step:
            run_context.request_stop()
        plain(self, run_context, run_values)

    wrap(lib.StopAtStepHook, "after_run", after_run)


def _watch_supervisor() -> None:
    lib = import_module("tensorflow.python.training.supervisor")

    def prepare(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        session = plain(self, *args, **kwargs)
        follow(session, Progress(judge(session.graph), channel()))
        channel().ready()
        return session

    wrap(lib.Supervisor, "prepare_or_wait_for_session", prepare)


def follow(session: Any, progress: Progress) -> None:
    """Report the steps of a session that takes no hooks, by way of its ``run``."""
    plain = session.run

    def run(fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        extra = progress.before(fetches)
        asked = (fetches, extra) if extra else fetches
        result = plain(asked, feed_dict=feed_dict, options=options, run_metadata=run_metadata)
        result, seen = result if extra else (result, None)
        progress.after(fetches, seen)
        return result

    session.run = run
