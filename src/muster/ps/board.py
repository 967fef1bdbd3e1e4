"""What all workers share besides parameters, kept on ps 0: who works on which chunk of data, decisions, small results.

Pure: no sockets and no clock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster.errors import Refused

NOTES = 4096  # keys on the board; the oldest go
NOTE_BYTES = 256 << 10


class Lease(NamedTuple):
    """``chunk`` is to be worked on, or None; then ``over`` tells whether the epoch is, or one may still come back."""

    chunk: int | None
    over: bool


@dataclass
class Epoch:
    """The chunks of one epoch: waiting, lent to a worker, done. Each is done once, whoever dies."""

    left: list[int]
    lent: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def lend(self, task: str, finished: int | None) -> Lease:
        if finished is not None and self.lent.get(finished) == task:
            del self.lent[finished]
            self.done.add(finished)
        for chunk, holder in self.lent.items():
            if holder == task:  # it asks again because an answer was lost
                return Lease(chunk, False)
        if self.left:
            chunk = self.left.pop()
            self.lent[chunk] = task
            return Lease(chunk, False)
        return Lease(None, not self.lent)

    def give_back(self, task: str) -> list[int]:
        back = sorted((chunk for chunk, holder in self.lent.items() if holder == task), reverse=True)
        for chunk in back:
            del self.lent[chunk]
        self.left += back
        return back


class Board:
    """``rate`` and ``stop`` are the chief's decisions; they travel with every answer of ps 0."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.stop = ""
        self.epochs: dict[str, Epoch] = {}
        self.notes: dict[str, dict[str, Any]] = {}

    def lend(self, task: str, epoch: str, chunks: int, seed: int | None, finished: int | None) -> Lease:
        """A chunk of ``epoch`` (any name, such as "fit-0/epoch-3"), in an order that depends on ``seed`` and the name.

        ``seed`` None deals them in their own order. ``finished`` is the chunk that the worker has just done.
        """
        if epoch not in self.epochs:
            if not 0 < chunks <= 10_000_000:
                raise Refused(f"An epoch of {chunks} chunks", try_="make the chunks larger")
            order = list(range(chunks))
            if seed is not None:
                random.Random(f"{seed}/{epoch}").shuffle(order)
            self.epochs[epoch] = Epoch(order[::-1])
            self._forget_old_epochs()
        return self.epochs[epoch].lend(task, finished)

    def gone(self, task: str) -> None:
        """Its chunks go back to the others."""
        for epoch in self.epochs.values():
            epoch.give_back(task)

    def post(self, key: str, task: str, value: Any) -> None:
        """``task`` writes ``value`` (JSON) under ``key``, over what it wrote there before."""
        self.notes.setdefault(key, {})[task] = value
        while len(self.notes) > NOTES:
            del self.notes[next(iter(self.notes))]

    def read(self, key: str) -> dict[str, Any]:
        """What was posted under ``key``, by task."""
        return self.notes.get(key, {})

    def _forget_old_epochs(self) -> None:
        while len(self.epochs) > 8:
            del self.epochs[next(iter(self.epochs))]
