"""A between-graph script as tutorials for TensorFlow 1 have it: hosts written into it, no filters, no hidden help."""

import argparse

import tensorflow as tf

cluster = tf.train.ClusterSpec(
    {
        "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
        "worker": ["worker0.example.com:2222", "worker1.example.com:2222", "worker2.example.com:2222"],
    }
)
parser = argparse.ArgumentParser()
parser.add_argument("--job_name", default="worker")
parser.add_argument("--task_index", type=int, default=0)
args = parser.parse_args()
server = tf.train.Server(cluster, job_name=args.job_name, task_index=args.task_index)
if args.job_name == "ps":
    server.join()
worker = "/job:worker/task:%d" % args.task_index  # noqa: UP031
with tf.device(tf.train.replica_device_setter(worker_device=worker, cluster=cluster)):
    x = tf.placeholder(tf.float32, [None, 784])
    labels = tf.placeholder(tf.float32, [None, 10])
    weights = tf.Variable(tf.zeros([784, 10]))
    bias = tf.Variable(tf.zeros([10]))
    guesses = tf.nn.softmax(tf.matmul(x, weights) + bias)
    loss = tf.reduce_mean(-tf.reduce_sum(labels * tf.log(guesses), reduction_indices=[1]))
    step = tf.Variable(0, trainable=False)
    train = tf.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=step)
hooks = [tf.train.StopAtStepHook(last_step=1000)]
with tf.train.MonitoredTrainingSession(server.target, is_chief=args.task_index == 0, hooks=hooks) as session:
    while not session.should_stop():
        _, number = session.run([train, step], {x: [[0] * 784], labels: [[0] * 10]})
        print("step", number)
