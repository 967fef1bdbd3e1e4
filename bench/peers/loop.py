"""What every peer runs: it takes orders on stdin, a window at a time, and says on stdout what it did.

    {"do": "reset", "side": "unix", "first": true}                           back to the start weights
    {"do": "run", "side": "unix", "at": 12.5, "seconds": 3.5, "log": path}   steps from a common moment on
    {"do": "run", ..., "steps": 300}                                         the same, for a number of steps

Between orders it waits in a read, and costs nothing. ``log`` takes rows of (monotonic time, global step, loss).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol

import numpy as np


class Side(Protocol):
    """One way to train. ``stride``: updates that one ``step`` makes. ``phases``: seconds by part of a step."""

    stride: int
    phases: dict[str, float]

    def reset(self, first: bool) -> int:
        """Put the start weights back (``first``: for everybody), and tell the global step."""

    def step(self) -> tuple[int, float]:
        """Train; the global step afterwards, and the loss of the batch."""


def serve(sides: dict[str, Side]) -> None:
    """Take orders until stdin ends. Whatever else prints goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": list(sides)}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        side = sides[order["side"]]
        told = {"step": side.reset(order["first"])} if order["do"] == "reset" else run(side, order)
        print(json.dumps(told), file=answers)


def run(side: Side, order: dict[str, Any]) -> dict[str, Any]:
    """One window: how many updates, and from when to when."""
    start, limit = order["at"], order.get("steps")
    end = start + order["seconds"] if limit is None else float("inf")
    for name in side.phases:
        side.phases[name] = 0.0
    log: list[tuple[float, int, float]] = []
    step, clock = side.step, time.monotonic
    time.sleep(max(0.0, start - clock()))
    now, calls = start, 0
    while now < end and (limit is None or calls < limit):
        at, loss = step()
        now = clock()
        calls += 1
        log.append((now, at, loss))
    if order.get("log"):
        np.save(order["log"], np.array(log))
    return {"steps": calls * side.stride, "seconds": now - start, "phases": side.phases}
