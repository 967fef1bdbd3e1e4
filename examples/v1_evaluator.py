"""A v1 session that saves checkpoints, and beside it an evaluator that judges each of them.

    muster run --kind v1 --evaluator examples/v1_evaluator.py --folder /tmp/judged

The evaluator is a task of its own: it trains nothing, is in nobody's cluster, and reads the folder that the chief saves
to (one that all machines share). It does the last checkpoint when training has ended, and ends with it. Fits a line to
y = 3x + 2.
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from v1_wait import wait_for_chief

import muster

tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()


class Line:
    def __init__(self):
        self.x = tf.placeholder(tf.float32, [None])
        self.slope = tf.get_variable("slope", [], initializer=tf.zeros_initializer())
        self.offset = tf.get_variable("offset", [], initializer=tf.zeros_initializer())
        self.loss = tf.reduce_mean(tf.square(self.slope * self.x + self.offset - (3 * self.x + 2)))
        self.step = tf.train.get_or_create_global_step()
        self.train = tf.train.GradientDescentOptimizer(0.1).minimize(self.loss, global_step=self.step)


def evaluate(folder):
    """Judge each checkpoint on points that nobody trains on. The loop ends when training has ended."""
    line, saver = Line(), tf.train.Saver()
    held_out = np.linspace(-2, 2, 100)
    with tf.Session() as session:
        for path in tf.train.checkpoints_iterator(folder):
            saver.restore(session, path)
            step, error = session.run([line.step, line.loss], {line.x: held_out})
            print(f"step {step}: error {error:.6f}")
            muster.report(held_out_error=float(error))


def train(me, folder, steps):
    cluster = me.cluster_spec()
    server = tf.train.Server(cluster, me.task_type, me.task_id)
    if me.task_type == "ps":
        server.join()
    own = f"/job:{me.task_type}/task:{me.task_id}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=own)):
        line = Line()
    config = tf.ConfigProto(device_filters=["/job:ps", own])
    if not muster.is_chief():
        wait_for_chief(server.target, config)
    random = np.random.default_rng(muster.worker_index())
    with tf.train.MonitoredTrainingSession(
        server.target,
        is_chief=muster.is_chief(),
        checkpoint_dir=folder,
        save_checkpoint_steps=100,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=[tf.train.StopAtStepHook(last_step=steps)],
        config=config,
    ) as session:
        while not session.should_stop():
            session.run(line.train, {line.x: random.uniform(-1, 1, 32)})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    me = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if me.task_type == "evaluator":
        evaluate(options.folder)
    else:
        train(me, options.folder, options.steps)


if __name__ == "__main__":
    main()
