"""What is declared on a ps: the layer in use, and the one that is staged until the chief commits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.errors import MusterError, Refused
from muster.ps import wire
from muster.ps.optimizers import parse
from muster.ps.slab import Slab
from muster.ps.slabs import Declaration, Floats, declaration
from muster.ps.wire import Header, WireError


@dataclass
class Layer:
    """One declaration and the slab made for it."""

    declaration: Declaration
    slab: Slab
    fingerprint: str
    kept: Floats | None = None  # values that the chief wants back one day, and what it calls them
    label: str = ""


class Layers:
    """``number`` counts the layers that were in use; 0: nothing is declared. ``free``: bytes of memory to be had."""

    def __init__(self, index: int, free: Callable[[], int]) -> None:
        self.index, self.free = index, free
        self.number = 0
        self.now: Layer | None = None
        self.staged: Layer | None = None
        self._coming: Layer | None = None  # its values are still on their way

    @property
    def slab(self) -> Slab:
        if self.now is None:
            raise Refused(f"ps/{self.index} has no parameters", because="nothing was declared since it started")
        return self.now.slab

    def stage(self, header: Header, meta: bytes) -> list[memoryview]:
        """Make the slab of a declaration; where its values land, and its slots where they come too.

        Raises WireError for what cannot be declared, before anything is allocated.
        """
        told = wire.meta(meta)
        try:
            wanted = declaration(told)
            optimizer, layout = parse(wanted.optimizer), wanted.layout()
            born, steps = [int(at) for at in told.get("born", [])], int(told.get("steps", 0))
        except (MusterError, ValueError, TypeError, OverflowError) as error:
            raise WireError(f"a declaration that cannot be: {error}") from None
        if len(layout.cuts) <= self.index or len(born) not in (0, len(layout.parameters)):
            raise WireError(f"a declaration for {len(layout.cuts)} ps at ps/{self.index}")
        arrays = 1 + len(optimizer.kept())
        size = layout.cuts[self.index].size * 4
        if size * arrays > self.free():
            raise WireError(f"a slab of {size * arrays >> 20} MiB, where {self.free() >> 20} MiB of memory are free")
        if header.data != size * (arrays if header.flags & wire.WITH_SLOTS else 1):
            raise WireError(f"{header.data} bytes for a slab of {size}")
        slab = Slab(layout, self.index, optimizer, steps, born)
        self._coming = Layer(wanted, slab, wanted.fingerprint())
        landing = [slab.values, *(slab.slots if header.flags & wire.WITH_SLOTS else [])]
        return [array.data for array in landing]

    def arrived(self) -> None:
        """The values are all here. Not before: a chief that dies while it sends must leave nothing to be committed."""
        self.staged, self._coming = self._coming, None

    def told(self, whole: bool) -> dict[str, Any]:
        """What is in use and what is staged; ``whole``: the declaration too."""
        answer: dict[str, Any] = {"number": self.number}
        answer["fingerprint"] = self.now.fingerprint if self.now else ""
        answer["kept"] = self.now.label if self.now else ""
        answer["staged"] = self.staged.fingerprint if self.staged else ""
        if self.now and whole:
            answer["declaration"] = self.now.declaration.told()
            answer["steps"], answer["born"] = self.now.slab.steps, self.now.slab.born
        return answer

    def commit(self, fingerprint: Any) -> Layer:
        """What is staged takes the place of what is in use. Raises Refused where that is not what is meant."""
        if self.staged is None or self.staged.fingerprint != fingerprint:
            raise Refused("This layout was not declared here", because=f"ps/{self.index} may have been restarted")
        self.now, self.staged = self.staged, None
        self.number += 1
        return self.now

    def store(self) -> None:
        """Values that were staged take the place of those in use; slots and counts stay."""
        now, values = self._staged_values()
        np.copyto(now.slab.values, values)

    def keep(self, label: str) -> None:
        """Values that were staged are kept beside those in use, in the place of what was kept before."""
        now, values = self._staged_values()
        now.kept, now.label = values, label

    def kept(self) -> Floats:
        if self.now is None or self.now.kept is None:
            raise Refused(f"ps/{self.index} keeps no values", because="the chief has not asked for it")
        return self.now.kept

    def _staged_values(self) -> tuple[Layer, Floats]:
        now, staged = self.now, self.staged
        if now is None or staged is None or staged.fingerprint != now.fingerprint:
            raise Refused("There are no values to store", because=f"ps/{self.index} may have been restarted")
        self.staged = None
        return now, staged.slab.values


def available() -> int:
    """Bytes of memory that this machine could still give."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62
