"""A cluster definition to be edited on each machine, as tutorials have it: the role stands in the file."""

import tensorflow as tf

cluster = tf.train.ClusterSpec({"worker": ["worker0.example.com:2222", "worker1.example.com:2222"]})
server = tf.train.Server(cluster, job_name="worker", task_index=0)
