"""A v1 session with a checkpoint directory: what a ps loses when it dies, the chief restores from there.

    muster run --engine tensorflow --kind v1 examples/v1_checkpoint.py --folder /tmp/line

The folder must be one that all machines share. Run it again with more --steps and it goes on where it was. Fits a line
to y = 3x + 2; the chief reports slope and offset.
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
        step = tf.train.get_or_create_global_step()
        self.train = tf.train.GradientDescentOptimizer(0.1).minimize(self.loss, global_step=step)


class ShowLine(tf.train.SessionRunHook):
    def __init__(self, line):
        self.line = line

    def after_create_session(self, session, coord):
        print("starts at step", session.run(tf.train.get_global_step()))

    def end(self, session):
        slope, offset = session.run([self.line.slope, self.line.offset])
        print(f"y = {slope:.3f} x + {offset:.3f}")
        muster.report(slope=float(slope), offset=float(offset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    me = tf.distribute.cluster_resolver.TFConfigClusterResolver()
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
        checkpoint_dir=options.folder,
        save_checkpoint_steps=100,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=[tf.train.StopAtStepHook(last_step=options.steps)],
        chief_only_hooks=[ShowLine(line)],
        config=config,
    ) as session:
        while not session.should_stop():
            session.run(line.train, {line.x: random.uniform(-1, 1, 32)})


if __name__ == "__main__":
    main()
