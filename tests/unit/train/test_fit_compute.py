"""One step of ours against one step of Keras' own: the same gradients, loss, metrics and statistics."""

import pytest
from keras_here import apart, classifier, data, fresh, keras, np, tf

from muster.errors import Refused
from muster.ps.optimizers import KINDS
from muster.train.compute import Compute
from muster.train.settings import refuse

pytestmark = pytest.mark.tensorflow
L = keras.layers


def batch(model, x, y, weights=None):
    return keras.tree.map_structure(lambda p: None if p is None else tf.convert_to_tensor(p), (x, y, weights))


def step(compute, whole, rate, views=None):
    """One step of plain SGD with ``compute``, on values of our own; returns the values after it."""
    from muster.ps.slabs import aligned, lay_out

    layout = lay_out(compute.parameters, 1)
    flat = aligned(layout.size)
    views = layout.views(flat)
    for view, value in zip(views, compute.initial(), strict=True):
        view[...] = value
    compute.bind(views)
    outcome = compute.step(whole)
    for view, gradient, parameter in zip(views, outcome.gradients, compute.parameters, strict=True):
        view[...] -= np.asarray(gradient).reshape(view.shape) * (rate if parameter.trainable else 1.0)
    compute.load(views)
    return outcome


def two_heads():
    one, two = keras.Input((8,), name="one"), keras.Input((4,), name="two")
    joined = L.Concatenate()([L.Dense(6, kernel_regularizer="l2")(one), two])
    shared = L.BatchNormalization()(L.Dense(5, activity_regularizer="l1")(joined))
    model = keras.Model({"one": one, "two": two}, {"sort": L.Dense(3, name="sort")(shared), "size": L.Dense(1)(shared)})
    loss = {"sort": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile(
        keras.optimizers.SGD(0.1), loss=loss, loss_weights={"sort": 1.0, "size": 0.3},
        metrics={"sort": ["accuracy"], "size": ["mae"]}, weighted_metrics={"size": ["mse"]},
    )  # fmt: skip
    return model


class Encoder(keras.Model):
    """A subclass with a loss, a metric and random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.wide, self.drop, self.out = L.Dense(6), L.Dropout(0.3), L.Dense(8)
        self.seen = keras.metrics.Mean(name="seen")
        self.noise = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        hidden = self.drop(self.wide(x), training=training)
        self.add_loss(0.01 * keras.ops.mean(hidden**2))
        return self.out(hidden + 0.1 * keras.random.normal((6,), seed=self.noise))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.seen.update_state(keras.ops.mean(keras.ops.abs(y_pred)))
        return loss


def encoder():
    model = Encoder()
    model.compile(keras.optimizers.SGD(0.1), loss=lambda y, p: keras.ops.mean((y - p) ** 4, -1), metrics=["mae"])
    return model


def heads_data():
    x, y = data(30)
    random = np.random.default_rng(4)
    weights = {"sort": random.random(30).astype("float32"), "size": random.random(30).astype("float32")}
    x = {"one": x, "two": x[:, :4] * 2}
    return x, {"sort": y, "size": x["one"][:, :1]}, weights


def both(make, x, y, weights=None, steps=3, rate=0.1):
    """Keras' own training, and ours: (weights, metrics) of each, and the start."""
    theirs, ours = fresh(make), fresh(make)
    if not theirs.built:
        theirs(x), ours(x)
    start = theirs.get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(start, ours.get_weights(), strict=True))
    size = len(keras.tree.flatten(x)[0])
    told = theirs.fit(x, y, sample_weight=weights, batch_size=size, epochs=steps, shuffle=False, verbose=0).history
    compute = Compute(ours, batch(ours, x, y, weights), keras, tf)
    for _ in range(steps):
        ours.reset_metrics()
        step(compute, batch(ours, x, y, weights), rate)
    now = {name: float(value) for name, value in ours.get_metrics_result().items()}
    return theirs, ours, start, {name: row[-1] for name, row in told.items()}, now


@pytest.mark.parametrize("make", [two_heads, encoder], ids=lambda make: make.__name__)
def test_a_step_is_that_of_keras(make):
    x, y, weights = heads_data() if make is two_heads else (data(30)[0], data(30)[0] / 3, None)
    theirs, ours, start, told, now = both(make, x, y, weights)
    assert apart(ours.get_weights(), theirs.get_weights(), start) < 1e-5
    assert set(now) == set(told)
    for name, value in told.items():
        assert now[name] == pytest.approx(value, rel=1e-5), name
    if make is encoder:
        seeds = [[v.numpy().tolist() for v in m.variables if "seed" in v.path] for m in (theirs, ours)]
        assert seeds[0] == seeds[1] and len(seeds[0]) == 2


def test_statistics_and_one_row_per_variable_are_declared():
    x, y, weights = heads_data()
    model = fresh(two_heads)
    compute = Compute(model, batch(model, x, y, weights), keras, tf)
    rows = {p.name.split("/")[-1]: p for p in compute.parameters if not p.trainable}
    assert set(rows) == {"moving_mean", "moving_variance"} and rows["moving_mean"].shape == (5,)
    assert len(compute.parameters) == len(model.trainable_variables) + 2


