"""What a compiled Keras model tells the parameter servers: its optimizer, its learning rate, and what cannot be had.

Everything that ``fit`` refuses is refused here, by name, before training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps.optimizers import parse


def refuse(model: Any, keras: Any) -> None:
    """Raises Refused for a model that Muster's parameter servers would train differently from Keras."""
    if not getattr(model, "compiled", False):
        raise Refused("The model is not compiled", at=model.name, try_="model.compile(optimizer=..., loss=...) first")
    for name in ("train_step", "make_train_function"):
        if getattr(type(model), name, None) is not getattr(keras.Model, name, None) and not _is_keras(
            type(model), name, keras
        ):
            raise Refused(
                f"{type(model).__name__} overrides {name}", at=type(model).__module__,
                because="Muster computes the gradients itself, and would pass your version by",
                try_="put the loss into compile() or compute_loss(), or write the loop with muster.connect()",
            )  # fmt: skip
    if model.optimizer is None:
        raise Refused("The model has no optimizer", at=model.name, try_="model.compile(optimizer=...)")
    optimizer, scaling = inner(model.optimizer)
    for name, why in (
        ("use_ema", "moving averages of weights"),
        ("gradient_accumulation_steps", "gradient accumulation"),
    ):
        if getattr(optimizer, name, None):
            raise Refused(
                f"The optimizer asks for {why}", at=f"{type(optimizer).__name__}({name}=...)",
                because="the parameter servers keep none", try_=f"leave out {name}",
            )  # fmt: skip
    parse(describe(optimizer))
    if scaling is not None and getattr(optimizer, "loss_scale_factor", None):
        raise Refused("The optimizer scales the loss twice", at=f"{type(optimizer).__name__}(loss_scale_factor=...)")


def refuse_variables(model: Any, trainable: list[Any]) -> None:
    """Raises Refused for variables that the parameter servers would treat differently from Keras."""
    if not trainable:
        raise Refused("The model has nothing to train", at=model.name, try_="layer.trainable = True for some layer")
    for variable in trainable:
        if getattr(variable, "constraint", None) is not None:
            raise Refused(
                f"{variable.path} has a constraint", at=f"{model.name}: {type(variable.constraint).__name__}",
                because="the parameter servers update the weights, and know none",
                try_="leave it out, or use a regularizer",
            )  # fmt: skip
        if getattr(variable, "overwrite_with_gradient", False):
            raise Refused(f"{variable.path} is set by its gradient", at=model.name, because="float8 is not supported")


def refuse_metrics(model: Any, limit: int) -> None:
    """Raises Refused for metrics whose sums (``limit`` bytes, in base64) the workers could not tell each other."""
    single = [one for metric in model.metrics for one in getattr(metric, "metrics", None) or [metric]]
    sizes = {metric: sum(math.prod(v.shape) for v in metric.variables) for metric in single}
    if sum(sizes.values()) * 6 > limit:  # four bytes are 5.3 characters
        largest = max(sizes, key=lambda metric: sizes[metric])
        raise Refused(
            f"The metric {largest.name} keeps {sizes[largest]} numbers", at=model.name,
            because=f"all workers' metrics are added up at the end of an epoch, and {limit // 6} numbers can be",
            try_="leave it out of compile(), and ask for it when fit is over",
        )  # fmt: skip


def _is_keras(kind: type, name: str, keras: Any) -> bool:
    """Functional and Sequential may have their own; a user's class may not."""
    owner = next((c for c in kind.__mro__ if name in vars(c)), None)
    return owner is None or owner.__module__.split(".")[0] == keras.__name__.split(".")[0]


def inner(optimizer: Any) -> tuple[Any, Any]:
    """The optimizer that updates the weights, and the LossScaleOptimizer around it (float16), if there is one."""
    within = getattr(optimizer, "inner_optimizer", None)
    return (within, optimizer) if within is not None else (optimizer, None)


def describe(optimizer: Any) -> dict[str, Any]:
    """What ``muster.ps.optimizers.parse`` takes. The learning rate is left out: it travels with each push."""
    config = {key: value for key, value in optimizer.get_config().items() if key != "learning_rate"}
    return {"class_name": type(optimizer).__name__, "config": config}


class Rate:
    """The learning rate at a step: the optimizer's number, or its schedule taken at the step that was pulled."""

    def __init__(self, optimizer: Any, keras: Any, tf: Any) -> None:
        self._optimizer, self._tf = optimizer, tf
        schedule = getattr(optimizer, "_learning_rate", None)
        self.scheduled = callable(schedule) and not hasattr(schedule, "assign")
        takes_step = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)

        def at(step: Any) -> Any:
            assert callable(schedule)
            return tf.cast(schedule(step) if takes_step else schedule(), tf.float32)

        self._schedule = at if not takes_step else tf.function(at, autograph=False)
        self._last: tuple[int, float] = (-1, 0.0)
        self._number = 0.0 if self.scheduled else self.read()

    def read(self) -> float:
        """What the optimizer's variable says now, after a callback may have set it."""
        if self.scheduled:
            return float("nan")
        self._number = float(np.asarray(self._optimizer.learning_rate))
        return self._number

    def at(self, step: int) -> float:
        if not self.scheduled:
            return self._number
        if self._last[0] != step:
            self._last = (step, float(self._schedule(self._tf.constant(step, self._tf.int64))))
        return self._last[1]


def give_back(optimizer: Any, variables: list[Any], views: dict[str, list[Any]], steps: int) -> None:
    """Writes the slots that live on the ps into the optimizer's own variables, so that a saved model holds them."""
    if not optimizer.built:
        optimizer.build(variables)
    for slot, values in views.items():
        for variable, value in zip(_slots(optimizer, slot, variables), values, strict=True):
            if variable is not None:
                variable.assign(value)
    optimizer.iterations.assign(steps)


def brought(optimizer: Any, variables: list[Any]) -> tuple[dict[str, list[Any]], int]:
    """The slots of an optimizer that has trained before (a model that was loaded), and its count of steps."""
    steps = int(np.asarray(optimizer.iterations))
    if not steps or not optimizer.built:
        return {}, 0
    found = {name: _slots(optimizer, name, variables) for name in parse(describe(optimizer)).kept()}
    whole = {name: row for name, row in found.items() if all(variable is not None for variable in row)}
    return {name: [np.asarray(variable.numpy(), np.float32) for variable in row] for name, row in whole.items()}, steps


def _slots(optimizer: Any, slot: str, variables: list[Any]) -> list[Any]:
    """The optimizer's own variables for a slot, in the order of ``variables``; None where it has none."""
    by_path = {variable.path: variable for variable in optimizer.variables}
    return [by_path.get(f"{optimizer.name}/{variable.path.replace('/', '_')}_{slot}") for variable in variables]
