"""Sessions of a v1 script: their steps are reported, and they wait at the start barrier for each other.

Three ways lead to a session. A MonitoredSession takes hooks, so it gets one of ours. One that a Supervisor prepares,
and one that the script makes itself, are followed by way of their ``run``.

The barrier stands after the second step of each worker. A session prepares each kind of run when it comes the first
time, which takes as long as hundreds of steps: where the barrier stands before that, a worker may find all the work
done by the others. In sync mode no one can be left behind, and one that stands still holds up all; so there, and where
nothing is trained, the barrier stands before the first step.
"""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from muster.train.imports import wrap
from muster.train.report import channel
from muster.train.steps import Progress, global_step, judge, notes

CLOSING = 5000  # milliseconds that the last read of the global step may take: a ps may have ended before us
NEAR = 200  # steps before the end from which on every worker looks where the run is, after each step

_made_by = threading.local()  # .manager: a SessionManager is making a session, for someone who is watched already


class StepHook:
    """A SessionRunHook in all but name (TensorFlow asks for the methods only, and is not imported here)."""

    def __init__(self, graph: Any, tf: Any) -> None:
        self._graph, self._tf = graph, tf
        self._progress = progress_of(graph)

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
        report_last(session.run, self._graph, self._progress)


def progress_of(graph: Any) -> Progress:
    """Follows a session on ``graph``, and holds it at the barrier when its runs are prepared."""
    return Progress(judge(graph), channel(), when_warm=channel().ready)


def warms_up(graph: Any) -> bool:
    """Whether the barrier can wait for the second step."""
    return bool(notes(graph).train) and not notes(graph).sync


def report_last(run: Callable[..., Any], graph: Any, progress: Progress) -> None:
    """Read the global step once more, now that this session is about to close."""
    tf, step = import_module("tensorflow.compat.v1"), global_step(graph)
    if step is None or not progress.local:
        return
    try:
        progress.close(int(run(step, options=tf.RunOptions(timeout_in_ms=CLOSING))))
    except (tf.errors.OpError, RuntimeError):
        pass  # the ps that holds it has ended: what was reported last stays the last


def watch_sessions() -> None:
    """Report what the sessions of the script do, and hold them at the start barrier once they are ready."""
    _watch_optimizers()
    _watch_monitored()
    _stop_in_time()
    _watch_supervisor()
    _watch_plain()


def _watch_optimizers() -> None:
    plain_optimizer = import_module("tensorflow.python.training.optimizer").Optimizer
    sync_optimizer = import_module("tensorflow.python.training.sync_replicas_optimizer").SyncReplicasOptimizer
    wrap(plain_optimizer, "compute_gradients", _note_loss)
    wrap(plain_optimizer, "apply_gradients", _note_train)
    wrap(sync_optimizer, "apply_gradients", _note_train)
    wrap(sync_optimizer, "apply_gradients", _note_sync)


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


def _note_sync(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    made = plain(self, *args, **kwargs)
    notes(made.graph).sync = True
    return made


def _watch_monitored() -> None:
    lib = import_module("tensorflow.python.training.monitored_session")
    tf = import_module("tensorflow.compat.v1")

    def init(plain: Any, self: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
        graph = tf.get_default_graph()
        own = StepHook(graph, tf)
        plain(self, session_creator, [own, *(hooks or [])], *args, **kwargs)
        for hook in hooks or []:
            if isinstance(hook, tf.train.StopAtStepHook) and hook._last_step is not None:
                channel().tell("Total", steps=int(hook._last_step))
        if not warms_up(graph):
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
        if not warms_up(session.graph):
            channel().ready()
        follow(session, progress_of(session.graph))
        return session

    wrap(lib.Supervisor, "prepare_or_wait_for_session", prepare)


def _watch_plain() -> None:
    """Sessions that the script makes itself on a server of the cluster."""
    session = import_module("tensorflow.python.client.session").BaseSession
    manager = import_module("tensorflow.python.training.session_manager").SessionManager

    def managed(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _made_by.manager = True
        try:
            return plain(self, *args, **kwargs)
        finally:
            _made_by.manager = False

    def init(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if not getattr(_made_by, "manager", False) and (self._target or b"").startswith(b"grpc"):
            follow(self, progress_of(self.graph))

    for name in ("prepare_session", "recover_session", "wait_for_session"):
        wrap(manager, name, managed)
    wrap(session, "__init__", init)


def follow(session: Any, progress: Progress) -> None:
    """Report the steps of a session that takes no hooks."""
    plain_run, plain_close = session.run, session.close

    def run(fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        extra = progress.before(fetches)
        asked = (fetches, extra) if extra else fetches
        result = plain_run(asked, feed_dict=feed_dict, options=options, run_metadata=run_metadata)
        result, seen = result if extra else (result, None)
        progress.after(fetches, seen)
        return result

    def close() -> None:
        report_last(plain_run, session.graph, progress)
        plain_close()

    session.run, session.close = run, close
