"""``muster.fit`` as a user calls it: a compiled Keras model, accuracy, a progress bar, epochs of 600 steps (MNIST's).

    python -m bench.peers.fit W1             in a run, or alone: then it is Keras' own fit

It does not end. The benchmark reads its reports, and stops and continues it by signals.
"""

from __future__ import annotations

import os
import struct
import sys
import time

import keras
import numpy as np

import muster
from bench.measure.workloads import BATCH, WORKLOADS, Workload, digits
from bench.peers.model import one_thread

EPOCH = 600


def built(work: Workload) -> keras.Model:
    layers = [keras.Input((work.sizes[0],))]
    layers += [keras.layers.Dense(units, activation="relu") for units in work.sizes[1:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(work.sizes[-1])])
    model.set_weights(work.start())
    model.compile(
        optimizer=keras.optimizers.SGD(work.rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Told(keras.callbacks.Callback):
    """Alone there is no agent to report to, so the end of each epoch goes to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.done = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.done += self.params["steps"]
        os.write(self.log, struct.pack("<3d", time.monotonic(), self.done, (logs or {}).get("loss", float("nan"))))


def main() -> None:
    one_thread()
    work = WORKLOADS[sys.argv[1]]
    x, y = digits()
    model = built(work)
    options = {"batch_size": BATCH, "epochs": 10**6, "verbose": 1}
    if len(sys.argv) > 2:  # alone, and where to write: Keras wants as many digits as an epoch has
        again = EPOCH * BATCH // len(x)
        muster.fit(model, np.tile(x, (again, 1)), np.tile(y, again), callbacks=[Told(sys.argv[2])], **options)
    muster.fit(model, x, y, steps_per_epoch=EPOCH, **options)


if __name__ == "__main__":
    main()
