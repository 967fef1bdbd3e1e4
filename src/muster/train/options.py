"""The arguments of Keras' ``Model.fit``, and the data that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.errors import Refused
from muster.train.batches import Arrays, Chunks, Indexed, Pieces, Pipeline, Source, class_weights, unpacking


@dataclass
class Options:
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    class_weight: Any = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def validates(self, epoch: int) -> bool:
        if self.validation_data is None:
            return False
        every = self.validation_freq
        return (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every


@dataclass(frozen=True)
class Place:
    """Which worker this is, of how many, in which fit of the script (from 1)."""

    index: int
    workers: int
    fit: int

    @property
    def seed(self) -> int:
        """The same on all workers, another in each fit."""
        return 20_000 + self.fit


def source(x: Any, y: Any, o: Options, place: Place, keras: Any, tf: Any) -> Source:
    """The training data. Where ``validation_split`` is asked for, its part moves to ``o.validation_data``."""
    batch = o.batch_size or 32
    if isinstance(x, Chunks):
        return _pieces(x, y, batch, o, place, keras, tf)
    if _is_array(x, keras):
        weights = o.sample_weight
        if o.validation_split and o.validation_data is None:
            x, y, weights = _split(x, y, weights, o, keras)
        weights = class_weights(y, weights, o.class_weight)
        return Arrays(x, y, weights, batch, bool(o.shuffle), place.seed, keras, tf)
    name = type(x).__name__
    if not (hasattr(x, "__iter__") or isinstance(x, keras.utils.PyDataset)):
        raise Refused(
            f"muster.fit cannot train on {name}", at="muster.fit",
            try_="arrays, a tf.data.Dataset, a PyDataset, a generator, or muster.chunks(...)",
        )  # fmt: skip
    if y is not None:
        raise Refused(f"y does not go with {name}", at="muster.fit", because="it yields x and y together")
    _none_of(o, name, "batch_size", "validation_split", "sample_weight")
    unpack = unpacking(keras, tf, o.class_weight)
    if isinstance(x, keras.utils.PyDataset):
        return Indexed(x, bool(o.shuffle), place.seed, unpack)
    made = Pipeline(x, place.index, place.workers, unpack)
    if o.steps_per_epoch is None:
        known = f"; one pass is {made.passes} batches" if made.passes else ""
        raise Refused(
            f"steps_per_epoch is needed with {name}", at="muster.fit",
            because=f"every worker reads it whole, so its end is not the end of an epoch{known}",
            try_="steps_per_epoch=..., counted over all workers; arrays and muster.chunks are dealt out instead",
        )  # fmt: skip
    return made


def _pieces(x: Chunks, y: Any, batch: int, o: Options, place: Place, keras: Any, tf: Any) -> Pieces:
    if y is not None:
        raise Refused("y does not go with muster.chunks", at="muster.fit", because="load(item) gives x and y together")
    _none_of(o, "muster.chunks", "steps_per_epoch", "validation_split", "sample_weight")

    def cut(loaded: Any, number: int) -> Arrays:
        a, b, weights = keras.utils.unpack_x_y_sample_weight(loaded)
        weights = class_weights(b, weights, o.class_weight)
        return Arrays(a, b, weights, batch, bool(o.shuffle), place.seed + 1000 * number, keras, tf)

    return Pieces(x, cut)


def _none_of(o: Options, kind: str, *names: str) -> None:
    for name in names:
        if getattr(o, name) not in (None, 0.0):
            raise Refused(f"{name} does not go with {kind}", at="muster.fit", because="it yields whole batches")


def _split(x: Any, y: Any, weights: Any, o: Options, keras: Any) -> tuple[Any, Any, Any]:
    share, tree = o.validation_split, keras.tree
    if not 0 < share < 1:
        raise Refused(f"validation_split={share!r}", at="muster.fit", try_="a number between 0 and 1")
    at = int(len(tree.flatten(x)[0]) * (1.0 - share))

    def cut(nest: Any, begin: int, end: int | None) -> Any:
        return tree.map_structure(lambda p: None if p is None else p[begin:end], nest)

    data = (cut(x, at, None), cut(y, at, None))
    o.validation_data = data if weights is None else (*data, cut(weights, at, None))
    return cut(x, 0, at), cut(y, 0, at), cut(weights, 0, at)


def _is_array(x: Any, keras: Any) -> bool:
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "element_spec"):
        return False
    flat = keras.tree.flatten(x)
    return bool(flat) and all(hasattr(part, "shape") and hasattr(part, "__getitem__") for part in flat)
