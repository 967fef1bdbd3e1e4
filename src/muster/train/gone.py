"""What TensorFlow 1 had and TensorFlow 2 has not, and what replaces it: refused by name, at the line that uses it."""

import linecache
from types import ModuleType
from typing import Any

from muster.errors import MusterError
from muster.train.imports import Refuse, first, where

HOOKED_LOOP = "a tf.train.MonitoredTrainingSession with a loop of your own (examples/mnist_v1.py), or tf.keras"
EVALUATOR = "a loop over tf.train.checkpoints_iterator in a task of its own (examples/v1_evaluator.py, --evaluator)"
SLIM = "the package tf-slim (pip install tf-slim; import tf_slim as slim)"
ADDONS = "nothing in TensorFlow; the retired package tensorflow-addons has it for versions up to 2.15"
PROBABILITY = "the package tensorflow-probability, or tf.distributions"
INITIALIZER = "tf.glorot_uniform_initializer()"

INSTEAD: dict[str, str] = {
    "contrib": "nothing as a whole: it was removed in TensorFlow 2, part by part",
    "contrib.cluster_resolver": "tf.distribute.cluster_resolver",
    "contrib.crf": ADDONS,
    "contrib.cudnn_rnn": "tf.keras.layers.LSTM and GRU, which use cuDNN by themselves",
    "contrib.data": "tf.data",
    "contrib.data.batch_and_drop_remainder": "dataset.batch(n, drop_remainder=True)",
    "contrib.data.map_and_batch": "dataset.map(...).batch(...)",
    "contrib.data.parallel_interleave": "dataset.interleave(..., num_parallel_calls=...)",
    "contrib.data.prefetch_to_device": "tf.data.experimental.prefetch_to_device",
    "contrib.data.shuffle_and_repeat": "dataset.shuffle(...).repeat()",
    "contrib.distribute": "tf.distribute",
    "contrib.distributions": PROBABILITY,
    "contrib.eager": "tf.enable_eager_execution() and tf itself",
    "contrib.estimator": HOOKED_LOOP,
    "contrib.feature_column": "tf.feature_column",
    "contrib.framework": "tf.train and tf itself, or " + SLIM,
    "contrib.framework.arg_scope": SLIM,
    "contrib.framework.get_global_step": "tf.train.get_global_step",
    "contrib.framework.get_or_create_global_step": "tf.train.get_or_create_global_step",
    "contrib.framework.get_variables": "tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, scope)",
    "contrib.framework.nest": "tf.nest",
    "contrib.framework.sort": "tf.sort",
    "contrib.image": "tf.image",
    "contrib.image.rotate": ADDONS,
    "contrib.layers": "tf.layers, or " + SLIM,
    "contrib.layers.batch_norm": "tf.layers.batch_normalization",
    "contrib.layers.conv2d": "tf.layers.conv2d",
    "contrib.layers.convolution2d": "tf.layers.conv2d",
    "contrib.layers.dropout": "tf.layers.dropout",
    "contrib.layers.flatten": "tf.layers.flatten",
    "contrib.layers.fully_connected": "tf.layers.dense",
    "contrib.layers.l1_regularizer": "tf.keras.regularizers.l1",
    "contrib.layers.l2_regularizer": "tf.keras.regularizers.l2",
    "contrib.layers.linear": "tf.layers.dense",
    "contrib.layers.max_pool2d": "tf.layers.max_pooling2d",
    "contrib.layers.optimize_loss": "an optimizer of tf.train and its minimize()",
    "contrib.layers.real_valued_column": "tf.feature_column.numeric_column",
    "contrib.layers.variance_scaling_initializer": "tf.variance_scaling_initializer()",
    "contrib.layers.xavier_initializer": INITIALIZER,
    "contrib.layers.xavier_initializer_conv2d": INITIALIZER,
    "contrib.learn": HOOKED_LOOP,
    "contrib.learn.datasets": "tf.keras.datasets",
    "contrib.learn.preprocessing": "tf.keras.preprocessing",
    "contrib.legacy_seq2seq": ADDONS,
    "contrib.lookup": "tf.lookup",
    "contrib.losses": "tf.losses",
    "contrib.metrics": "tf.metrics",
    "contrib.opt": "tf.train, or the optimizers of tf.keras",
    "contrib.rnn": "tf.nn.rnn_cell",
    "contrib.rnn.BasicLSTMCell": "tf.nn.rnn_cell.BasicLSTMCell",
    "contrib.rnn.BasicRNNCell": "tf.nn.rnn_cell.BasicRNNCell",
    "contrib.rnn.DropoutWrapper": "tf.nn.rnn_cell.DropoutWrapper",
    "contrib.rnn.GRUCell": "tf.nn.rnn_cell.GRUCell",
    "contrib.rnn.LSTMCell": "tf.nn.rnn_cell.LSTMCell",
    "contrib.rnn.LSTMStateTuple": "tf.nn.rnn_cell.LSTMStateTuple",
    "contrib.rnn.MultiRNNCell": "tf.nn.rnn_cell.MultiRNNCell",
    "contrib.rnn.static_rnn": "tf.nn.static_rnn",
    "contrib.rnn.stack_bidirectional_dynamic_rnn": "tf.nn.bidirectional_dynamic_rnn, stacked",
    "contrib.saved_model": "tf.saved_model",
    "contrib.seq2seq": ADDONS,
    "contrib.slim": SLIM,
    "contrib.staging": "dataset.prefetch",
    "contrib.summary": "tf.summary",
    "contrib.tensorboard": "the package tensorboard",
    "contrib.tpu": "tf.tpu",
    "contrib.training": "tf.train",
    "contrib.training.HParams": "argparse.Namespace",
    "estimator": HOOKED_LOOP,
    "estimator.BaselineClassifier": "tf.keras.Model",
    "estimator.DNNClassifier": "tf.keras.Sequential",
    "estimator.DNNRegressor": "tf.keras.Sequential",
    "estimator.Estimator": HOOKED_LOOP,
    "estimator.EstimatorSpec": HOOKED_LOOP,
    "estimator.EvalSpec": EVALUATOR,
    "estimator.LinearClassifier": "tf.keras.Sequential with one Dense layer",
    "estimator.LinearRegressor": "tf.keras.Sequential with one Dense layer",
    "estimator.RunConfig": "TF_CONFIG, which Muster sets, and the arguments of tf.train.MonitoredTrainingSession",
    "estimator.TrainSpec": HOOKED_LOOP,
    "estimator.train_and_evaluate": HOOKED_LOOP + "; and " + EVALUATOR,
    "estimator.inputs": "tf.data",
    "examples": "the data sets of tf.keras.datasets, or arrays of your own",
    "examples.tutorials.mnist": "tf.keras.datasets.mnist, or arrays of your own (examples/mnist_data.py)",
}
GROUPS = ("contrib", "estimator", "examples")


