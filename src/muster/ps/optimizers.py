"""Keras' optimizers in NumPy, in place, block by block.

Each rule is written with the same operations in the same order as Keras 3 has them, in float32, so that the weights of
the two stay together to rounding (a test holds them against Keras itself). What depends on the step and not the
element (Adam's bias correction) is computed in float32 too, since Keras does: at step 1 its rounding is 1e-5.

An optimizer sees blocks of at most ``BLOCK`` floats, so that scratch stays in cache. Smaller ones cost: a ps that waits
for its turn between workers finds its caches cold, and Python's part of a block is then dear (a quarter to two fifths
of an update at 128 KiB, on two cores).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from muster.errors import Refused, nearest
from muster.ps.slabs import Doubles, Floats, Layout

BLOCK = 1 << 17  # floats: 512 KiB an array


@dataclass(frozen=True)
class Optimizer:
    """Settings that every optimizer has, and a rule. ``slots`` names the arrays that it keeps beside the weights."""

    weight_decay: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    slots: ClassVar[tuple[str, ...]] = ()
    default_rate: ClassVar[float] = 0.001  # the learning rate where nobody gives one, as Keras has it

    def kept(self) -> tuple[str, ...]:
        """The slots that these settings need."""
        return ()

    def initial(self, slot: str) -> float:
        return 0.0

    def update(
        self, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, step: int, spare: list[Floats]
    ) -> None:
        """One step on one block, in place. ``step`` counts from 1; ``spare`` is two blocks of scratch; ``g`` stays."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= rate g; with momentum: m = momentum m - rate g, w += m (Nesterov: w += momentum m - rate g)."""

    momentum: float = 0.0
    nesterov: bool = False

    default_rate: ClassVar[float] = 0.01

    def kept(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, step: int, spare: list[Floats]
    ) -> None:
        t, u = spare
        np.multiply(g, np.float32(rate), out=t)
        if not self.momentum:
            w -= t
            return
        m = slots[0]
        m *= np.float32(self.momentum)
        m -= t
        if self.nesterov:
            np.multiply(m, np.float32(self.momentum), out=u)
            u -= t
            w += u
        else:
            w += m


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba, 2014, algorithm 1 with the "epsilon hat" of section 2; amsgrad: Reddi et al., 2018."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False

    def kept(self) -> tuple[str, ...]:
        return ("momentum", "velocity", "velocity_hat") if self.amsgrad else ("momentum", "velocity")

    def update(
        self, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, step: int, spare: list[Floats]
    ) -> None:
        t, u = spare
        m, v = slots[0], slots[1]
        one, at = np.float32(1), np.float32(step)
        power_1, power_2 = np.power(np.float32(self.beta_1), at), np.power(np.float32(self.beta_2), at)
        alpha = np.float32(rate) * np.sqrt(one - power_2) / (one - power_1)
        np.subtract(g, m, out=t)
        t *= np.float32(1 - self.beta_1)
        m += t
        np.multiply(g, g, out=t)
        t -= v
        t *= np.float32(1 - self.beta_2)
        v += t
        if self.amsgrad:
            v = np.maximum(slots[2], v, out=slots[2])
        np.sqrt(v, out=t)
        t += np.float32(self.epsilon)
        np.multiply(m, alpha, out=u)
        u /= t
        w -= u


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), which in Keras 3 is Adam with another default."""

    weight_decay: float | None = 0.004


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """a += g^2, w -= rate g / sqrt(a + epsilon) (Duchi et al., 2011)."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def kept(self) -> tuple[str, ...]:
        return ("accumulator",)

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value

    def update(
        self, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, step: int, spare: list[Floats]
    ) -> None:
        t, u = spare
        a = slots[0]
        np.multiply(g, g, out=t)
        a += t
        np.add(a, np.float32(self.epsilon), out=t)
        np.sqrt(t, out=t)
        np.multiply(g, np.float32(rate), out=u)
        u /= t
        w -= u


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """v = rho v + (1 - rho) g^2, w -= rate g / sqrt(v - mean(g)^2 + epsilon); the mean only where ``centered``."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    def kept(self) -> tuple[str, ...]:
        extra = (("momentum",) if self.momentum > 0 else ()) + (("average_gradient",) if self.centered else ())
        return ("velocity", *extra)

    def update(
        self, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, step: int, spare: list[Floats]
    ) -> None:
        t, u = spare
        v = slots[0]
        np.multiply(g, g, out=t)
        t *= np.float32(1 - self.rho)
        v *= np.float32(self.rho)
        v += t
        if self.centered:
            mean = slots[-1]
            np.multiply(g, np.float32(1 - self.rho), out=t)
            mean *= np.float32(self.rho)
            mean += t
            np.multiply(mean, mean, out=t)
            np.subtract(v, t, out=t)
            t += np.float32(self.epsilon)
        else:
            np.add(v, np.float32(self.epsilon), out=t)
        np.sqrt(t, out=t)
        np.multiply(g, np.float32(rate), out=u)
        u /= t
        if self.momentum > 0:
            m = slots[1]
            m *= np.float32(self.momentum)
            m += u
            w -= m
        else:
            w -= u


KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW, Adagrad, RMSprop)}

# Of Keras' settings: those that mean nothing here, and those that must be off, with what to do instead.
_IGNORED = {
    "class_name",
    "module",
    "registered_name",
    "build_config",
    "name",
    "learning_rate",
    "ema_momentum",
    "ema_overwrite_frequency",
    "is_legacy_optimizer",
    "jit_compile",
}
_OFF = {
    "use_ema": "average the weights in a callback",
    "gradient_accumulation_steps": "make batch_size that much larger, or use more workers in sync mode",
    "loss_scale_factor": "leave it out: the parameter servers keep float32, so only float16 gradients need it",
}


def parse(config: Mapping[str, Any]) -> Optimizer:
    """The optimizer that ``config`` describes.

    ``config`` is what ``keras.optimizers.serialize(optimizer)`` gives (``class_name`` and ``config``), or
    ``optimizer.get_config()`` where its ``name`` is still the default one ("adam", "sgd_3"). The learning rate is not
    looked at: it travels with each push. Raises Refused for an optimizer, or a setting, that has no counterpart here.
    """
    settings: Mapping[str, Any] = config.get("config", config)
    kind = _kind(str(config.get("class_name") or settings.get("name") or ""))
    known = {field.name for field in fields(kind)}
    for name, value in settings.items():
        if name in _OFF and value:
            raise Refused(f"The parameter servers do not support {name}={value!r}", try_=_OFF[name])
        if name not in known and name not in _IGNORED and name not in _OFF:
            meant = nearest(name, sorted(known))
            raise Refused(
                f"{kind.__name__} has no setting called {name}",
                try_=f"did you mean {meant}?" if meant else "it has " + ", ".join(sorted(known)),
            )
    chosen = kind(**{name: value for name, value in settings.items() if name in known})
    return _checked(chosen)


def _kind(name: str) -> type[Optimizer]:
    plain = re.sub(r"_\d+$", "", name.rpartition(">")[2]).lower()
    for known, kind in KINDS.items():
        if known.lower() == plain:
            return kind
    raise Refused(
        f"The parameter servers have no optimizer called {name or '(no name)'}",
        because="each update rule is written again in NumPy, and this one is not",
        try_="use one of " + ", ".join(KINDS) + ", or --engine tensorflow, which runs any optimizer",
    )


def _checked(optimizer: Optimizer) -> Optimizer:
    clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(optimizer, name) is not None]
    if len(clips) > 1:
        raise Refused(f"Only one of {' and '.join(clips)} can be set", try_="choose one")
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if value is not None and not isinstance(value, (int, float)):
            raise Refused(f"{type(optimizer).__name__}: {field.name} must be a number", because=f"it is {value!r}")
    return optimizer


# --- clipping by a norm


def exchanges(optimizer: Optimizer, layout: Layout) -> bool:
    """Whether the norm to clip by is one that no single ps can compute, because the gradient lies on several."""
    several = sum(1 for cut in layout.cuts if cut.size) > 1
    return several and bool(optimizer.global_clipnorm or (optimizer.clipnorm and layout.is_cut()))


def factors(optimizer: Optimizer, layout: Layout, sums: Mapping[int, Doubles]) -> dict[int, Doubles]:
    """What to multiply each piece of the gradient by, per ps.

    ``sums[k]`` holds the sum of squares of each piece of slab k. With ``global_clipnorm`` all pieces get one factor,
    with ``clipnorm`` all pieces of one parameter do; the formulas are Keras' own (a norm that is not finite gives NaN).
    """
    if optimizer.global_clipnorm:
        norm = np.sqrt(sum(float(part.sum()) for part in sums.values()))
        limit = optimizer.global_clipnorm
        factor = limit / max(norm, limit) + (norm - norm)
        return {k: np.full(len(part), factor) for k, part in sums.items()}
    assert optimizer.clipnorm, "there is no norm to clip by"
    limit = optimizer.clipnorm
    squares = np.zeros(len(layout.parameters))
    for k, part in sums.items():
        np.add.at(squares, [piece.parameter for piece in layout.cuts[k].pieces], part)
    each = limit / np.maximum(np.sqrt(squares), limit)
    return {k: each[[piece.parameter for piece in layout.cuts[k].pieces]] for k in sums}
