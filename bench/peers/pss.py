"""ParameterServerStrategy: the chief hands out steps through a ClusterCoordinator, workers and ps only serve.

python -m bench.peers.pss W1          with TF_CONFIG, in each task; the chief takes the orders
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from bench.measure.workloads import BATCH, WORKLOADS, digits
from bench.peers.loop import serve

GROUP = 30  # steps between two joins: the chief looks at a loss then


class Coordinated:
    stride = GROUP

    def __init__(self, workload: str, cluster: Any) -> None:
        self.work = work = WORKLOADS[workload]
        self.phases: dict[str, float] = {}
        strategy = tf.distribute.ParameterServerStrategy(cluster)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self.variables = [tf.Variable(value) for value in work.start()]
            self.count = tf.Variable(
                0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

        def step(x: Any, y: Any) -> Any:
            from bench.peers.model import loss_of

            with tf.GradientTape() as tape:
                loss = loss_of(self.variables, x, y)
            for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
                variable.assign_sub(work.rate * gradient)
            self.count.assign_add(1)
            return loss

        @tf.function
        def train(iterator: Any) -> Any:
            return strategy.run(step, args=next(iterator))

        self.train = train
        self.data = iter(self.coordinator.create_per_worker_dataset(dataset))

    def reset(self, first: bool) -> int:
        for variable, value in zip(self.variables, self.work.start(), strict=True):
            variable.assign(value)
        return int(self.count.numpy())

    def step(self) -> tuple[int, float]:
        losses = [self.coordinator.schedule(self.train, args=(self.data,)) for _ in range(GROUP)]
        self.coordinator.join()
        return int(self.count.numpy()), float(losses[-1].fetch())


def dataset() -> Any:
    x, y = digits()
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4000).repeat().batch(BATCH, drop_remainder=True)


def main() -> None:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if cluster.task_type in ("worker", "ps"):
        # One thread to compute. The runtime itself asks for as many between operations as there are workers, and one.
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
        server = tf.distribute.Server(
            cluster.cluster_spec(), cluster.task_type, cluster.task_id, protocol="grpc", config=config
        )
        server.join()
    serve({"pss": Coordinated(sys.argv[1], cluster)})


if __name__ == "__main__":
    main()
