"""What scripts for TensorFlow 1 import and use, in the ways they do."""

from __future__ import absolute_import, division, print_function  # noqa: UP010

import numpy as np
import tensorflow as tf
import tensorflow.compat.v1 as tfc
import tensorflow.keras as keras
from tensorflow import flags
from tensorflow.keras import layers
from tensorflow.keras.layers import Dense
from tensorflow.python.client import device_lib
from tensorflow.python.framework import ops

flags.DEFINE_string("name", "", "who")
FLAGS = tf.app.flags.FLAGS


def main(argv):
    assert not tf.executing_eagerly() and tfc.train.Server is tf.train.Server and ops.Graph is tf.Graph
    assert device_lib.list_local_devices()
    x = tf.placeholder(tf.float32, [None, 4])
    hidden = tf.layers.dense(x, 8, activation=tf.nn.relu)
    tf.nn.rnn_cell.BasicLSTMCell(4)
    step = tf.Variable(0, trainable=False)
    train = tf.train.AdamOptimizer().minimize(tf.reduce_sum(hidden, reduction_indices=[0, 1]), global_step=step)
    assert tf.train.get_global_step() is step and step.dtype.base_dtype == tf.int32
    supervisor = tf.train.Supervisor(is_chief=True, logdir=None, global_step=step)
    with supervisor.managed_session() as session:
        for _ in range(5):
            session.run(train, {x: np.ones((1, 4))})
        assert session.run(step) == 5

    with tf.Graph().as_default(), tf.Session():
        assert keras.layers.Dense is Dense is layers.Dense and keras.__name__ == tf.keras.__name__
        model = keras.models.Sequential([Dense(3, input_shape=(4,))])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    print("all there for", FLAGS.name)


if __name__ == "__main__":
    tf.app.run()
