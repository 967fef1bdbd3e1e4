"""The arithmetic of the benchmark: rates, ratios within a round, the band of the loss, time to a fixed loss.

*Rate.* Each worker's steps over the time from the common start to the end of its last one, summed; in sync all take
part in each round, so rounds are counted once.

*Band.* An engine may not buy steps with loss. The reference is one process that takes every step on fresh values. A
worker of an asynchronous run uses values that are some updates old, and that may cost at most ``LAG`` steps and a tenth
of each: the loss at step n has to lie between those of the reference at 0.9 n - LAG and 1.1 n + LAG, within three
standard errors. A window outside does not count.

*Time to a fixed loss.* One target for all of a table's block: what the slowest of the compared sides reaches when 85 %
of its window is over. A side's time is the middle of the first stretch of losses whose mean is that low.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

LAG = 8.0  # updates: each of three workers may have two of the others' between its pull and its push, and some slack
SLACK = 0.1
ERRORS = 3.0
LEAST = 8  # losses in a bin; with fewer, it says nothing


@dataclass(frozen=True)
class Curve:
    """Losses of single batches by time (seconds since the start of the window) and by global step, in order of time."""

    time: Doubles
    step: Doubles
    loss: Doubles

    def __len__(self) -> int:
        return len(self.time)


def curve(logs: Iterable[Doubles]) -> Curve:
    """One curve from each worker's rows of (time, step, loss)."""
    kept = [log for log in logs if len(log)]
    if not kept:
        return Curve(*(np.zeros(0) for _ in range(3)))
    rows = np.concatenate(kept)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return Curve(rows[:, 0], rows[:, 1], rows[:, 2])


def rate(counts: Sequence[int], seconds: Sequence[float], sync: bool = False) -> float:
    """Applied updates per second, of workers that made ``counts`` steps in ``seconds`` each."""
    if sync:
        return max(counts) / max(seconds)
    return sum(count / spent for count, spent in zip(counts, seconds, strict=True) if spent > 0)


def slope(times: Sequence[float], steps: Sequence[float]) -> float:
    """Steps per second from single sightings of the global step; 0.0 for fewer than two."""
    if len(times) < 2 or max(times) == min(times):
        return 0.0
    return float(np.polyfit(np.asarray(times) - times[0], np.asarray(steps, float), 1)[0])


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Ours over theirs, round by round; rounds in which either is missing are left out."""
    return [a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b]


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


class Reference:
    """The loss of one process by step, smoothed over a tenth of the steps so far."""

    def __init__(self, of: Curve) -> None:
        order = np.argsort(of.step, kind="stable")
        self.loss = of.loss[order]
        self.sums = np.concatenate([[0.0], np.cumsum(self.loss)])
        self.steps = len(self.loss)

    def at(self, step: Doubles) -> Doubles:
        half = np.maximum(2.0, 0.05 * step)
        low = np.clip(np.floor(step - half), 0, self.steps - 1).astype(int)
        high = np.clip(np.ceil(step + half), low + 1, self.steps).astype(int)
        return np.asarray((self.sums[high] - self.sums[low]) / (high - low))

    def error(self, low: float, high: float) -> float:
        """The standard error of its mean between two steps."""
        part = self.loss[int(max(low, 0)) : int(high) + 1]
        return float(part.std() / max(len(part), 1) ** 0.5) if len(part) > 1 else 0.0


@dataclass(frozen=True)
class Band:
    """``excess``: how far the worst bin lies outside, 0 inside. ``compared``: bins that could be compared."""

    excess: float
    step: int
    loss: float
    expected: float
    compared: int

    @property
    def inside(self) -> bool:
        return self.excess <= 0 and self.compared > 0


def band(run: Curve, reference: Reference) -> Band:
    """Where ``run`` leaves the band of ``reference`` most."""
    worst, compared = Band(0.0, 0, 0.0, 0.0, 0), 0
    for low, high in bins(reference.steps / (1 + SLACK) - LAG):
        chosen = (run.step >= low) & (run.step < high)
        if chosen.sum() < LEAST:
            continue
        compared += 1
        steps, losses = run.step[chosen], run.loss[chosen]
        early = float(reference.at(np.maximum(steps * (1 - SLACK) - LAG, 0)).mean())
        late = float(reference.at(steps * (1 + SLACK) + LAG).mean())
        noise = ERRORS * float(np.hypot(losses.std() / len(losses) ** 0.5, reference.error(low, high)))
        mean = float(losses.mean())
        upper, lower = max(early, late) + noise, min(early, late) - noise
        excess = max(mean - upper, lower - mean)
        if not np.isfinite(mean):
            excess = float("inf")
        if excess > worst.excess:
            worst = Band(excess, int(steps.mean()), mean, float(reference.at(steps).mean()), 0)
    return Band(worst.excess, worst.step, worst.loss, worst.expected, compared)


def bins(end: float) -> list[tuple[float, float]]:
    """0 to 20, then each half as long again as all before it."""
    edges = [0.0, 20.0]
    while edges[-1] < end:
        edges.append(edges[-1] * 1.5)
    return [(a, min(b, end)) for a, b in itertools.pairwise(edges) if a < end]


def smoothed(run: Curve, over: int) -> tuple[Doubles, Doubles]:
    """Running means of ``over`` losses, and the times of their middles."""
    if len(run) < over:
        return np.zeros(0), np.zeros(0)
    kernel = np.full(over, 1.0 / over)
    return np.convolve(run.time, kernel, "valid"), np.convolve(run.loss, kernel, "valid")


def time_to(run: Curve, loss: float, over: int) -> float | None:
    """Seconds until the mean of ``over`` losses in a row is at most ``loss``; None where it never is."""
    times, losses = smoothed(run, over)
    reached = np.flatnonzero(losses <= loss)
    return float(times[reached[0]]) if len(reached) else None


def steps_to(run: Curve, loss: float, over: int) -> float | None:
    """The same counted in global steps, for runs whose clock does not count."""
    order = np.argsort(run.step, kind="stable")
    return time_to(Curve(run.step[order], run.step[order], run.loss[order]), loss, over)


def reached(run: Curve, over: int, share: float = 0.85) -> float | None:
    """The lowest smoothed loss within the first ``share`` of the window."""
    times, losses = smoothed(run, over)
    early = losses[times <= share * times[-1]] if len(times) else losses
    return float(early.min()) if len(early) else None


def target(runs: Iterable[Curve], over: int) -> float | None:
    """A loss that each of ``runs`` reaches."""
    found = [at for at in (reached(run, over) for run in runs) if at is not None]
    return max(found) if found else None


def thinned(run: Curve, points: int = 60) -> list[list[float]]:
    """Means of (time, step, loss) in up to ``points`` parts of equal number: what is kept of a curve as JSON."""
    if not len(run):
        return []
    rows = np.stack([run.time, run.step, run.loss], 1)
    return [[round(float(v), 4) for v in part.mean(0)] for part in np.array_split(rows, min(points, len(rows)))]
