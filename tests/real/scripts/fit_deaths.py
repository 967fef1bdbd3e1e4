"""Digits over three workers, two of which die once: worker/1 in the first epoch, the chief in the second.

The chief writes down what came of it, as JSON in the file that is the first argument.
"""

import json
import os
import signal
import sys

import keras
import mnist_data

import muster

ATTEMPT = int(os.environ["MUSTER_ATTEMPT"])
DIES = {"worker/1": 0, "worker/0": 1}


class Die(keras.callbacks.Callback):
    every_worker = True

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if ATTEMPT == 1 and self.batches == 5 and self.epoch >= DIES.get(muster.task(), 99):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.batches = epoch, 0


train, held_out = mnist_data.load()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
history = muster.fit(
    model, train.x, train.y, batch_size=20, epochs=8, validation_data=(held_out.x, held_out.y), verbose=0,
    callbacks=[Die(), keras.callbacks.EarlyStopping("val_loss", patience=100)],
)  # fmt: skip
if muster.is_chief():
    told = {"attempt": ATTEMPT, "epochs": history.epoch, "steps": int(model.optimizer.iterations.numpy())}
    told["measured"] = model.evaluate(held_out.x, held_out.y, verbose=0)[1]
    with open(sys.argv[1], "w") as file:
        json.dump({**told, **history.history}, file)
