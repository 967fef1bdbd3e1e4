"""Keras' callbacks in a run of many workers: which of them hear of a batch, what they may change, what outlives them.

On the chief all callbacks run, elsewhere those with ``every_worker = True``. A callback of Keras' own that hears of
batches (the bar, TensorBoard) is told after each batch of this worker, with metrics a few times a second; one of the
script's own, or one that saves in mid-epoch, finds the model's variables and the metrics exact at every batch, which
costs time.
"""

from __future__ import annotations

from typing import Any

from muster.train.options import Options

BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
LOOKS = ("ModelCheckpoint", "BackupAndRestore", "LambdaCallback")  # Keras' own that use the model they see
BAR_EVERY = 0.05  # seconds


class Calls:
    """``hears``: somebody is told of batches. ``exact``: and may look at the model then. ``saves``: after an epoch."""

    def __init__(self, model: Any, options: Options, steps: int | None, chief: bool, keras: Any) -> None:
        given = options.callbacks
        listed = list(given.callbacks) if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given)
        listed = [c for c in listed if c is not None and (chief or getattr(c, "every_worker", False))]
        verbose = (2 if options.verbose == "auto" else int(options.verbose)) if chief else 0
        hearing = [c for c in listed if hears(c, keras)]
        self.hears = verbose == 1 or bool(hearing)
        self.pause = 0.0 if hearing else BAR_EVERY  # a bar alone is drawn now and then: it costs more than a small step
        self.exact = any(_looks(c) and getattr(c, "save_freq", None) != "epoch" for c in hearing)
        self.saves = any(_looks(c) for c in listed)
        self.list = keras.callbacks.CallbackList(
            listed, add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose, epochs=options.epochs,
            steps=steps,
        )  # fmt: skip
        bars = [c for c in self.list.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
        self._bars = bars if steps is None else []

    def count(self, steps: int) -> None:
        """How many steps the epoch that ends now had, for a bar that could not know before."""
        for callback in self._bars:
            callback.target, callback.seen = None, steps

    def memory(self) -> list[dict[str, Any]]:
        """What the callbacks count (best value, epochs waited): numbers, words and truth values."""
        return [{k: v for k, v in vars(c).items() if _plain(v) and k != "seen"} for c in self.list.callbacks]

    def remember(self, memory: list[dict[str, Any]]) -> None:
        for callback, known in zip(self.list.callbacks, memory, strict=False):
            for name, value in known.items():
                if name in vars(callback):
                    setattr(callback, name, value)


def hears(callback: Any, keras: Any) -> bool:
    """Whether ``callback`` does anything at a batch."""
    base = keras.callbacks.Callback
    return any(
        name in vars(callback) or getattr(type(callback), name, None) is not getattr(base, name) for name in BATCH
    )


def _looks(callback: Any) -> bool:
    kind = type(callback)
    return kind.__module__.split(".")[0] != "keras" or kind.__name__ in LOOKS


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
