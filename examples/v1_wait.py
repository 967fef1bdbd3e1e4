"""A shorter wait for workers of a v1 session: without it, one that asks a moment too early asks again after 30 s."""

import tensorflow.compat.v1 as tf


def wait_for_chief(target: str, config: tf.ConfigProto) -> None:
    """Return when the chief has initialised or restored the variables of the default graph. Looks once a second."""
    ready = tf.report_uninitialized_variables(tf.global_variables())
    manager = tf.train.SessionManager(ready_op=ready, graph=tf.get_default_graph(), recovery_wait_secs=1)
    manager.wait_for_session(target, config=config).close()
