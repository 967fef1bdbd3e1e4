"""MultiWorkerMirroredStrategy with a loop of one's own: gradients go round a gRPC ring, there is no ps.

python -m bench.peers.mwms W1         with TF_CONFIG, in each worker
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tensorflow as tf

from bench.measure.workloads import WORKLOADS
from bench.peers.loop import serve


class Mirrored:
    stride = 1

    def __init__(self, workload: str, strategy: Any, index: int) -> None:
        from bench.peers.model import Fresh, loss_of

        self.work = work = WORKLOADS[workload]
        self.phases: dict[str, float] = {}
        self.batch, self.done = Fresh(index), 0
        with strategy.scope():
            self.variables = [tf.Variable(value) for value in work.start()]

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(self.variables, x, y)
            gradients = tape.gradient(loss, self.variables)
            replica = tf.distribute.get_replica_context()
            for variable, mean in zip(self.variables, replica.all_reduce("mean", gradients), strict=True):
                variable.assign_sub(work.rate * mean)
            return loss

        @tf.function
        def train(x: Any, y: Any) -> Any:
            return strategy.run(step, args=(x, y))

        self.train = train

    def reset(self, first: bool) -> int:
        for variable, value in zip(self.variables, self.work.start(), strict=True):
            variable.assign(value)
        return self.done

    def step(self) -> tuple[int, float]:
        self.batch.next()
        loss = self.train(self.batch.x, self.batch.y)
        self.done += 1
        return self.done, float(loss)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    index = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    serve({"mwms": Mirrored(sys.argv[1], strategy, index)})


if __name__ == "__main__":
    main()
