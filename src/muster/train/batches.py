"""Training data as numbered batches, so that every sample of an epoch is dealt to exactly one worker.

Three sources. *Arrays* know every batch by its number: the order of an epoch is a permutation that all workers draw
alike, and a batch is gathered into memory that TensorFlow aliases. *Chunks* are dealt whole (a file, a shard), and
loaded by the worker that gets one. A *pipeline* (``tf.data``, a generator, a PyDataset) cannot be entered at a number:
every worker reads it whole, with its own seed unless the script shards it, and numbers only count steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps.slabs import ALIGN

Batch = tuple[Any, Any, Any]  # x, y, sample weights; each a tensor, a nest of tensors, or None


@dataclass(frozen=True)
class Chunks:
    """Items of training data (file names, ranges) and how to load one: see ``chunks``."""

    items: tuple[Any, ...]
    load: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        """All chunks in order, for a script that runs alone."""
        for item in self.items:
            yield self.load(item)


def chunks(items: Sequence[Any], load: Callable[[Any], Any]) -> Chunks:
    """Training data in pieces that are dealt out to the workers, each piece once an epoch.

    ``items`` are whatever names a piece: files, ranges, keys; the same list on every worker. ``load(item)`` gives its
    samples as arrays ``(x, y)`` or ``(x, y, sample_weight)``; they are cut into batches of ``batch_size`` there.
    A piece whose worker dies is dealt again. Raises Refused for an empty list.
    """
    if not len(items):
        raise Refused("There are no chunks", try_="muster.chunks(files, load) with at least one file")
    return Chunks(tuple(items), load)


class Arrays:
    """x, y and sample weights as arrays (or nests of them) with the samples along the first axis."""

    chunked = True

    def __init__(self, x: Any, y: Any, weights: Any, batch: int, shuffle: bool, seed: int, keras: Any, tf: Any) -> None:
        self._tree, self._tf = keras.tree, tf
        flat = [_array(part) for part in self._tree.flatten((x, y, weights))]
        self._nest = self._tree.pack_sequence_as((x, y, weights), flat)
        self._flat = [part for part in flat if part is not None]
        self.samples = len(self._flat[0])
        _same_length(self._flat)
        if not self.samples:
            raise Refused("The training data are empty", because=f"x has shape {self._flat[0].shape}")
        self._present = [part is not None for part in flat]
        self.batch, self._shuffle, self._seed = batch, shuffle, seed
        self.batches = -(-self.samples // batch)
        self._order: tuple[int, Any] = (-1, None)
        self._buffers: dict[int, list[tuple[Any, Any]]] = {}

    def example(self) -> Batch:
        return self.get(0, 0)

    def get(self, number: int, epoch: int) -> Batch:
        """Batch ``number`` (from 0) of the pass over the data that belongs to ``epoch``."""
        start = number * self.batch
        stop = min(start + self.batch, self.samples)
        rows = self._rows(epoch)[start:stop] if self._shuffle else slice(start, stop)
        buffers = self._buffers.setdefault(stop - start, []) or self._make(stop - start)
        for part, (buffer, _) in zip(self._flat, buffers, strict=True):
            if isinstance(rows, slice):
                buffer[...] = part[rows]
            else:
                np.take(part, rows, axis=0, out=buffer, mode="clip")
        parts = iter(self._tf.constant(buffer) if tensor is None else tensor for buffer, tensor in buffers)
        flat = [next(parts) if there else None for there in self._present]
        made: Batch = self._tree.pack_sequence_as(self._nest, flat)
        return made

    def size(self, number: int) -> int:
        return min(self.batch, self.samples - number * self.batch)

    def _rows(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.samples))
        return self._order[1]

    def _make(self, size: int) -> list[tuple[Any, Any]]:
        made = []
        for part in self._flat:
            buffer = _aligned((size, *part.shape[1:]), part.dtype)
            # text and truth values have no counterpart in DLPack: those are copied at each step
            plain = part.dtype.kind in "fiu"
            made.append((buffer, self._tf.experimental.dlpack.from_dlpack(buffer.__dlpack__()) if plain else None))
        self._buffers[size] = made
        return made


class Pipeline:
    """A dataset that is read in its own order. ``get`` ignores the number."""

    chunked = False
    samples = 0

    def __init__(
        self, source: Any, keras: Any, tf: Any, batch: int | None, weigh: Callable[[Any, Any], Any] | None
    ) -> None:
        self._source, self._keras, self._tf, self._weigh = source, keras, tf, weigh
        self._iterator: Iterator[Any] | None = None
        self._held: list[Any] = []
        self.batches = _cardinality(source)

    def example(self) -> Batch:
        batch = self._next()
        self._held.append(batch)
        return batch

    def get(self, number: int, epoch: int) -> Batch:
        return self._held.pop() if self._held else self._next()

    def _next(self) -> Batch:
        fresh = self._iterator is None
        if self._iterator is None:
            self._iterator = iter(_entries(self._source))
        try:
            return self._unpack(next(self._iterator))
        except StopIteration:
            if fresh:
                raise Refused("The training data are empty", at=type(self._source).__name__) from None
            self._iterator = None
            return self._next()

    def _unpack(self, entry: Any) -> Batch:
        x, y, weights = self._keras.utils.unpack_x_y_sample_weight(entry)
        if self._weigh is not None:
            weights = self._weigh(y, weights)
        convert = self._tf.convert_to_tensor
        made: Batch = self._keras.tree.map_structure(lambda p: None if p is None else convert(p), (x, y, weights))
        return made


def _entries(source: Any) -> Iterable[Any]:
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):  # a PyDataset
        return (source[n] for n in range(len(source)))
    found: Iterable[Any] = source
    return found


def _cardinality(source: Any) -> int | None:
    """Batches in one pass, where the source knows it; None for unknown and endless ones."""
    if hasattr(source, "cardinality"):
        count = int(source.cardinality())
        return count if count >= 0 else None
    return len(source) if hasattr(source, "__len__") else None


def _array(part: Any) -> Any:
    if part is None or isinstance(part, np.ndarray):
        return part if part is None or part.dtype != np.float64 else part.astype(np.float32)
    made = np.asarray(part)
    return made.astype(np.float32) if made.dtype == np.float64 else made


def _aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _same_length(parts: Sequence[Any]) -> None:
    if len({len(part) for part in parts}) > 1:
        raise Refused(
            "The training data have different lengths", because=", ".join(str(part.shape) for part in parts),
            try_="the same number of samples in x, y and sample_weight",
        )  # fmt: skip


def class_weights(y: Any, weights: Any, by_class: Mapping[int, float] | None) -> Any:
    """Sample weights that Keras' ``class_weight`` stands for, times those given. ``y``: classes, or one-hot rows."""
    if by_class is None:
        return weights
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    table = np.ones(max(int(labels.max(initial=0)), *map(int, by_class)) + 1, np.float32)
    for label, weight in by_class.items():
        table[int(label)] = weight
    found = table[labels.astype(np.int64)]
    return found if weights is None else found * np.asarray(weights, np.float32)
