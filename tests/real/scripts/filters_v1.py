"""Sessions on a server whose cluster has another worker that is never there: without filters each would wait for it."""

import json
import os

import tensorflow as tf

cluster = tf.train.ClusterSpec(json.loads(os.environ["MUSTER_CLUSTER"])["cluster"])
server = tf.train.Server(cluster, job_name="worker", task_index=0, config=tf.ConfigProto(log_device_placement=False))
assert list(server.server_def.default_session_config.device_filters) == ["/job:worker/task:0"]
with tf.Session(server.target) as session:
    assert session.run(tf.constant(1)) == 1
    assert list(session._config.device_filters) == ["/job:worker/task:0"]
with tf.Session(server.target, config=tf.ConfigProto(allow_soft_placement=True)) as session:
    assert session.run(tf.constant(2)) == 2
    assert session._config.allow_soft_placement and list(session._config.device_filters) == ["/job:worker/task:0"]
mine = tf.ConfigProto(device_filters=["/job:worker/task:0", "/job:ps"])
with tf.Session(server.target, config=mine) as session:
    assert list(session._config.device_filters) == ["/job:worker/task:0", "/job:ps"]
with tf.Session(config=tf.ConfigProto()) as session:
    assert not session._config.device_filters
assert tf.train.SessionManager()._recovery_wait_secs == 1
assert tf.train.SessionManager(recovery_wait_secs=5)._recovery_wait_secs == 5
print("none waited")
