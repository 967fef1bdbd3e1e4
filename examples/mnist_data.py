"""The 5,000 real digits in data/mnist_5k.npz, cut into 4,000 to train on and 1,000 held out."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = Path(__file__).parent / "data" / "mnist_5k.npz"
HELD_OUT = 1000


class Digits(NamedTuple):
    """``x``: float32 in 0..1, shape (n, 784). ``y``: int64 labels, shape (n,)."""

    x: np.ndarray
    y: np.ndarray

    def share(self, index: int, of: int) -> "Digits":
        """Every ``of``-th digit from ``index`` on: the part of one worker."""
        return Digits(self.x[index::of], self.y[index::of])

    def batches(self, size: int, seed: int = 0):
        """Batches of ``size``, for ever, in another order each epoch."""
        random = np.random.default_rng(seed)
        while True:
            order = random.permutation(len(self.x))
            for begin in range(0, len(order) - size + 1, size):
                chosen = order[begin : begin + size]
                yield self.x[chosen], self.y[chosen]


def load(permute_labels: bool = False) -> tuple[Digits, Digits]:
    """Digits to train on, and those held out. ``permute_labels`` shuffles the labels of the first, so that there is
    nothing to learn: whatever still reaches a good accuracy then is not measuring it."""
    with np.load(FILE) as stored:
        x, y = stored["x"].astype(np.float32) / 255, stored["y"].astype(np.int64)
    order = np.random.default_rng(1).permutation(len(x))  # the file is sorted by label
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    labels = np.random.default_rng(2).permutation(y[train]) if permute_labels else y[train]
    return Digits(x[train], labels), Digits(x[held_out], y[held_out])
