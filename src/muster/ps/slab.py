"""What one ps holds: the values of its slab, the optimizer's slots beside them, and how a gradient changes both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from muster.ps.optimizers import BLOCK, Optimizer, factors
from muster.ps.slabs import Cut, Doubles, Floats, Layout, aligned

Part = tuple[Floats, float]  # a gradient of the slab, and its weight in the average (samples)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring floats that are updated alike. ``born``: the count of updates when these parameters were new."""

    start: int
    stop: int
    trained: bool
    decayed: bool
    born: int


class Slab:
    """Values and slots of ps ``index``, float32, 64-byte aligned; ``steps`` counts the updates (Keras' iterations).

    Floats between two tensors are zero and stay zero: their gradient is zero, and every rule leaves zero where it is.
    """

    def __init__(
        self, layout: Layout, index: int, optimizer: Optimizer, steps: int = 0, born: Sequence[int] = ()
    ) -> None:
        self.layout, self.index, self.optimizer = layout, index, optimizer
        self.cut: Cut = layout.cuts[index]
        self.values: Floats = aligned(self.cut.size)
        self.slots: list[Floats] = [aligned(self.cut.size) for _ in optimizer.kept()]
        self._room: list[Floats] = [aligned(BLOCK) for _ in range(4)]
        self._begin(steps, list(born) or [0] * len(layout.parameters))

    def _begin(self, steps: int, born: list[int]) -> None:
        self.steps, self.born = steps, born
        for slot, name in zip(self.slots, self.optimizer.kept(), strict=True):
            slot.fill(self.optimizer.initial(name))
        self._pieces = self._stretches(born)
        self._runs = _merged(self._pieces, self.cut.size)

    def anew(self) -> None:
        """The optimizer as it was before its first update; the values stay."""
        self._begin(0, [0] * len(self.layout.parameters))

    def _stretches(self, born: list[int]) -> list[Stretch]:
        rows = [(piece, self.layout.parameters[piece.parameter]) for piece in self.cut.pieces]
        return [
            Stretch(piece.start, piece.stop, p.trainable, p.trainable and p.decay, born[piece.parameter])
            for piece, p in rows
        ]

    def apply(self, parts: Sequence[Part], rate: float, scales: Doubles | None = None, share: float = 1.0) -> None:
        """One update by the weighted average of ``parts``.

        ``scales`` holds a factor per piece that clips it. A statistic moves by ``share`` of the average of what the
        workers moved it by: 1 in a sync round, where that makes it their mean; one over the workers where they come
        one by one, else n workers would move it n times as far as one does.
        """
        own = self.optimizer
        if scales is None and (own.clipnorm or own.global_clipnorm):
            scales = factors(own, self.layout, {self.index: self.sums(parts)})[self.index]
        for stretch, scale in self._plan(scales):
            for low, high in _blocks(stretch.start, stretch.stop):
                gradient = self._average(parts, low, high)
                if not stretch.trained:
                    self.values[low:high] -= gradient * np.float32(share)
                    continue
                self._train(stretch, low, high, self._clipped(gradient, scale), rate)
        self.steps += 1

    def _plan(self, scales: Doubles | None) -> list[tuple[Stretch, float]]:
        if scales is None or not len(scales):
            return [(run, 1.0) for run in self._runs]
        if (scales == scales[0]).all():
            return [(run, float(scales[0])) for run in self._runs]
        return [(piece, float(scale)) for piece, scale in zip(self._pieces, scales, strict=True)]

    def _train(self, stretch: Stretch, low: int, high: int, gradient: Floats, rate: float) -> None:
        weights = self.values[low:high]
        spare = [self._room[2][: high - low], self._room[3][: high - low]]
        if self.optimizer.weight_decay is not None and stretch.decayed:
            np.multiply(weights, np.float32(self.optimizer.weight_decay), out=spare[0])
            spare[0] *= np.float32(rate)
            weights -= spare[0]
        slots = [slot[low:high] for slot in self.slots]
        self.optimizer.update(weights, gradient, slots, rate, self.steps - stretch.born + 1, spare)

    def _clipped(self, gradient: Floats, scale: float) -> Floats:
        """``gradient`` may be the worker's own memory, so a change goes to scratch."""
        out = self._room[1][: len(gradient)]
        if scale != 1.0:
            return np.multiply(gradient, np.float32(scale), out=out)
        if self.optimizer.clipvalue:
            limit = np.float32(self.optimizer.clipvalue)
            return np.clip(gradient, -limit, limit, out=out)
        return gradient

    def _average(self, parts: Sequence[Part], low: int, high: int) -> Floats:
        """The average in the order of ``parts``, not that in which they came, so that a round is repeatable."""
        if len(parts) == 1:
            return parts[0][0][low:high]
        total = sum(weight for _, weight in parts)
        out, spare = self._room[0][: high - low], self._room[1][: high - low]
        np.multiply(parts[0][0][low:high], np.float32(parts[0][1] / total), out=out)
        for gradient, weight in parts[1:]:
            out += np.multiply(gradient[low:high], np.float32(weight / total), out=spare)
        return out

    def sums(self, parts: Sequence[Part]) -> Doubles:
        """The sum of squares of the averaged gradient, per piece; 0 for statistics, which are not clipped."""
        out = np.zeros(len(self._pieces))
        for index, stretch in enumerate(self._pieces):
            if stretch.trained and parts:
                averages = (self._average(parts, low, high) for low, high in _blocks(stretch.start, stretch.stop))
                out[index] = sum(float(np.dot(average, average)) for average in averages)
        return out


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))


def _merged(pieces: list[Stretch], size: int) -> list[Stretch]:
    """The same in as few stretches as can be: what lies between two tensors is zero and may be swept along."""
    runs: list[Stretch] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if last and (last.trained, last.decayed, last.born) == (piece.trained, piece.decayed, piece.born):
            runs[-1] = Stretch(last.start, piece.stop, *(last.trained, last.decayed, last.born))
        else:
            runs.append(piece)
    return runs