def test_sizes_of_batches_cost_two_traces_at_most():
    model = fresh(classifier)
    x, y = data(60)
    compute = Compute(model, batch(model, x[:20], y[:20]), keras, tf)
    calls = []
    plain = compute._compile
    compute._compile = lambda b, shapes: calls.append(shapes[0][0]) or plain(b, shapes)
    losses = []
    for size in (20, 7, 13, 20, 1):
        losses.append(float(step(compute, batch(model, x[:size], y[:size]), 0.0).loss))
    assert calls == [20, None] and losses[0] == pytest.approx(losses[3])
    compute = Compute(model, batch(model, x[:20], y[:20]), keras, tf)
    compute._compile, calls[:] = (lambda b, shapes: calls.append(shapes[0][0]) or plain(b, shapes)), []
    compute.prepare(batch(model, x[:20], y[:20]), varies=True)
    assert calls == [None], "where the last batch is smaller, one trace serves all"


def test_sequences_of_any_length_cost_two_traces_too():
    tokens = keras.Input((None,))
    model = keras.Model(tokens, L.Dense(1)(L.GlobalAveragePooling1D()(L.Embedding(10, 4)(tokens))))
    model.compile("sgd", "mse")
    batches = [(tf.ones((8, length)), tf.ones((8, 1)), None) for length in (5, 6, 9, 5, 30)]
    compute = Compute(model, batches[0], keras, tf)
    calls, plain = [], compute._compile
    compute._compile = lambda b, shapes: calls.append(shapes) or plain(b, shapes)
    losses = [float(step(compute, one, 0.0).loss) for one in batches]
    assert calls == [((8, 5), (8, 1)), ((8, None), (8, 1))] and losses == pytest.approx(losses[:1] * 5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_sixteen_bits(policy):
    def make():
        keras.config.set_dtype_policy(policy)
        return classifier()

    try:
        model = fresh(make)
    finally:
        keras.config.set_dtype_policy("float32")
    scaled = hasattr(model.optimizer, "inner_optimizer")
    assert scaled is (policy == "mixed_float16")
    x, y = data(60)
    compute = Compute(model, batch(model, x, y), keras, tf, scaled)
    plain = fresh(classifier)
    other = Compute(plain, batch(plain, x, y), keras, tf)
    plain.set_weights([w.astype("float32") for w in model.get_weights()])
    found = step(compute, batch(model, x, y), 0.1)
    wanted = step(other, batch(plain, x, y), 0.1)
    assert found.finite and all(np.asarray(g).dtype == np.float32 for g in found.gradients)
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 0.02
    if scaled:
        outcome = compute.step(batch(model, x, y), 1e38)
        assert not outcome.finite
        half = compute.step(batch(model, x, y), 1024.0)
        assert half.finite


def test_two_devices_are_one():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    x, y = data(31)
    weights = np.random.default_rng(1).random(31).astype("float32")
    plain = fresh(classifier)
    with strategy.scope():
        split, both_ways = classifier(), classifier(layers=[L.BatchNormalization()])
    split.set_weights(plain.get_weights())
    start = plain.get_weights()
    ends, told = [], []
    for model in (plain, split):
        compute = Compute(model, batch(model, x, y, weights), keras, tf)
        assert compute.replicas == (2 if model is split else 1)
        for size in (31, 31, 1):
            step(compute, batch(model, x[:size], y[:size], weights[:size]), 0.1)
        ends.append(model.get_weights())
        told.append({name: float(value) for name, value in model.get_metrics_result().items()})
    assert apart(ends[1], ends[0], start) < 1e-5
    assert told[1] == pytest.approx(told[0], rel=1e-5)
    compute = Compute(both_ways, batch(both_ways, x, y), keras, tf)
    assert sum(not p.trainable for p in compute.parameters) == 2
    step(compute, batch(both_ways, x, y), 0.1)


class Late(keras.Model):
    """Makes a variable whenever it is called: one that nobody tracks, or one of its own."""

    def __init__(self, tracked):
        super().__init__()
        self.tracked, self.out = tracked, L.Dense(3)

    def call(self, x):
        late = self.add_weight(name="late", shape=()) if self.tracked else keras.Variable(1.0)
        return self.out(x) * late


def late(tracked):
    model = Late(tracked)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    return model


class Stepper(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def stepper():
    model = Stepper([keras.Input((8,)), L.Dense(3)])
    model.compile("sgd", "mse")
    return model


class Odd(keras.optimizers.SGD):
    pass


REFUSED = {
    "overrides train_step": stepper,
    "no optimizer called Odd": lambda: classifier(Odd()),
    "moving averages of weights": lambda: classifier(keras.optimizers.SGD(use_ema=True)),
    "gradient accumulation": lambda: classifier(keras.optimizers.Adam(gradient_accumulation_steps=4)),
    "has a constraint": lambda: classifier(layers=[L.Dense(4, kernel_constraint="non_neg")]),
    "nothing to train": lambda: untrained(),
    "makes variables during a step": lambda: late(False),
    "makes variables during .* step": lambda: late(True),
    "sets .*kernel in its forward pass": lambda: classifier(layers=[L.SpectralNormalization(L.Dense(4))]),
    "is not compiled": lambda: keras.Sequential([keras.Input((8,)), L.Dense(3)]),
}


def untrained():
    model = classifier()
    model.trainable = False
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_ps_would_train_differently_is_refused_by_name(words):
    x, y = data(8)
    with pytest.raises(Refused, match=words) as caught:
        model = REFUSED[words]()
        refuse(model, keras)
        Compute(model, batch(model, x, y), keras, tf)
    assert str(caught.value).count("\n") >= 1 and caught.value.exit_code == 2


def test_every_optimizer_that_the_ps_know_is_let_through():
    for name in KINDS:
        if hasattr(keras.optimizers, name):
            refuse(classifier(getattr(keras.optimizers, name)()), keras)
