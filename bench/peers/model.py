"""The models in TensorFlow, as functions of their parameters, and the threads that everybody gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bench.measure.workloads import BATCH, digits, rows
from muster.ps.slabs import aligned


def one_thread() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def loss_of(values: Sequence[Any], x: Any, y: Any) -> Any:
    """The mean cross-entropy of a perceptron with ReLU between its layers: kernel, bias, kernel, bias, ..."""
    hidden = x
    for at in range(0, len(values), 2):
        hidden = tf.matmul(hidden, values[at]) + values[at + 1]
        if at + 2 < len(values):
            hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=hidden))


def gradients_of(values: Sequence[Any], x: Any, y: Any) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = loss_of(values, x, y)
    return loss, tape.gradient(loss, values)


class Fresh:
    """Batches in memory that TensorFlow aliases: ``next()`` gathers other digits into the same two tensors."""

    def __init__(self, seed: int) -> None:
        self._x, self._y = digits()
        self._rows: Iterator[Any] = rows(seed)
        x = aligned(BATCH * self._x.shape[1])
        self._to_x, self._to_y = x.reshape(BATCH, -1), aligned(2 * BATCH).view(np.int64)
        self.x = tf.experimental.dlpack.from_dlpack(self._to_x.__dlpack__())
        self.y = tf.experimental.dlpack.from_dlpack(self._to_y.__dlpack__())

    def next(self) -> None:
        chosen = next(self._rows)
        np.take(self._x, chosen, axis=0, out=self._to_x, mode="clip")
        np.take(self._y, chosen, out=self._to_y, mode="clip")
