"""``muster.fit``: Keras' ``Model.fit`` over Muster's parameter servers.

The script does not change between one process and many. Run by itself, this is ``model.fit``. In a run, every worker
computes gradients of the batches that it is lent and the parameter servers apply them; the chief (a worker like the
others) also validates, runs the callbacks and keeps the History.

How an epoch ends is the part with ideas in it. Batches are numbered and lent out by ps 0, so each is done once, and an
epoch is over when all that were lent are done, wherever. Metrics are sums: every worker posts those of its share when
it finds nothing left, and the chief adds them up. In async and bounded the others go on with the next epoch while the
chief closes this one (validates, calls the callbacks), but no further: what a callback decides is one epoch late there
at most. In sync all wait for the chief to close the epoch, so that a learning rate which a callback has set, or a
decision to stop, holds for every gradient after it, exactly as in one process.

Whoever waits has said so to every ps, so nobody waits for it: two that wait for each other cannot come about.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.train.batches import Chunks, Pieces
from muster.train.chief import Chief
from muster.train.context import Context, context
from muster.train.options import Options, Place, source
from muster.train.part import Life, Part, Worker
from muster.train.report import Channel, channel

_life = Life()


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Train ``model``. Takes what Keras' ``Model.fit`` takes, and returns its History: that of the run.

    ``x`` and ``y`` are arrays (or nests of them), a ``tf.data.Dataset``, a PyDataset, a generator, or
    ``muster.chunks(...)``. Arrays, a PyDataset and chunks are dealt out to the workers, each sample once an epoch; a
    dataset or generator is read whole by every worker, with its own seed unless the script shards it, and needs
    ``steps_per_epoch``. ``batch_size`` is a worker's. ``epochs`` x ``steps_per_epoch`` counts steps of the whole run
    (in sync: rounds). Callbacks run on the chief; one with ``every_worker = True`` runs everywhere.

    When it returns, the model of every worker holds the final values, and the chief's optimizer the slots of the ps.
    Raises Refused for what the parameter servers cannot train as Keras would: an overridden ``train_step``, an
    optimizer without counterpart, constraints, variables made during a step.
    """
    wanted = Options(
        batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight, sample_weight,
        initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq,
    )  # fmt: skip
    me = context()
    if me.alone:
        return _alone(model, x, y, wanted)
    if me.engine != "muster":
        raise Refused(
            "muster.fit trains over Muster's own parameter servers", at=f"--engine {me.engine}",
            because="under TensorFlow's runtime each worker would train alone here", try_="muster run --engine muster",
        )  # fmt: skip
    return part(model, x, y, wanted, me, channel(), _life).run()


def part(model: Any, x: Any, y: Any, options: Options, me: Context, reports: Channel, life: Life) -> Part:
    """This worker's part of one call, ready to ``run``."""
    kind = Chief if me.is_chief else Worker
    return kind(model, x, y, options, me, reports, life)


def _alone(model: Any, x: Any, y: Any, options: Options) -> Any:
    told = vars(options)
    if not isinstance(x, Chunks):
        return model.fit(x, y, **told)
    import keras
    import tensorflow as tf

    pieces = source(x, y, options, Place(0, 1, 1), keras, tf)
    assert isinstance(pieces, Pieces)
    first = options.initial_epoch

    def batches() -> Iterator[Any]:
        epoch = first
        while True:
            order = np.random.default_rng([1, epoch]).permutation(len(pieces))
            for number in order:
                yield from pieces.of(int(number), epoch)
            epoch += 1

    steps = sum(1 for number in range(len(pieces)) for _ in pieces.of(number, first))
    return model.fit(batches(), **{**told, "batch_size": None, "class_weight": None, "steps_per_epoch": steps})
