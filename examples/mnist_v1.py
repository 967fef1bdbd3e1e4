"""Softmax regression on handwritten digits with TensorFlow's v1 API: between-graph replication, 2 ps and 3 workers.

    muster run --engine tensorflow --kind v1 examples/mnist_v1.py
    muster run --engine tensorflow --kind v1 examples/mnist_v1.py --mode sync
    python examples/mnist_v1.py                      # alone, in one process

Each worker trains on its share of 4,000 digits, batch 100; the chief measures the accuracy on 1,000 held-out digits at
the end (about 0.89). In async mode a worker's gradient is applied as it comes; in sync mode a step takes one gradient
from every worker.
"""

import argparse

import mnist_data
import tensorflow.compat.v1 as tf
from v1_wait import wait_for_chief

import muster

tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()


class Model:
    """784 pixels, 10 digits; variables on the ps in turn, everything else here."""

    def __init__(self, optimizer):
        self.x = tf.placeholder(tf.float32, [None, 784])
        self.y = tf.placeholder(tf.int64, [None])
        weights = tf.get_variable("weights", [784, 10], initializer=tf.zeros_initializer())
        bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
        logits = tf.matmul(self.x, weights) + bias
        self.loss = tf.losses.sparse_softmax_cross_entropy(self.y, logits)
        self.accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), self.y), tf.float32))
        self.train = optimizer.minimize(self.loss, global_step=tf.train.get_or_create_global_step())


class Evaluate(tf.train.SessionRunHook):
    """Measures the accuracy on held-out digits when training is over."""

    def __init__(self, model, digits):
        self.model, self.digits = model, digits

    def end(self, session):
        accuracy = session.run(self.model.accuracy, {self.model.x: self.digits.x, self.model.y: self.digits.y})
        print(f"accuracy {accuracy:.4f} on {len(self.digits.x)} held-out digits")
        muster.report(accuracy=float(accuracy))


class Release(tf.train.SessionRunHook):
    """Lets the other workers go when this one ends.

    In sync mode a worker waits for a token after every gradient. Tokens bear no name: one that is ahead may take a
    second one, and at the end there is no further step to bring more. So who ends leaves enough for all.
    """

    def __init__(self, optimizer, workers):
        self.optimizer, self.workers = optimizer, workers

    def begin(self):
        self.tokens = self.optimizer.get_init_tokens_op(2 * self.workers)

    def end(self, session):
        try:
            session.run(self.tokens)
        except tf.errors.OpError:
            pass  # the chief has ended and closed the queue: whoever waited there has been woken by that


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["async", "sync"], default="async")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--permute-labels", action="store_true", help="shuffle them: accuracy must be chance")
    options = parser.parse_args()

    me = tf.distribute.cluster_resolver.TFConfigClusterResolver()  # TF_CONFIG, which Muster sets
    cluster = me.cluster_spec()
    server = tf.train.Server(cluster, me.task_type, me.task_id) if cluster.jobs else None
    if me.task_type == "ps":
        server.join()
    training, held_out = mnist_data.load(options.permute_labels)
    index, workers = muster.worker_index(), muster.workers()
    share = training.share(index, workers)
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        if options.mode == "sync":
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, workers, workers)
        model = Model(optimizer)
    hooks = [tf.train.StopAtStepHook(last_step=options.steps)]
    if options.mode == "sync":
        hooks += [optimizer.make_session_run_hook(muster.is_chief(), num_tokens=0), Release(optimizer, workers)]
    only_chief = [Evaluate(model, held_out)]
    batches = share.batches(100, seed=index)
    with session(server, index, hooks, only_chief) as running:
        while not running.should_stop():
            x, y = next(batches)
            running.run(model.train, {model.x: x, model.y: y})


def session(server, index, hooks, chief_only_hooks):
    """A session that talks to the ps and to itself, not to the other workers, and soon sees that the chief is ready."""
    if server is None:
        return tf.train.MonitoredTrainingSession(hooks=hooks, chief_only_hooks=chief_only_hooks)
    config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
    if not muster.is_chief():
        wait_for_chief(server.target, config)
    return tf.train.MonitoredTrainingSession(
        server.target,
        muster.is_chief(),
        hooks=hooks,
        chief_only_hooks=chief_only_hooks,
        config=config,
        stop_grace_period_secs=1,  # in sync mode a thread of the chief waits for gradients until the session closes
    )


if __name__ == "__main__":
    main()
