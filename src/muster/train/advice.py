"""What a few of TensorFlow's own errors mean, for those who meet them the first time.

Each row is a report that many people have filed. The traceback is theirs and comes first; this is one notice beside it.
"""

import sys
from collections.abc import Callable, Sequence

from muster.train import roles

KERAS_3 = (
    "Keras 3 does not train under ParameterServerStrategy or MultiWorkerMirroredStrategy with fit: "
    "install tf_keras and set TF_USE_LEGACY_KERAS=1, write the training loop yourself, or use muster.fit"
)


def _keras_3() -> str:
    return KERAS_3 if "keras" in sys.modules and "tf_keras" not in sys.modules else ""


def _too_late() -> str:
    used = roles.first_use()
    return "TensorFlow was used before the strategy was made" + (
        f" ({used}): make the strategy first, at the top of the script" if used else ": make the strategy first"
    )


def _version_1() -> str:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not tensorflow.executing_eagerly():  # under --tf1, where what is missing is missing
        return ""
    return "if this script was written for TensorFlow 1: muster run --tf1 gives it the v1 API"


ROWS: Sequence[tuple[str, Callable[[], str]]] = (
    ("Collective ops must be configured at program startup", _too_late),
    ("PerReplica", _keras_3),
    ("module 'tensorflow' has no attribute", _version_1),
    ("module 'tensorflow._api.v2", _version_1),
    ("create_per_worker_dataset", _keras_3),
)


def on(error: BaseException) -> str | None:
    """A sentence on what ``error`` most likely means, or None."""
    text = str(error)
    return next((hint for words, make in ROWS if words in text and (hint := make())), None)