class Gone(ModuleType):
    """Stands where ``tf.contrib`` was: can be walked where there are parts to tell apart, and refuses to be used."""

    def __init__(self, path: str) -> None:
        super().__init__(f"tensorflow.{path}")
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for, such as in `inspect` or `copy`
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        if any(known.startswith(path + ".") for known in INSTEAD):
            return Gone(path)
        raise refusal(path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise refusal(self._path)


def install(tensorflow: ModuleType) -> None:
    for group in GROUPS:
        setattr(tensorflow, group, Gone(group))
    first(Refuse([f"tensorflow.{group}" for group in GROUPS], imported))


def refusal(path: str) -> MusterError:
    """The error for a use of ``tf.<path>``."""
    return MusterError(
        f"tf.{path} does not exist in TensorFlow 2",
        at=where(),
        because=f"tf.{path.partition('.')[0]} was removed; --tf1 brings back the v1 API, not what was never part of it",
        try_=f"instead of tf.{path}: {instead(path)}",
    )


def instead(path: str) -> str:
    """What replaces ``tf.<path>``, or the nearest part around it that has an answer."""
    while path not in INSTEAD:
        path = path.rpartition(".")[0]
    return INSTEAD[path]


def imported(name: str) -> MusterError:
    """The error for an import of ``name``. In ``from tensorflow.contrib import rnn`` only the line names rnn."""
    path = name.partition(".")[2]
    file, _, line = where().rpartition(":")
    words = set(linecache.getline(file, int(line or 0)).replace(",", " ").replace(".", " ").split())
    deeper = [known for known in INSTEAD if known.startswith(path + ".") and set(known.split(".")) <= words]
    return refusal(max([path, *deeper], key=len))
