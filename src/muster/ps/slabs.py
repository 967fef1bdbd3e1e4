"""Where each parameter lives: one flat float32 vector, cut into one contiguous slab per ps.

The whole model is one vector. Every tensor starts on a multiple of 64 bytes in it (a tensor that is not so aligned
cannot be aliased by TensorFlow, which ends the process instead), and a slab is a slice of the vector, so a step is one
request to each ps whatever the number of variables, and a worker sees each tensor as one view even where it is cut.

A cut falls on a boundary between tensors if one is near the even split, else between rows of the tensor there, else
(rows of many megabytes) inside a row, always on a multiple of 64 bytes. Near is 2 % of a share, and a slab has two
ends, so slabs differ from the even split by 4 % at most, apart from the 64 bytes that tiny models are made of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.errors import MusterError, Refused

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ALIGN = 64  # bytes
STEP = ALIGN // 4  # the same in floats
NEAR = 0.02  # of a share


@dataclass(frozen=True)
class Parameter:
    """One tensor. ``trainable=False`` is a float statistic: averaged over the workers instead of trained.

    ``decay=False`` keeps it out of weight decay (Keras' ``exclude_from_weight_decay``). ``dtype`` is the worker's own;
    a ps holds float32 whatever it is.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    decay: bool = True
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """What of one parameter is in one slab: floats ``start`` to ``stop`` of the slab, from ``first`` of the tensor."""

    parameter: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Cut:
    """The slab of one ps: floats ``start`` to ``stop`` of the vector."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """``starts[i]`` is where parameter i begins in the vector of ``size`` floats; ``cuts[k]`` is the slab of ps k."""

    parameters: tuple[Parameter, ...]
    starts: tuple[int, ...]
    size: int
    cuts: tuple[Cut, ...]

    def views(self, vector: Floats) -> list[Floats]:
        """Each parameter as a view of ``vector``, in its own shape."""
        places = zip(self.parameters, self.starts, strict=True)
        return [vector[start : start + p.size].reshape(p.shape) for p, start in places]

    def is_cut(self) -> bool:
        """Whether some tensor lies on more than one ps."""
        return any(piece.first > 0 for cut in self.cuts for piece in cut.pieces)


def lay_out(parameters: Sequence[Parameter], ps: int) -> Layout:
    """The same answer in every process that asks, so nobody has to send it. Raises MusterError for an empty model."""
    _check(parameters)
    starts, size = [], 0
    for parameter in parameters:
        starts.append(size)
        size = _up(size + parameter.size)
    edges = [0, *(_edge(parameters, starts, size, k, ps) for k in range(1, ps)), size]
    for k in range(1, ps):
        edges[k] = max(edges[k], edges[k - 1])
    cuts = tuple(_cut(parameters, starts, edges[k], edges[k + 1]) for k in range(ps))
    return Layout(tuple(parameters), tuple(starts), size, cuts)


def _check(parameters: Sequence[Parameter]) -> None:
    if not parameters:
        raise MusterError("There are no parameters to train", try_="declare at least one variable")
    seen = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise MusterError(
                f"Two parameters are called {parameter.name}", try_="give each variable a name of its own"
            )
        if parameter.size <= 0 or any(side < 0 for side in parameter.shape):
            raise MusterError(f"The parameter {parameter.name} of shape {parameter.shape} holds nothing")
        seen.add(parameter.name)


def _edge(parameters: Sequence[Parameter], starts: list[int], size: int, k: int, ps: int) -> int:
    """Where slab k begins: the best place near the even split."""
    even = size * k / ps
    near = NEAR * size / ps
    index = int(np.searchsorted(starts, even, side="right")) - 1
    begins, ends = starts[index], (*starts, size)[index + 1]
    between = min(begins, ends, key=lambda at: abs(at - even))
    if abs(between - even) <= near:
        return between
    row = math.lcm(STEP, math.prod(parameters[index].shape[1:]))
    by_rows = begins + round((even - begins) / row) * row
    if begins < by_rows < begins + parameters[index].size and abs(by_rows - even) <= near:
        return by_rows
    return min(begins + round((even - begins) / STEP) * STEP, ends)


def _cut(parameters: Sequence[Parameter], starts: list[int], start: int, stop: int) -> Cut:
    pieces = []
    for index, (parameter, begins) in enumerate(zip(parameters, starts, strict=True)):
        low, high = max(start, begins), min(stop, begins + parameter.size)
        if low < high:
            pieces.append(Piece(index, low - start, high - start, low - begins))
    return Cut(start, stop, tuple(pieces))


def _up(floats: int) -> int:
    return -(-floats // STEP) * STEP


def aligned(floats: int) -> Floats:
    """A float32 vector of zeros whose first byte lies on a multiple of 64."""
    raw = np.zeros(floats * 4 + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + floats * 4].view(np.float32)


def buffer(given: Any) -> Floats:
    """``given`` as a flat float32 array, without a copy where it has such a buffer (a memoryview of a tensor has)."""
    try:
        array = np.asarray(memoryview(given))
    except (TypeError, BufferError):
        array = np.asarray(given)
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def floats(given: Any, parameter: Parameter) -> Floats:
    """The same for the value, or the gradient, of ``parameter``. Raises Refused where the size is another."""
    flat = buffer(given)
    if flat.size != parameter.size:
        raise Refused(f"{flat.size} floats for {parameter.name}", because=f"its shape is {parameter.shape}")
    return flat


# --- what is declared


@dataclass(frozen=True)
class Declaration:
    """Parameters and optimizer, as the chief declares them and every other worker must have them."""

    parameters: tuple[Parameter, ...]
    optimizer: dict[str, Any]  # as muster.ps.optimizers.parse takes it
    ps: int

    def layout(self) -> Layout:
        return lay_out(self.parameters, self.ps)

    def told(self) -> dict[str, Any]:
        rows = [[p.name, list(p.shape), p.trainable, p.decay, p.dtype] for p in self.parameters]
        return {"parameters": rows, "optimizer": self.optimizer, "ps": self.ps}

    def fingerprint(self) -> str:
        """Equal for equal declarations. The learning rate is left out: it is a number that travels with each push."""
        told = self.told()
        settings = {k: v for k, v in self.optimizer.get("config", {}).items() if k not in ("learning_rate", "name")}
        told["optimizer"] = {**self.optimizer, "config": settings}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def declaration(told: dict[str, Any]) -> Declaration:
    """The inverse of ``Declaration.told``. Raises ValueError for anything else."""
    try:
        rows = [
            Parameter(str(name), tuple(int(side) for side in shape), bool(trainable), bool(decay), str(dtype))
            for name, shape, trainable, decay, dtype in told["parameters"]
        ]
        return Declaration(tuple(rows), dict(told["optimizer"]), int(told["ps"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not a declaration: {error!r}") from None


def differences(ours: Declaration, theirs: Declaration) -> str:
    """What two declarations do not agree on, a line each, the first eight; empty where they agree."""
    mine, other = ({p.name: p for p in d.parameters} for d in (ours, theirs))
    lines = [f"{name} is declared here and not by the chief" for name in mine if name not in other]
    lines += [f"{name} is declared by the chief and not here" for name in other if name not in mine]
    for name in mine.keys() & other.keys():
        if mine[name] != other[name]:
            lines.append(f"{name} is {_words(mine[name])} here and {_words(other[name])} at the chief")
    if ours.optimizer != theirs.optimizer:
        lines.append(f"the optimizer is {ours.optimizer} here and {theirs.optimizer} at the chief")
    if not lines and ours.parameters != theirs.parameters:
        lines.append("the parameters are the same in another order")
    more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "\n".join([*sorted(lines)[:8], *more])


def _words(parameter: Parameter) -> str:
    extra = "" if parameter.trainable else " not trained"
    return f"{parameter.dtype}{list(parameter.shape)}{extra}"
