"""The script must be the task that it was started as, in the cluster of the plan.

Three quiet faults end here. A script with its role written into it becomes worker 0 a second time. One whose cluster
differs from the plan waits for tasks that nobody starts. One that makes its strategy too early, or not at all, trains
alone, once per worker, and exits 0.

Everything patches methods of TensorFlow's classes in place, so that it holds under whatever name a script has them.
"""

import functools
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from muster.errors import MusterError, RunFailed
from muster.train import evaluator
from muster.train.context import Context
from muster.train.imports import where, wrap
from muster.train.report import channel
from muster.train.sessions import watch_sessions

_made: list[str] = []  # strategies of several workers that the script has made
_first_use: list[str] = []

Addresses = Mapping[str, Sequence[str]]


def install(me: Context, replace_addresses: bool) -> None:
    """Called when TensorFlow has just been imported, by the script."""
    if me.alone:
        return
    check_server(me)
    if replace_addresses:
        take_addresses(me)
    if me.role == "evaluator":
        evaluator.install(me)
        return
    if me.kind == "v1":
        watch_sessions()
    if me.kind in ("pss", "mwms"):
        watch_strategies(me)


# --- one task, one server


def check_server(me: Context) -> None:
    lib = import_module("tensorflow.python.training.server_lib")

    def init(plain: Any, self: Any, server_or_cluster_def: Any, *args: Any, **kwargs: Any) -> None:
        claims = _claimed(lib, server_or_cluster_def, *args, **kwargs)
        if claims is not None and me.role == "evaluator":
            raise evaluator.not_in_cluster("a Server")
        if claims is not None and claims != me.task:
            channel().tell("Mismatch", claims=claims)
            raise mismatch(me.task, claims)
        plain(self, server_or_cluster_def, *args, **kwargs)

    def join(plain: Any, self: Any) -> None:
        if me.kind == "pss" and me.role == "worker":
            channel().tell("Ready")  # such a worker is a server: it takes its steps when the chief says so
        plain(self)

    wrap(lib.Server, "__init__", init)
    wrap(lib.Server, "join", join)


