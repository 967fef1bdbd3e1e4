"""ParameterServerStrategy with a loop of one's own: a chief that hands out steps, workers that compute, ps that hold.

    muster run --engine tensorflow --kind pss examples/pss_custom_loop.py

The chief runs this script to its end; workers and ps only serve. Softmax regression on handwritten digits, batch 100.
"""

import argparse

import mnist_data
import tensorflow as tf

import muster


def serve(cluster):
    """A worker or a ps: a server, until Muster ends it."""
    tf.distribute.Server(
        cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id, protocol="grpc", start=True
    ).join()


def digits():
    """A worker's data: all of it, in an order of its own."""
    training, _ = mnist_data.load()
    return tf.data.Dataset.from_tensor_slices((training.x, training.y)).shuffle(4000).repeat().batch(100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type in ("worker", "ps"):
        serve(cluster)
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([784, 10]))
        bias = tf.Variable(tf.zeros([10]))
        done = tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.matmul(x, weights) + bias))
        for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias]), strict=True):
            variable.assign_sub(0.3 * gradient)
        done.assign_add(1)
        return loss

    @tf.function
    def train_step(iterator):
        return strategy.run(step, args=next(iterator))

    data = iter(coordinator.create_per_worker_dataset(digits))
    muster.report(total=options.steps)
    for _ in range(0, options.steps, 20):
        losses = [coordinator.schedule(train_step, args=(data,)) for _ in range(20)]
        coordinator.join()
        muster.report(step=int(done.numpy()), local=int(done.numpy()), loss=float(losses[-1].fetch()))
    _, held_out = mnist_data.load()
    guesses = tf.argmax(tf.matmul(held_out.x, weights) + bias, 1)
    accuracy = float(tf.reduce_mean(tf.cast(guesses == held_out.y, tf.float32)))
    print(f"accuracy {accuracy:.4f} after {int(done.numpy())} steps")
    muster.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
