"""What the workers of one fit tell each other, on the board of ps 0.

The chief has one note: where the fit began, which epoch it closed last, whether to stop, whether all is over. Every
worker has one mark: how far it is. So a worker that comes back, chief or not, reads where the run stands, and the board
does not grow with the epochs. Nobody waits for a worker that is gone, or that never came to this fit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from muster.ps.board import NOTE_BYTES
from muster.ps.client import Client
from muster.train.report import Channel

POLL = (0.002, 0.05)  # seconds between looks at the board while we wait for others: at first, and later
PATIENCE = 5.0  # seconds of waiting after which the screen is told
KEEP = 4  # epochs whose sums the board keeps; never more than two are open
HERE, OUT, LEFT = -1, 1 << 40, (1 << 40) + 1  # marks; those between are epochs


class Notes:
    def __init__(self, client: Client, name: str, reports: Channel) -> None:
        self.client, self.name, self.reports = client, name, reports
        self.own: dict[str, Any] = {}

    # --- the chief's note

    def chief(self) -> dict[str, Any]:
        """What the chief has told of this fit; empty before it begins."""
        found = self.client.read(self.name)
        return dict(next(iter(found.values()), {}))

    def tell(self, **news: Any) -> None:
        """The chief adds to its note."""
        self.own.update(news)
        self.client.post(self.name, self.own)

    def keep(self, memory: dict[str, Any]) -> None:
        """The chief's History and its callbacks' state, for everybody and for its own next life."""
        if len(json.dumps(memory)) < NOTE_BYTES * 3 // 4:  # beyond that (10,000 epochs), a successor begins a new one
            self.client.post(f"{self.name}/memory", memory)

    def memory(self) -> dict[str, Any]:
        found = self.client.read(f"{self.name}/memory")
        return dict(next(iter(found.values()), {}))

    # --- marks

    def mark(self, mark: int) -> None:
        self.client.post(f"{self.name}/marks", mark)

    def marks(self) -> dict[str, int]:
        """Of those who came to this fit and are not gone."""
        here = self.alive()
        return {task: mark for task, mark in self.client.read(f"{self.name}/marks").items() if task in here}

    def alive(self) -> set[str]:
        members = self.client.stats()[0]["workers"]
        return {task for task, told in members.items() if told["phase"] != "gone"}

    def all_at(self, mark: int, but: str = "") -> bool:
        return all(reached >= mark for task, reached in self.marks().items() if task != but)

    def everybody_here(self) -> bool:
        """Whether every connected worker has come to this fit."""
        return set(self.client.read(f"{self.name}/marks")) >= self.alive()

    # --- sums of metrics

    def add_sums(self, epoch: int, sums: list[str]) -> None:
        self.client.post(f"{self.name}/sums/{epoch % KEEP}", [epoch, sums])

    def sums(self, epoch: int) -> dict[str, list[str]]:
        found = self.client.read(f"{self.name}/sums/{epoch % KEEP}")
        return {task: sums for task, (of, sums) in found.items() if of == epoch}

    # --- waiting

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        """Asks until there is an answer; the screen is told when that takes long."""
        since, told, pause = time.monotonic(), False, POLL[0]
        while not (answer := found()):
            time.sleep(pause)
            pause = min(pause * 1.5, POLL[1])
            if not told and time.monotonic() - since > PATIENCE:
                told = True
                self.reports.say(f"{self.client.who.task} waits for {what}, since {PATIENCE:.0f} s")
        return answer
