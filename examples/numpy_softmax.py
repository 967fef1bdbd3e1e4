"""A training loop of one's own over Muster's parameter servers, in NumPy: softmax regression, 784 inputs, 10 classes.

muster run examples/numpy_softmax.py            # 2 ps and 3 workers on this machine
python examples/numpy_softmax.py                # alone, the same script
"""

import argparse
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several workers on one machine: a thread each, before NumPy

import numpy as np

import muster


def data(samples: int = 6000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ten clusters of points, so that no download is needed."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((10, 784)).astype(np.float32)
    labels = random.integers(0, 10, samples)
    return (centres[labels] + 2.0 * random.standard_normal((samples, 784), np.float32)) / 10, labels


def loss_and_gradients(params: dict, x: np.ndarray, y: np.ndarray) -> tuple[float, dict]:
    scores = x @ params["w"] + params["b"]
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -float(np.log(chances[rows, y] + 1e-9).mean())
    chances[rows, y] -= 1
    chances /= len(y)
    return loss, {"w": x.T @ chances, "b": chances.sum(axis=0)}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--batch", type=int, default=100)
    options.add_argument("--optimizer", default="sgd")
    options.add_argument("--learning-rate", type=float, default=0.05)
    args = options.parse_args()

    x, y = data()
    order = np.random.default_rng(muster.worker_index())
    ps = muster.connect()
    start = {"w": np.zeros((784, 10), np.float32), "b": np.zeros(10, np.float32)}
    params = ps.declare(start, args.optimizer, args.learning_rate)
    muster.report(total=args.steps)

    began, own, loss = time.perf_counter(), 0, 0.0
    while ps.step_now < args.steps and not ps.stopping:
        rows = order.integers(0, len(x), args.batch)
        loss, grads = loss_and_gradients(params, x[rows], y[rows])
        ps.step(grads, samples=args.batch, loss=loss)
        own += 1
    seconds = time.perf_counter() - began
    ps.pull()

    accuracy = float(((x @ params["w"] + params["b"]).argmax(axis=1) == y).mean())
    muster.report(accuracy=accuracy, loss=loss)
    rate = ps.step_now / seconds if seconds else 0.0
    print(f"{muster.task()}: {own} steps of {ps.step_now}, {rate:.0f} a second together, accuracy {accuracy:.3f}")
    ps.finish()


if __name__ == "__main__":
    main()
