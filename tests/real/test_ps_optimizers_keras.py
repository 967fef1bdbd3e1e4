"""Our optimizers against Keras' own: 100 steps on the same gradients, apart by at most 1e-5 of the largest movement.

The only test of muster.ps that imports Keras. Each case runs over two slabs, with a tensor that is cut in the middle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.ps.optimizers import exchanges, factors, parse
from muster.ps.slab import Slab
from muster.ps.slabs import Floats, Parameter, lay_out

keras = pytest.importorskip("keras")

SHAPES = [(37, 11), (11,), (300, 20), (20,), ()]
STEPS = 100


def cases() -> list[Any]:
    sgd, adam, rms = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.RMSprop
    falling = keras.optimizers.schedules.ExponentialDecay(0.05, 20, 0.7)
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([30, 60], [0.01, 0.003, 0.001])
    cosine = keras.optimizers.schedules.CosineDecay(0.001, 80, warmup_target=0.01, warmup_steps=10)
    return [
        sgd(0.05),
        sgd(falling, momentum=0.9),
        sgd(0.05, momentum=0.9, nesterov=True),
        sgd(0.05, momentum=0.8, nesterov=True, weight_decay=0.01, clipnorm=0.5),
        sgd(0.05, global_clipnorm=1.0),
        sgd(0.05, clipvalue=0.1),
        adam(0.001),
        adam(steps, amsgrad=True),
        adam(0.01, global_clipnorm=0.3, weight_decay=0.1),
        keras.optimizers.AdamW(cosine),
        keras.optimizers.AdamW(0.01, weight_decay=0.05, clipnorm=0.2),
        keras.optimizers.Adagrad(0.05),
        keras.optimizers.Adagrad(0.05, initial_accumulator_value=0.01, clipvalue=0.5),
        rms(0.001),
        rms(cosine, momentum=0.9),
        rms(0.001, centered=True),
        rms(0.001, momentum=0.5, centered=True, weight_decay=0.02),
    ]


def gradients(seed: int, step: int) -> list[Floats]:
    random = np.random.default_rng([seed, step])
    scale = 1.0 + np.sin(step / 7)  # so that amsgrad's maximum and the clips both bind at times
    return [(scale * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]


def rate_at(optimizer: Any, step: int) -> float:
    schedule = optimizer._learning_rate
    return float(schedule(step)) if callable(schedule) and not hasattr(schedule, "assign") else float(schedule)


def by_keras(optimizer: Any, start: list[Floats], exclude: bool) -> list[Floats]:
    variables = [keras.Variable(value, name=f"v{i}") for i, value in enumerate(start)]
    if exclude:
        optimizer.exclude_from_weight_decay(var_names=["v1", "v3"])
    optimizer.build(variables)
    for step in range(STEPS):
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients(1, step)])
    return [np.asarray(v) for v in variables]


def by_muster(optimizer: Any, start: list[Floats], exclude: bool) -> list[Floats]:
    parameters = [Parameter(f"v{i}", shape, decay=not (exclude and i in (1, 3))) for i, shape in enumerate(SHAPES)]
    layout = lay_out(parameters, 2)
    assert layout.is_cut()
    ours = parse(keras.optimizers.serialize(optimizer))
    slabs = [Slab(layout, k, ours) for k in range(2)]
    flat = np.zeros(layout.size, np.float32)
    for view, value in zip(layout.views(flat), start, strict=True):
        view[...] = value
    for slab in slabs:
        slab.values[:] = flat[slab.cut.start : slab.cut.stop]
    gradient = np.zeros(layout.size, np.float32)
    for step in range(STEPS):
        for view, value in zip(layout.views(gradient), gradients(1, step), strict=True):
            view[...] = value
        parts = {k: [(gradient[s.cut.start : s.cut.stop], 1.0)] for k, s in enumerate(slabs)}
        scales = {}
        if exchanges(ours, layout):
            scales = factors(ours, layout, {k: s.sums(parts[k]) for k, s in enumerate(slabs)})
        for k, slab in enumerate(slabs):
            slab.apply(parts[k], rate_at(optimizer, step), scales.get(k))
    for slab in slabs:
        flat[slab.cut.start : slab.cut.stop] = slab.values
    return layout.views(flat)


def test_optimizers_are_those_of_keras() -> None:
    random = np.random.default_rng(0)
    start = [(0.1 * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    apart = {}
    for number, optimizer in enumerate(cases()):
        exclude = number % 2 == 1
        ours = by_muster(optimizer, start, exclude)
        theirs = by_keras(optimizer, start, exclude)
        largest = max(float(np.abs(new - old).max()) for new, old in zip(theirs, start, strict=True))
        error = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
        apart[f"{number} {type(optimizer).__name__}"] = error / largest
    print(apart)
    assert all(value <= 1e-5 for value in apart.values()), apart


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
def test_a_rate_that_nobody_gives_is_that_of_keras(name: str) -> None:
    assert parse({"name": name}).default_rate == pytest.approx(float(keras.optimizers.get(name).learning_rate))
