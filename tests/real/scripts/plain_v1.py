"""A v1 session as the oldest scripts have it: neither monitored nor supervised."""

import argparse

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--job_name")
parser.add_argument("--task_index", type=int)
args = parser.parse_args()
server = tf.train.Server(tf.train.ClusterSpec({"worker": ["w0:1", "w1:1"]}), args.job_name, args.task_index)
with tf.device("/job:worker/task:%d" % args.task_index):  # noqa: UP031
    x = tf.placeholder(tf.float32, [])
    w = tf.Variable(0.0)
    loss = tf.square(w - x)
    step = tf.Variable(0, trainable=False)
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    init = tf.global_variables_initializer()
with tf.Session(server.target) as sess:
    sess.run(init)
    for _ in range(50):
        sess.run(train, {x: 3.0})
        sess.run(w)
