"""The short way to call a traced function: the same values, the same state, the same errors."""

import pytest
from keras_here import keras, np, tf

from muster.train.direct import changed, direct, usable

pytestmark = pytest.mark.tensorflow


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def test_loops_branches_python_and_variables_come_out_as_on_the_long_way():
    layer, count = keras.layers.LSTM(5), tf.Variable(0.0)
    layer.build((None, 7, 3))

    def step(x, y):
        count.assign_add(1.0)
        found = layer(x)
        doubled = tf.py_function(lambda v: v * 2, [found], tf.float32)
        chosen = tf.cond(tf.reduce_sum(y) > 0, lambda: doubled, lambda: found)
        return [found, chosen, tf.strings.length("word")]

    function = traced(step, tf.TensorSpec((None, 7, 3), tf.float32), tf.TensorSpec([2], tf.int64))
    short = direct(function, tf)
    assert short is not function
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 7, 3)), tf.float32)
    for y in (tf.constant([1, 2], tf.int64), tf.constant([-1, -2], tf.int64)):
        for ours, theirs in zip(short(x, y), function(x, y), strict=True):
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
    assert count.numpy() == 4.0


def test_an_error_tells_where_in_the_script_it_came_from():
    def step(x):
        return [tf.debugging.check_numerics(x, "here it is")]

    short = direct(traced(step, tf.TensorSpec([], tf.float32)), tf)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"test_direct\.py"):
        short(tf.constant(float("nan")))


def test_options_of_the_graph_optimizer_take_the_long_way():
    untouched = tf.config.optimizer.get_experimental_options()
    assert usable(tf) and not changed(untouched)
    assert changed({**untouched, "constant_folding": False}) and changed({**untouched, "layout_optimizer": True})
    assert changed({**untouched, "disable_meta_optimizer": True})
