"""Muster makes a TensorFlow training cluster of parameter servers and workers out of the machines you have.

What a training script needs of it stands here, and is imported only when it is asked for:

- ``report(step=..., loss=..., total=..., accuracy=...)``: what the screen of the run shows
- ``worker_index()``, ``workers()``, ``is_chief()``, ``task()``: who am I (alone: 0, 1, True, "worker/0")
- ``ready()``: the start barrier;  ``finished()``: training is over, though the script goes on
- ``training_ended()``, ``final_step()``: for an evaluator with a loop of its own
- ``fit(model, x, y, ...)``: Keras' ``Model.fit`` over Muster's parameter servers;  ``chunks(items, load)``: its data
- ``connect()``: Muster's own parameter servers, for a loop of your own

This module travels to the machines of a run, so it imports nothing.
"""

__version__ = "0.1.0"

_NAMES = {
    "fit": "muster.train.fit",
    "chunks": "muster.train.batches",
    "report": "muster.train.report",
    "ready": "muster.train.report",
    "finished": "muster.train.report",
    "training_ended": "muster.train.evaluator",
    "final_step": "muster.train.evaluator",
    "worker_index": "muster.train.context",
    "workers": "muster.train.context",
    "is_chief": "muster.train.context",
    "task": "muster.train.context",
    "connect": "muster.ps.connect",
}

__all__ = [
    "__version__",
    "chunks",
    "connect",
    "final_step",
    "finished",
    "fit",
    "is_chief",
    "ready",
    "report",
    "task",
    "training_ended",
    "worker_index",
    "workers",
]


def __getattr__(name: str) -> object:
    if name in _NAMES:
        import importlib

        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'muster' has no attribute {name!r}")
