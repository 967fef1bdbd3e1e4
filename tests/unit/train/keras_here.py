"""TensorFlow, once for all tests that train in this process: two logical CPU devices, for MirroredStrategy."""

import collections
import threading

import pytest

tf = pytest.importorskip("tensorflow")
import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras.src.backend.common import global_state  # noqa: E402

tf_cpu = tf.config.list_physical_devices("CPU")[0]
try:
    tf.config.set_logical_device_configuration(tf_cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
except RuntimeError:
    pass  # it has been started already, with two devices by this module or with one by others
if not tf.config.list_logical_devices("CPU")[1:]:
    pytest.skip("TensorFlow was started before with one device", allow_module_level=True)

BUILDING = threading.Lock()  # seeds are those of the whole process


def data(samples=240, features=8, classes=3, seed=0):
    """Points and the class of each, which a linear model can tell."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, features)).astype("float32")
    return x, (x @ random.standard_normal((features, classes))).argmax(1)


def fresh(make, seed=7):
    """A model made by ``make``: the same names and weights every time."""
    with BUILDING:
        # not clear_session(): that takes the scope that another thread is in
        global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
        keras.utils.set_random_seed(seed)
        model = make()
        model(np.zeros((1, *model.input_shape[1:]), "float32")) if isinstance(model, keras.Sequential) else None
        return model


def classifier(optimizer=None, metrics=("accuracy",), layers=(), **compiled):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), *layers, keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss=loss, metrics=list(metrics), **compiled)
    return model


def apart(ours, theirs, start):
    """How far two lists of weights are from each other, in units of the largest movement from ``start``."""
    moved = max(np.abs(a - b).max() for a, b in zip(theirs, start, strict=True))
    assert moved > 0, "nothing was trained"
    return max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) / moved
