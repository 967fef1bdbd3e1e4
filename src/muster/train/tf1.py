"""``--tf1``: a script for TensorFlow 1 runs as it is on TensorFlow 2.

``import tensorflow`` gives the v1 API: the names of ``tensorflow.compat.v1`` are laid over those of the module itself,
rather than put in its place, so that ``tensorflow.python``, ``tensorflow.keras`` and ``tensorflow.compat`` stay where
imports look for them. What no longer exists is refused by name, with what replaces it.

And what every between-graph script should have had, and few did:

* *Device filters.* Without them a session first talks to every task of the cluster: one worker that is late, or has
  ended, holds up all. With them a worker needs the ps, itself and the chief where there is one.
* *A recovery wait of 1 s.* A worker that asks a moment before the chief has initialised would sleep for 30 s.
* *A global step.* ``minimize(global_step=tf.Variable(0))`` counts in a variable that no hook can find, since nobody
  registered it; it is registered here.
"""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from muster.errors import MusterError
from muster.train import gone
from muster.train.context import Context
from muster.train.imports import Refuse, first, where, wrap
from muster.train.report import channel

RECOVERY_WAIT = 1.0
TENSORFLOW_WAIT = 30  # SessionManager's and Supervisor's own default
STOP_WAIT = 120  # a closing session's own default for threads that are still at work
SYNC_STOP_WAIT = 1
KEPT = ("compat",)  # of the two `compat`, the one that has both v1 and v2


def install(tensorflow: ModuleType, me: Context) -> None:
    """Called when TensorFlow has just been imported, by the script."""
    api = import_module("tensorflow").compat.v1
    _keras(tensorflow)
    _lay_over(tensorflow, api)
    _without_v2(api)
    gone.install(tensorflow)
    adopt_global_step(api, me)
    shorten_waits()
    if not me.alone:
        filter_devices(device_filters(me), api, with_server=me.role != "ps")


# --- names


def _lay_over(tensorflow: ModuleType, api: Any) -> None:
    for name, value in vars(api).items():
        if not name.startswith("_") and name not in KEPT:
            setattr(tensorflow, name, value)
    # `import tensorflow.train` looks on disk, where v2 comes first; `tensorflow.compat` itself must stay the whole one.
    sys.modules.setdefault("tensorflow.compat", tensorflow.compat)
    tensorflow.__path__.insert(0, str(Path(api.__file__).parent))


def _without_v2(api: Any) -> None:
    """The script did not ask for this call, so it need not be told that it is deprecated."""
    with import_module("tensorflow.python.util.deprecation").silence():
        api.disable_v2_behavior()


def _keras(tensorflow: ModuleType) -> None:
    """``tf.keras`` of a TF 1 script is Keras 2, which is the package tf_keras now."""
    spec = importlib.util.find_spec("tf_keras")
    if spec is None:
        first(Refuse(["tf_keras", "tensorflow.keras"], no_keras))
    elif spec.submodule_search_locations:
        tensorflow.__path__.insert(0, str(Path(spec.submodule_search_locations[0], "api", "_v1")))


def no_keras(name: str) -> MusterError:
    return MusterError(
        f"the script uses {name.replace('tf_keras', 'tf.keras')}, and the package tf_keras is not installed",
        at=where() or sys.executable,
        because="TensorFlow 2.16 and later come with Keras 3, which cannot train in v1 sessions",
        try_=f"{sys.executable} -m pip install tf_keras   (of the same version as TensorFlow)",
    )


# --- sessions


def device_filters(me: Context) -> list[str]:
    """The tasks that a session of this one needs: the ps, itself, and the chief where there is one."""
    jobs = ["/job:ps"] if "ps" in me.cluster else []
    chief = ["/job:chief"] if "chief" in me.cluster and me.role != "chief" else []
    return [*jobs, f"/job:{me.role}/task:{me.index}", *chief]


def filter_devices(filters: list[str], api: Any, with_server: bool) -> None:
    """Give the filters to every session on a server of the cluster, and to the servers' own; the user's come first."""
    context = import_module("tensorflow.python.eager.context")  # holds what tf.config was told, the default of sessions
    session = import_module("tensorflow.python.client.session").BaseSession
    server = import_module("tensorflow.python.training.server_lib").Server

    def filtered(config: Any) -> Any:
        if config is not None and config.device_filters:
            return config
        merged = api.ConfigProto()
        merged.CopyFrom(context.context().config if config is None else config)
        merged.device_filters.extend(filters)
        return merged

    def session_init(plain: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        remote = str(target or "").startswith("grpc") or (isinstance(target, bytes) and target.startswith(b"grpc"))
        plain(self, target, graph, filtered(config) if remote and _is_config(config, api) else config)

    def server_init(plain: Any, self: Any, definition: Any, *args: Any, **kwargs: Any) -> None:
        names = ("job_name", "task_index", "protocol", "config", "start")
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        given["config"] = filtered(given.get("config"))
        plain(self, definition, **given)

    wrap(session, "__init__", session_init)
    if with_server:
        wrap(server, "__init__", server_init)


def _is_config(config: Any, api: Any) -> bool:
    """What is no config is TensorFlow's to refuse, in its own words."""
    return config is None or isinstance(config, api.ConfigProto)


def shorten_waits() -> None:
    """Waits that TensorFlow has at their defaults; a value that the script chose stays."""
    manager = import_module("tensorflow.python.training.session_manager").SessionManager
    monitored = import_module("tensorflow.python.training.monitored_session")._MonitoredSession

    def init(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self._recovery_wait_secs == TENSORFLOW_WAIT:
            self._recovery_wait_secs = RECOVERY_WAIT

    def monitored_init(plain: Any, self: Any, creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("stop_grace_period_secs") == STOP_WAIT and _has_sync(hooks):
            kwargs["stop_grace_period_secs"] = SYNC_STOP_WAIT
        plain(self, creator, hooks, *args, **kwargs)

    wrap(manager, "__init__", init)
    wrap(monitored, "__init__", monitored_init)


def _has_sync(hooks: Any) -> bool:
    """SyncReplicasOptimizer's thread waits for gradients that come no more, until the session closes."""
    return any(type(hook).__name__ == "_SyncReplicasOptimizerHook" for hook in hooks or [])


# --- the global step


def adopt_global_step(api: Any, me: Context) -> None:
    """Register the variable that an optimizer is given to count in, where the graph has no global step."""
    optimizer = import_module("tensorflow.python.training.optimizer").Optimizer
    sync = import_module("tensorflow.python.training.sync_replicas_optimizer").SyncReplicasOptimizer

    def apply(plain: Any, self: Any, pairs: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> Any:
        if adoptable(global_step) and not global_step.graph.get_collection(api.GraphKeys.GLOBAL_STEP):
            global_step.graph.add_to_collection(api.GraphKeys.GLOBAL_STEP, global_step)
            if me.is_chief:  # all workers would say the same
                channel().say(f"took {global_step.name}, given to minimize(global_step=...), as the global step")
        return plain(self, pairs, global_step, *args, **kwargs)

    wrap(optimizer, "apply_gradients", apply)
    wrap(sync, "apply_gradients", apply)


def adoptable(step: Any | None) -> bool:
    """A scalar whole number that belongs to a graph."""
    if step is None or getattr(step, "graph", None) is None:
        return False
    return bool(step.dtype.base_dtype.is_integer) and step.shape.rank == 0
