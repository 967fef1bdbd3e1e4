"""The evaluator: a task beside the training that reads its checkpoints, and ends when the last one is done.

Left to itself such a loop never ends: it watches a folder, and a folder does not say that nothing will come any more.
So users give it the last step, which it may never see, or kill it. Here the launcher knows when training has ended, and
says so down the pipe; ``tf.train.checkpoints_iterator``, of which ``SidecarEvaluator`` and most such loops are made,
then gives the newest checkpoint if it has not yet, and ends. Asking comes before looking: what is newest after training
has ended is the last one.
"""

import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from muster.errors import Refused
from muster.train.context import Context, context
from muster.train.imports import where, wrap
from muster.train.report import Channel, channel

EVERY = 1.0  # seconds between looks into the folder, as TensorFlow has it


def training_ended() -> bool:
    """For an evaluator with a loop of its own: whether training has ended, so that the newest checkpoint is the last.

    Ask before you look for the newest checkpoint. Alone: True, since nobody trains. Other tasks are not told: False.
    """
    return context().alone or channel().over() is not None


def final_step() -> int | None:
    """The global step at which training ended (0 where no task reported any); None before, and alone."""
    return channel().over()


def install(me: Context) -> None:
    """Called when TensorFlow has just been imported, by the script of an evaluator."""
    watch_checkpoints()
    if me.kind == "pss":
        strategy = import_module("tensorflow.python.distribute.parameter_server_strategy_v2").ParameterServerStrategyV2
        wrap(strategy, "__init__", _second_coordinator)
    if me.kind == "mwms":
        strategy = import_module("tensorflow.python.distribute.collective_all_reduce_strategy")
        wrap(strategy.CollectiveAllReduceStrategy, "__init__", _strategy_of_one)


def watch_checkpoints() -> None:
    """Put ours in the place of ``checkpoints_iterator``, under each name that a module of TensorFlow has for it."""
    plain = import_module("tensorflow.python.training.checkpoint_utils").checkpoints_iterator
    latest = import_module("tensorflow.python.checkpoint.checkpoint_management").latest_checkpoint

    def checkpoints_iterator(
        checkpoint_dir: str,
        min_interval_secs: float = 0,
        timeout: float | None = None,
        timeout_fn: Callable[[], bool] | None = None,
    ) -> Iterator[str]:
        return checkpoints(channel(), lambda: latest(checkpoint_dir), min_interval_secs, timeout, timeout_fn)

    checkpoints_iterator.__doc__ = plain.__doc__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("checkpoints_iterator") is plain:
            module.__dict__["checkpoints_iterator"] = checkpoints_iterator


def checkpoints(
    agent: Channel,
    latest: Callable[[], str | None],
    min_interval: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    every: float = EVERY,
) -> Iterator[str]:
    """What ``tf.train.checkpoints_iterator`` gives, until training has ended; then the last one, and no more."""
    done: str | None = None
    agent.tell("Evaluating", checkpoint="")
    while True:
        found = _next(agent, latest, done, timeout, every)
        if found is not None:
            done, began = found, time.monotonic()
            agent.tell("Evaluating", checkpoint=str(found))
            yield found
            agent.tell("Evaluating", checkpoint="")
            _pause(agent, began + min_interval - time.monotonic())
        elif timeout_fn is None or agent.over() is not None:
            return
        if timeout_fn is not None and agent.over() is None and timeout_fn():
            return


def _next(
    agent: Channel, latest: Callable[[], str | None], done: str | None, timeout: float | None, every: float
) -> str | None:
    until = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        over = agent.over() is not None
        found = latest()
        if found is not None and found != done:
            return found
        if over or time.monotonic() + every > until:
            return None
        _pause(agent, every)


def _pause(agent: Channel, seconds: float) -> None:
    """Wait, unless training has ended."""
    end = time.monotonic() + seconds
    if agent.over(seconds) is None and (left := end - time.monotonic()) > 0:
        time.sleep(left)  # there is no agent to wait for


# --- what an evaluator must not make


def not_in_cluster(what: str) -> Refused:
    return Refused(
        f"the evaluator makes {what}, and it is no task of the training cluster",
        at=where(),
        because="an evaluator stands beside the cluster: it reads checkpoints, and no other task knows of it",
        try_='let it go its own way before that line: if task_type == "evaluator",\n'
        "for path in tf.train.checkpoints_iterator(folder): ...   (examples/v1_evaluator.py)",
    )


def _second_coordinator(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    raise not_in_cluster("a ParameterServerStrategy")


def _strategy_of_one(plain: Any, self: Any, cluster_resolver: Any = None, *args: Any, **kwargs: Any) -> None:
    """Scripts make this strategy in their first lines, whatever task they are: it has this task's own devices here."""
    distribute = import_module("tensorflow.python.distribute.cluster_resolver.cluster_resolver")
    spec = import_module("tensorflow.python.training.server_lib").ClusterSpec({})
    me = context()
    plain(self, distribute.SimpleClusterResolver(spec, task_type=me.role, task_id=me.index), *args, **kwargs)
