"""T0: the same steps in one process, without any ps. The variables are TensorFlow's own.

python -m bench.peers.alone W1
"""

from __future__ import annotations

import sys

import tensorflow as tf

from bench.measure.workloads import WORKLOADS
from bench.peers.loop import serve
from bench.peers.model import Fresh, gradients_of, one_thread
from muster.train.direct import direct


class Alone:
    stride = 1

    def __init__(self, workload: str) -> None:
        self.work = WORKLOADS[workload]
        self.phases: dict[str, float] = {}
        self.variables = [tf.Variable(value) for value in self.work.start()]
        self.batch, self.done = Fresh(0), 0
        rate = self.work.rate

        @tf.function(autograph=False)
        def train(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            loss, gradients = gradients_of(self.variables, x, y)
            for variable, gradient in zip(self.variables, gradients, strict=True):
                variable.assign_sub(rate * gradient)
            return [loss]

        self.train = direct(train.get_concrete_function(self.batch.x, self.batch.y), tf)

    def reset(self, first: bool) -> int:
        for variable, value in zip(self.variables, self.work.start(), strict=True):
            variable.assign(value)
        return self.done

    def step(self) -> tuple[int, float]:
        self.batch.next()
        (loss,) = self.train(self.batch.x, self.batch.y)
        self.done += 1
        return self.done, float(loss)


if __name__ == "__main__":
    one_thread()
    serve({"t0": Alone(sys.argv[1])})
