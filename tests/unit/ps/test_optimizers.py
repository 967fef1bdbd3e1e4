from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.errors import Refused
from muster.ps.optimizers import SGD, Adam, AdamW, Optimizer, RMSprop, exchanges, factors, parse
from muster.ps.slab import Slab
from muster.ps.slabs import Floats, Parameter, lay_out

TWO = [Parameter("w", (100, 7)), Parameter("s", (7,), trainable=False), Parameter("b", (7,), decay=False)]


def test_parse_takes_what_keras_serializes() -> None:
    config = {"name": "adam", "learning_rate": 0.001, "beta_1": 0.8, "use_ema": False, "clipnorm": None}
    assert parse({"module": "keras.optimizers", "class_name": "Adam", "config": config}) == Adam(beta_1=0.8)


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("SGD_3", SGD), ("adamw", AdamW), ("rmsprop", RMSprop)])
def test_parse_takes_a_plain_config(name: str, kind: type[Optimizer]) -> None:
    assert isinstance(parse({"name": name, "learning_rate": 0.1}), kind)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"class_name": "Lion", "config": {}}, "Lion.*SGD, Adam, AdamW, Adagrad, RMSprop"),
        ({"class_name": "LossScaleOptimizer", "config": {}}, "no optimizer called LossScaleOptimizer"),
        ({}, "no name"),
        ({"class_name": "SGD", "config": {"use_ema": True}}, "use_ema=True"),
        ({"class_name": "SGD", "config": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps=2"),
        ({"class_name": "SGD", "config": {"momentun": 0.9}}, "did you mean momentum"),
        ({"class_name": "SGD", "config": {"momentum": "0.9"}}, "must be a number"),
        ({"class_name": "SGD", "config": {"clipnorm": 1.0, "clipvalue": 1.0}}, "Only one of clipnorm and clipvalue"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(config)
    assert __import__("re").search(says, str(caught.value).replace("\n", " ")), caught.value


def slab(optimizer: Optimizer, ps: int = 1, index: int = 0, **more: Any) -> Slab:
    return Slab(lay_out(TWO, ps), index, optimizer, **more)


def ones(of: Slab, value: float = 1.0) -> Floats:
    flat = np.zeros(of.layout.size, np.float32)
    for view in of.layout.views(flat):
        view[...] = value
    return flat[of.cut.start : of.cut.stop]


def test_the_average_is_weighted_by_samples() -> None:
    one = slab(SGD())
    one.apply([(ones(one, 1.0), 30), (ones(one, 4.0), 10)], rate=1.0)
    w, _, b = one.layout.views(one.values)
    assert np.allclose(w, -1.75) and np.allclose(b, -1.75)


def test_a_statistic_takes_the_mean_of_the_movements_whatever_the_optimizer() -> None:
    one = slab(SGD(momentum=0.9, clipvalue=0.001, weight_decay=0.5))
    one.values[:] = ones(one, 2.0)
    one.apply([(ones(one, 0.5), 1), (ones(one, 1.5), 1)], rate=0.1)
    assert np.allclose(one.layout.views(one.values)[1], 1.0)
    one.apply([(ones(one, 0.5), 1)], rate=0.1, share=0.25)
    assert np.allclose(one.layout.views(one.values)[1], 0.875)


def test_what_lies_between_tensors_stays_zero() -> None:
    for optimizer in (SGD(momentum=0.9), Adam(amsgrad=True), RMSprop(centered=True, momentum=0.1)):
        one = slab(optimizer)
        one.values[:] = ones(one)
        for _ in range(5):
            one.apply([(ones(one), 1)], rate=0.1)
        gaps = ones(one) == 0
        assert gaps.any() and (one.values[gaps] == 0).all()


def test_the_gradient_is_not_written_to() -> None:
    for optimizer in (SGD(clipvalue=0.1), SGD(global_clipnorm=0.1), Adam(clipnorm=0.1, weight_decay=0.1)):
        one = slab(optimizer)
        gradient = ones(one)
        gradient.flags.writeable = False
        one.apply([(gradient, 1)], rate=0.1)


def test_weight_decay_leaves_out_what_is_excluded() -> None:
    one = slab(SGD(weight_decay=0.5))
    one.values[:] = ones(one)
    one.apply([(np.zeros(one.cut.size, np.float32), 1)], rate=0.1)
    w, s, b = one.layout.views(one.values)
    assert np.allclose(w, 0.95) and (s == 1).all() and (b == 1).all()


@pytest.mark.parametrize("optimizer", [SGD(global_clipnorm=0.7), SGD(clipnorm=0.3)])
def test_two_slabs_clip_as_one_does(optimizer: Optimizer) -> None:
    whole, halves = slab(optimizer), [slab(optimizer, 2, 0), slab(optimizer, 2, 1)]
    assert exchanges(optimizer, halves[0].layout) and not exchanges(optimizer, whole.layout)
    gradient = np.random.default_rng(0).standard_normal(whole.cut.size).astype(np.float32) * ones(whole)
    whole.apply([(gradient, 1)], rate=0.1)
    parts = {k: [(gradient[half.cut.start : half.cut.stop], 1.0)] for k, half in enumerate(halves)}
    scales = factors(optimizer, halves[0].layout, {k: h.sums(parts[k]) for k, h in enumerate(halves)})
    for k, half in enumerate(halves):
        half.apply(parts[k], 0.1, scales[k])
    assert np.allclose(whole.values, np.concatenate([half.values for half in halves]), atol=1e-7)


def test_parameters_that_came_later_have_their_own_bias_correction() -> None:
    old, new = slab(Adam()), slab(Adam(), steps=1000, born=[1000, 0, 1000])
    old.apply([(ones(old), 1)], rate=0.1)
    new.apply([(ones(new), 1)], rate=0.1)
    assert np.array_equal(old.values, new.values)
