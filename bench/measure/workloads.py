"""What is trained: four models, their start weights, their batches. NumPy only, since every peer reads it.

Learning rates are far from the edge, so that a gradient which is some steps old is worth nearly as much as a fresh one:
otherwise steps per second would be bought with loss. The band of ``figures`` checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGITS = Path(__file__).parents[2] / "examples" / "data" / "mnist_5k.npz"
HELD_OUT = 1000
BATCH = 100
SEED = 7


@dataclass(frozen=True)
class Workload:
    """``sizes``: units of each layer, the inputs first. ``rate``: learning rate of SGD. ``seconds``: of one window.

    ``smooth``: losses of single batches in one running mean. ``reference``: steps of the run that the band is made of.
    """

    name: str
    what: str
    sizes: tuple[int, ...]
    rate: float
    seconds: float
    smooth: int
    reference: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Kernel, bias, kernel, bias, ..."""
        pairs = zip(self.sizes[:-1], self.sizes[1:], strict=True)
        return [shape for a, b in pairs for shape in ((a, b), (b,))]

    @property
    def floats(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def start(self) -> list[NDArray[np.float32]]:
        """The same in every process: He's normal for kernels (zeros for the softmax), zeros for biases."""
        random = np.random.default_rng(SEED)
        made = []
        for shape in self.shapes:
            flat = len(shape) == 1 or len(self.sizes) == 2
            scale = 0.0 if flat else (2.0 / shape[0]) ** 0.5
            made.append((random.standard_normal(shape) * scale).astype(np.float32))
        return made


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "softmax 784x10", (784, 10), 0.02, 3.5, 60, 15000),
        Workload("W2", "20 layers of 128", (784, *[128] * 20, 10), 0.0005, 3.5, 60, 1200),
        Workload("W3", "MLP, 1.0 M", (784, 512, 768, 256, 10), 0.01, 3.5, 40, 1000),
        Workload("W4", "MLP, 10.1 M", (784, 2048, 2560, 1280, 10), 0.005, 5.0, 12, 150),
    )
}


def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """4,000 digits: float32 in 0..1, shape (4000, 784), and their labels."""
    with np.load(DIGITS) as stored:
        x, y = stored["x"].astype(np.float32) / 255, stored["y"].astype(np.int64)
    order = np.random.default_rng(1).permutation(len(x))[HELD_OUT:]
    return x[order], y[order]


def rows(seed: int) -> Iterator[NDArray[np.int64]]:
    """Which digits each batch takes: drawn anew for every step, differently for every worker."""
    random = np.random.default_rng([SEED, seed])
    while True:
        yield random.integers(0, 4000, BATCH)