def _claimed(lib: Any, definition: Any, job: Any = None, index: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The id of the task that a Server with these arguments would be; None for one in no cluster but its own."""
    job, index = kwargs.get("job_name", job), kwargs.get("task_index", index)
    made = lib._make_server_def(definition, job, index, None, None)
    jobs = made.cluster.job
    if len(jobs) == 1 and jobs[0].name in ("localhost", "local") and len(jobs[0].tasks) == 1:
        return None
    return f"{made.job_name}/{made.task_index}"


def mismatch(task: str, claims: str) -> MusterError:
    job, _, index = claims.partition("/")
    return MusterError(
        f"this task is {task}, but the script made itself {claims}",
        at=where(),
        because=f"it calls Server with job_name={job!r} and task_index={index}, whatever task it is started as",
        try_="let it take both from the command line (--job_name, --task_index; muster run --role-flags or --tf1),\n"
        "or from TF_CONFIG (tf.distribute.cluster_resolver.TFConfigClusterResolver)",
    )


# --- the plan's addresses


def take_addresses(me: Context) -> None:
    """Let every ClusterSpec of the script have the plan's addresses instead of those written into it."""
    lib = import_module("tensorflow.python.training.server_lib")

    def init(plain: Any, self: Any, cluster: Any) -> None:
        plain(self, cluster)
        written = {job: {index: self.task_address(job, index) for index in self.task_indices(job)} for job in self.jobs}
        planned = replaced(written, me.cluster, where(), me.evaluator)
        if planned is not None and planned != written:
            if me.is_chief:  # all tasks would say the same
                channel().say(_difference(written, planned))
            plain(self, planned)

    wrap(lib.ClusterSpec, "__init__", init)


def replaced(
    written: dict[str, dict[int, str]], plan: Addresses, at: str = "", beside: bool = False
) -> "dict[str, dict[int, str]] | None":
    """``written`` with the plan's addresses; None for a server that is in no cluster but its own.

    ``beside``: the run has an evaluator, which some scripts list and no cluster has.

    Raises MusterError where the two have not the same tasks. A sparse job may name some of its tasks only.
    """
    if list(written) in (["localhost"], ["local"]):
        return None
    if beside:
        written = {job: tasks for job, tasks in written.items() if job != "evaluator"}
    sizes = {job: max(tasks, default=-1) + 1 for job, tasks in written.items()}
    planned = {job: len(addresses) for job, addresses in plan.items()}
    if sizes != planned:
        raise MusterError(
            "the script's ClusterSpec and the plan have not the same tasks",
            at=at,
            because=f"script: {_sizes(sizes)}; plan: {_sizes(planned)}",
            try_="the job master is called chief since TensorFlow 2: rename it in the script"
            if "master" in sizes
            else "muster run --evaluator: the script has one"
            if "evaluator" in sizes
            else "give the run as many as the script has (--ps, --workers, or [run] of the cluster file)",
        )
    return {job: {index: plan[job][index] for index in tasks} for job, tasks in written.items()}


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{job} {size}" for job, size in sorted(sizes.items())) or "no task"


def _difference(written: dict[str, dict[int, str]], planned: dict[str, dict[int, str]]) -> str:
    pairs: list[tuple[str, str, str]] = [
        (f"{job}/{index}", address, planned[job][index])
        for job, tasks in written.items()
        for index, address in tasks.items()
        if job in planned and address != planned[job][index]
    ]
    return "ClusterSpec takes its addresses from the plan: " + ", ".join(f"{t} {a} -> {b}" for t, a, b in pairs)


# --- strategies


def watch_strategies(me: Context) -> None:
    """Check that a strategy of several workers has them all (TF_CONFIG is read when it is made, and only then)."""
    if me.kind == "mwms":
        lib = import_module("tensorflow.python.distribute.collective_all_reduce_strategy")
        wrap(lib.CollectiveAllReduceStrategy, "__init__", functools.partial(_mirrored, me))
        _note_first_use()
    else:
        lib = import_module("tensorflow.python.distribute.parameter_server_strategy_v2")
        wrap(lib.ParameterServerStrategyV2, "__init__", _parameter_server)


def _mirrored(me: Context, plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    spec = self.cluster_resolver.cluster_spec().as_dict() if self.cluster_resolver else {}
    seen = max(sum(len(spec.get(job, ())) for job in ("chief", "worker")), 1)
    if seen != me.workers:
        raise too_few(me.workers, seen)
    _made.append("mwms")
    channel().tell("Ready")  # no wait here: making the strategy has waited for all workers already


def _parameter_server(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    channel().tell("Ready")


def too_few(expected: int, seen: int) -> MusterError:
    return MusterError(
        f"expected {expected} workers, the strategy sees {seen}",
        at=where(),
        because="it read TF_CONFIG when it was made, and found another cluster there than the plan's",
        try_="leave TF_CONFIG alone in the script: Muster sets it before Python starts",
    )


def _note_first_use() -> None:
    """Remember which line of the script made TensorFlow's runtime start: the strategy must come before it."""
    owner = import_module("tensorflow.python.eager.context").Context
    plain = owner.ensure_initialized

    def ensure_initialized(self: Any) -> None:
        _first_use.append(where())
        owner.ensure_initialized = plain
        plain(self)

    owner.ensure_initialized = ensure_initialized


def first_use() -> str:
    return _first_use[0] if _first_use else ""


def at_end(me: Context) -> None:
    """The script has ended well. Raises RunFailed if it trained alone beside others who did the same."""
    if me.kind == "mwms" and me.workers > 1 and not _made and me.role in ("worker", "chief"):
        raise RunFailed(
            f"{me.task} ended without having made a MultiWorkerMirroredStrategy",
            because=f"so each of the {me.workers} workers trained alone",
            try_="make tf.distribute.MultiWorkerMirroredStrategy() at the top of the script;\n"
            "for a v1 session: --kind v1; for muster.fit: --engine muster",
        )
