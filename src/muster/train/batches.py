"""Training data as numbered batches, so that every sample of an epoch is dealt to exactly one worker.

*Arrays* know every batch by its number: the order of an epoch is a permutation that all workers draw alike, and a batch
is gathered into memory that TensorFlow aliases. A *PyDataset* knows its batches by number too. *Chunks* are dealt whole
(a file, a shard), and loaded by the worker that gets one. A *pipeline* (``tf.data``, a generator) cannot be entered at
a number: every worker reads it whole, with its own seed unless the script shards it, and numbers only count steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps.slabs import ALIGN

Batch = tuple[Any, Any, Any]  # x, y, sample weights; each a tensor, a nest of tensors, or None
GROUP = 16  # batches in one loan at most: a loan is a round trip to ps 0


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


@dataclass(frozen=True)
class Epochs:
    """How an epoch of ``batches`` is dealt out: in ``loans`` of ``group`` batches each, the last ones of fewer.

    In sync the numbers of a loan are ``stride`` (the workers) apart: all take a loan at the same round, so that a round
    is made of neighbouring batches, which is the batch that one process would have. Else they follow each other.
    ``steps`` of the run's global step make an epoch: None where nobody can know. ``whole``: an epoch is one pass.
    """

    loans: int
    group: int
    batches: int
    steps: int | None
    whole: bool
    stride: int = 1

    def numbers(self, loan: int) -> range:
        block, place = divmod(loan, self.stride)
        first = block * self.stride * self.group
        return range(first + place, min(first + self.stride * self.group, self.batches), self.stride)


def epochs(passes: int | None, given: int | None, workers: int, sync: bool) -> Epochs:
    """Of data with ``passes`` batches in one pass; ``given``: ``steps_per_epoch``, in sync counted in rounds."""
    batches = int(passes or 0) if given is None else given * (workers if sync else 1)
    group = max(1, min(GROUP, batches // (workers * 4)))
    steps = given if given is not None else -(-batches // workers) if sync else batches
    stride = workers if sync else 1
    blocks, rest = divmod(batches, group * stride)
    return Epochs(blocks * stride + min(stride, rest), group, batches, steps, given is None, stride)


class Arrays:
    """x, y and sample weights as arrays (or nests of them) with the samples along the first axis."""

    def __init__(self, x: Any, y: Any, weights: Any, batch: int, shuffle: bool, seed: int, keras: Any, tf: Any) -> None:
        self._tree, self._tf = keras.tree, tf
        flat = [_array(part, keras) for part in self._tree.flatten((x, y, weights))]
        self._nest = self._tree.pack_sequence_as((x, y, weights), flat)
        self._flat = [part for part in flat if part is not None]
        _same_length(self._flat)
        self.samples = len(self._flat[0])
        if not self.samples:
            raise Refused("The training data are empty", because=f"x has shape {self._flat[0].shape}")
        self._present = [part is not None for part in flat]
        self.batch, self._shuffle, self._seed = batch, shuffle, seed
        self.passes = -(-self.samples // batch)
        self.varies = self.samples > batch and self.samples % batch > 0
        self._order: tuple[int, Any] = (-1, None)
        self._buffers: dict[int, list[tuple[Any, Any]]] = {}

    def example(self) -> Batch:
        return self.get(0, 0)

    def get(self, number: int, epoch: int) -> Batch:
        """Batch ``number`` (from 0) of the pass over the data that belongs to ``epoch``."""
        start = number * self.batch
        stop = min(start + self.batch, self.samples)
        rows = self._rows(epoch)[start:stop] if self._shuffle else slice(start, stop)
        buffers = self._buffers.get(stop - start) or self._make(stop - start)
        filled = iter([self._fill(part, rows, *room) for part, room in zip(self._flat, buffers, strict=True)])
        flat = [next(filled) if there else None for there in self._present]
        made: Batch = self._tree.pack_sequence_as(self._nest, flat)
        return made

    def count(self, batches: int) -> int:
        """Samples in so many batches, over as many passes as that takes."""
        passes, rest = divmod(batches, self.passes)
        return passes * self.samples + min(rest * self.batch, self.samples)

    def _fill(self, part: Any, rows: Any, buffer: Any, tensor: Any) -> Any:
        if tensor is None:
            return self._tf.constant(part[rows])
        if isinstance(rows, slice):
            buffer[...] = part[rows]
        else:
            np.take(part, rows, axis=0, out=buffer, mode="clip")
        return tensor

    def _rows(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.samples))
        return self._order[1]

    def _make(self, size: int) -> list[tuple[Any, Any]]:
        """Room for a batch, and the tensor over it. Text and truth values have none: they are copied at each step."""
        made: list[tuple[Any, Any]] = []
        for part in self._flat:
            if part.dtype.kind in "fiu":
                buffer = _aligned((size, *part.shape[1:]), part.dtype)
                made.append((buffer, self._tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())))
            else:
                made.append((None, None))
        self._buffers[size] = made
        return made


class Indexed:
    """A PyDataset: batches by number, made by the script."""

    samples = 0
    varies = True

    def __init__(self, source: Any, shuffle: bool, seed: int, unpack: Callable[[Any], Batch]) -> None:
        self._source, self._shuffle, self._seed, self._unpack = source, shuffle, seed, unpack
        self.passes = len(source)
        self._order: tuple[int, Any] = (-1, None)

    def example(self) -> Batch:
        return self._unpack(self._source[0])

    def get(self, number: int, epoch: int) -> Batch:
        if self._order[0] != epoch:
            if self._order[0] >= 0 and hasattr(self._source, "on_epoch_end"):
                self._source.on_epoch_end()
            random = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, random.permutation(self.passes) if self._shuffle else range(self.passes))
        return self._unpack(self._source[int(self._order[1][number])])


class Pipeline:
    """A dataset that is read in its own order. ``get`` ignores the number.

    Worker ``index`` of ``workers`` begins its first pass that much later, where the length is known: scripts fix the
    seed of everything, and then all workers would take the same batches at the same time.
    """

    samples = 0
    varies = False

    def __init__(self, source: Any, index: int, workers: int, unpack: Callable[[Any], Batch]) -> None:
        self._source, self._unpack = source, unpack
        self._iterator: Iterator[Any] | None = None
        self._held: list[Any] = []
        self.passes = _cardinality(source)
        self._skip = (self.passes or 0) * index // max(1, workers) if hasattr(source, "skip") else 0

    def example(self) -> Batch:
        batch = self._next()
        self._held.append(batch)
        return batch

    def get(self, number: int, epoch: int) -> Batch:
        return self._held.pop() if self._held else self._next()

    def _next(self) -> Batch:
        fresh = self._iterator is None
        if self._iterator is None:
            found: Iterable[Any] = self._source.skip(self._skip) if self._skip else self._source
            self._iterator, self._skip = iter(found), 0
        try:
            return self._unpack(next(self._iterator))
        except StopIteration:
            if fresh:
                raise Refused(
                    f"The training data have run out: {type(self._source).__name__} yields nothing more",
                    at="muster.fit", try_="a source that begins anew or never ends, or a smaller steps_per_epoch",
                ) from None  # fmt: skip
            self._iterator = None
            return self._next()


class Pieces:
    """``muster.chunks`` as a source: a loan is a chunk, cut into batches where it is loaded."""

    samples = 0
    varies = True

    def __init__(self, given: Chunks, cut: Callable[[Any, int], Arrays]) -> None:
        self._given, self._cut = given, cut
        self._example = self._load(0)
        self.passes = self._example.passes * len(self)  # as good as can be known before all are loaded

    def __len__(self) -> int:
        return len(self._given.items)

    def example(self) -> Batch:
        return self._example.example()

    def of(self, number: int, epoch: int) -> Iterator[Batch]:
        arrays = self._load(number)
        for index in range(arrays.passes):
            yield arrays.get(index, epoch)

    def _load(self, number: int) -> Arrays:
        return self._cut(self._given.load(self._given.items[number]), number)


Source = Arrays | Indexed | Pipeline | Pieces


def unpacking(keras: Any, tf: Any, by_class: Mapping[int, float] | None) -> Callable[[Any], Batch]:
    """How to make a batch of what a pipeline yields."""

    def convert(part: Any) -> Any:
        if part is None or isinstance(part, tf.Tensor):
            return part
        made = np.asarray(part)
        return tf.convert_to_tensor(made.astype(keras.config.floatx()) if made.dtype.kind == "f" else made)

    def unpack(entry: Any) -> Batch:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(entry)
        if by_class is not None:
            weights = class_weights(np.asarray(y), weights, by_class)
        made: Batch = keras.tree.map_structure(convert, (x, y, weights))
        return made

    return unpack


def _cardinality(source: Any) -> int | None:
    """Batches in one pass, where the source knows it; None for unknown and endless ones."""
    if hasattr(source, "cardinality"):
        count = int(source.cardinality())
        return count if count >= 0 else None
    return len(source) if hasattr(source, "__len__") else None


def _array(part: Any, keras: Any) -> Any:
    """As an array; numbers with a point as Keras' own fit has them: in ``floatx``."""
    if part is None:
        return None
    made = np.asarray(part)
    wanted = np.dtype(keras.config.floatx())
    return made.astype(wanted) if made.dtype.kind == "f" and made.dtype != wanted else made


def _aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _same_length(parts: Sequence[Any]) -> None:
    if any(part.ndim == 0 for part in parts) or len({len(part) for part in parts}) > 1:
        raise Refused(
            "The training data have different lengths", because=", ".join(str(part.shape) for part in parts),
            try_="the same number of samples in x, y and sample_weight",
        )  # fmt: skip


def class_weights(y: Any, weights: Any, by_class: Mapping[int, float] | None) -> Any:
    """Sample weights that ``class_weight`` stands for, as Keras makes them. ``y``: classes, or one-hot rows."""
    if by_class is None:
        return weights
    if weights is not None:
        raise Refused("class_weight and sample_weight do not go together", at="muster.fit", because="Keras has it so")
    if isinstance(y, (dict, list, tuple)):
        raise Refused("class_weight needs a model with a single output", at="muster.fit")
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    labels = np.round(labels).astype(np.int64)
    found = np.ones(len(labels), np.float32)
    for label, weight in by_class.items():
        found[labels == int(label)] = weight
    return found
