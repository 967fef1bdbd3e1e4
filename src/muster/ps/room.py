"""A worker's arrays: where pulled values land and gradients are sent from, made once a declaration, never moved.

Each tensor in them begins on a multiple of 64 bytes, so a framework may alias them. Where slabs are shared with a ps on
this host, they are memory that the ps sees too, and a gradient that lies elsewhere is copied into it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps import wire
from muster.ps.optimizers import Optimizer, factors
from muster.ps.slabs import Cut, Doubles, Floats, Layout, Parameter, aligned, buffer, floats


def can_share() -> bool:
    """Whether this Python can make sealed memory. One built for an old system (conda's) cannot: sockets it is."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Room:
    """``values`` and ``gradient`` are float32 (layout.size,); with ``shared``, ``fds`` are the memory behind them."""

    def __init__(self, layout: Layout, shared: bool) -> None:
        self.layout, self.fds = layout, list[int]()
        self.gradient: Floats = self._memory("gradient") if shared else aligned(layout.size)
        self.values: Floats = self._memory("values") if shared else aligned(layout.size)
        self.views, self.gradients = layout.views(self.values), layout.views(self.gradient)
        self.landing = [[self.values[cut.start : cut.stop].data] for cut in layout.cuts]
        self._own = [[self.gradient[cut.start : cut.stop].data] for cut in layout.cuts]
        self._scatter = [_scatter(layout, cut) for cut in layout.cuts]
        self._zeros = bytes(max([wire.HEADER.size, *(p.size * 4 for p in layout.parameters)]))

    def _memory(self, name: str) -> Floats:
        """Memory without a name in any file system, which cannot be resized, so that a ps can trust its size."""
        fd = os.memfd_create(f"muster-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(fd)
        os.ftruncate(fd, self.layout.size * 4)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return np.frombuffer(mmap.mmap(fd, self.layout.size * 4), np.float32)

    def close(self) -> None:
        """The descriptors; the memory lives as long as somebody has a view of it."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    # --- gradients

    def buffers(self, gradient: Any) -> list[list[Any]]:
        """The buffers of each slab's gradient; see ``Client.step`` for what ``gradient`` may be."""
        if gradient is None:
            return self._own
        if isinstance(gradient, (list, tuple)):
            return self._scattered(gradient)
        flat = buffer(gradient)
        if flat.size != self.layout.size:
            raise Refused(f"A flat gradient of {flat.size} floats", because=f"the layout has {self.layout.size}")
        return [[flat[cut.start : cut.stop].data] for cut in self.layout.cuts]

    def _scattered(self, gradient: Sequence[Any]) -> list[list[Any]]:
        if len(gradient) != len(self.layout.parameters):
            raise Refused(f"{len(gradient)} gradients for {len(self.layout.parameters)} parameters")
        zeros = memoryview(self._zeros)
        flat = [
            None if given is None else _bytes(given, parameter)
            for given, parameter in zip(gradient, self.layout.parameters, strict=True)
        ]
        out = []
        for rows in self._scatter:
            buffers: list[Any] = []
            for index, low, high, pad in rows:
                whole = flat[index]
                buffers.append(zeros[: high - low] if whole is None else whole[low:high])
                if pad:
                    buffers.append(zeros[:pad])
            out.append(buffers)
        return out

    def fill(self, k: int, buffers: list[Any]) -> None:
        """Put the gradient of slab ``k`` into the memory that its ps sees, where it is not there yet."""
        own = self._own[k]
        if buffers is own or (len(buffers) == 1 and buffers[0] is own[0]):
            return
        to, at = own[0].cast("B"), 0
        for part in buffers:
            view = memoryview(part).cast("B")
            to[at : at + view.nbytes] = view
            at += view.nbytes

    def factors(self, optimizer: Optimizer, data: list[list[Any]]) -> list[Doubles]:
        """In async each worker clips its own gradient by the norm over all ps: the factor of each piece, per slab."""
        sums = {}
        for k, (cut, buffers) in enumerate(zip(self.layout.cuts, data, strict=True)):
            whole = [np.frombuffer(part, np.float32) for part in buffers]
            flat = whole[0] if len(whole) == 1 else np.concatenate(whole) if whole else np.zeros(0, np.float32)
            sums[k] = np.array([self._square(flat, piece.start, piece.stop, piece.parameter) for piece in cut.pieces])
        found = factors(optimizer, self.layout, sums)
        return [found[k] for k in range(len(data))]

    def _square(self, flat: Floats, start: int, stop: int, parameter: int) -> float:
        part = flat[start:stop]
        return float(np.dot(part, part)) if self.layout.parameters[parameter].trainable else 0.0


def _bytes(given: Any, parameter: Parameter) -> memoryview:
    """The bytes of a gradient from where it lies; one that is not float32 in one piece is copied."""
    try:
        view = memoryview(given)
    except (TypeError, BufferError):
        return floats(given, parameter).data.cast("B")
    if view.format == "f" and view.c_contiguous and view.nbytes == parameter.size * 4:
        return view.cast("B")
    return floats(given, parameter).data.cast("B")


def _scatter(layout: Layout, cut: Cut) -> list[tuple[int, int, int, int]]:
    """Per piece: parameter, first and last byte of it in this slab, and bytes of zeros behind it."""
    if not cut.pieces:
        return []  # a model smaller than the ps are many
    ends = [piece.start for piece in cut.pieces[1:]] + [cut.size]
    return [
        (p.parameter, p.first * 4, (p.first + p.stop - p.start) * 4, (end - p.stop) * 4)
        for p, end in zip(cut.pieces, ends, strict=True)
    ]
