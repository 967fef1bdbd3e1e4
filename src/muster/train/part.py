"""One worker's part of one call of ``fit``: what the chief and the others have in common, and the others' own way.

The others train on what they are lent, tell their sums, and wait where the chief has a word to say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from muster.ps.board import NOTE_BYTES
from muster.ps.client import Client
from muster.ps.connect import introduced
from muster.train.batches import Epochs, Pieces, epochs
from muster.train.calls import Calls
from muster.train.compute import Compute
from muster.train.context import Context
from muster.train.notes import HERE, LEFT, OUT, Notes
from muster.train.options import Options, Place, source
from muster.train.report import Channel
from muster.train.settings import Rate, describe, give_back, inner, refuse, refuse_metrics
from muster.train.share import Share, plain

LEAD = 1  # epochs that the others may be ahead of the last one that the chief has closed (async, bounded)


@dataclass
class Life:
    """What this process has been to its run: one client, and its fits so far, which every worker counts alike."""

    client: Client | None = None
    fits: int = 0
    planned: list[int | None] = field(default_factory=list)  # samples of each fit, undisturbed; None: nobody can know


class Part:
    """``life`` is the process': where it has no client yet, one is made. ``reports`` go to the screen of the run."""

    def __init__(self, model: Any, x: Any, y: Any, options: Options, me: Context, reports: Channel, life: Life) -> None:
        import keras
        import tensorflow as tf

        refuse(model, keras)
        self.model, self.options, self.me, self.reports, self.life = model, options, me, reports, life
        self.keras, self.sync = keras, me.mode == "sync"
        self.optimizer, self.scaling = inner(model.optimizer)
        life.fits += 1
        separate = "chief" in me.cluster and not me.chief_computes
        index = 0 if me.is_chief else me.worker_index + separate
        self.place = Place(index, me.workers + separate, life.fits)
        self.source = source(x, y, options, self.place, keras, tf)
        self.deal = self._deal()
        example = self.source.example()
        self.compute = Compute(model, example, keras, tf, self.scaling is not None)
        if not getattr(model, "_muster_seeds", False):
            model._muster_seeds = True
            self.compute.scatter_seeds(index)
        self.compute.prepare(example, self.source.varies)
        if self.place.workers > 1:
            refuse_metrics(model, NOTE_BYTES)
        self.rate = Rate(self.optimizer, keras, tf)
        client = self.client = life.client or connected(reports)
        life.client = client
        self.notes = Notes(client, f"fit-{life.fits}", reports)
        self.share = Share(client, self.compute, self.source, self.deal, self.rate, self.place, reports)
        if self.scaling is not None:
            self.share.scale = float(np.asarray(self.scaling.initial_scale))
            self.share.growth = int(self.scaling.dynamic_growth_steps)

    def _deal(self) -> Epochs:
        given = self.options.steps_per_epoch
        made = epochs(self.source.passes, given, self.place.workers, self.sync)
        if isinstance(self.source, Pieces):
            return Epochs(len(self.source), 1, len(self.source), made.steps, True)
        return made

    def run(self) -> Any:
        """Train; the run's History."""
        if self.notes.chief().get("end"):
            return self._too_late()
        self._declare()
        self.compute.bind(self.client.views)
        return self._train()

    def _declare(self) -> None:
        self.client.declare(self.compute.parameters, describe(self.optimizer), self.compute.initial())

    def _train(self) -> Any:
        raise NotImplementedError

    def _shown(self) -> int | None:
        """Steps of an epoch, where they can be known: with spare workers a round may lack some of them."""
        return None if isinstance(self.source, Pieces) or self.me.spare else self.deal.steps

    def _epoch(self, epoch: int) -> str:
        return f"{self.notes.name}/{epoch}"

    def _know(self, told: dict[str, Any]) -> None:
        self.share.first = int(told["first"])
        self.share.offset = int(told["base"]) - int(told["begun"])

    def _open(self, epoch: int) -> None:
        """Takes part again. In sync nobody begins an epoch before all can: its first rounds would lack somebody."""
        client, notes = self.client, self.notes
        client.join()
        if not self.sync:
            return
        notes.mark(epoch)
        if client.chief:
            notes.wait(lambda: notes.all_at(epoch), "the other workers")
            notes.tell(open=epoch)
        else:
            notes.wait(lambda: notes.chief().get("open", epoch - 1) >= epoch, "the chief to begin the epoch")
        client.pull()

    # --- the end

    def _finish(self) -> None:
        """The optimizer as it would be after training in one process; and what this worker's share came to."""
        client, notes = self.client, self.notes
        if client.rate_set is not None and not self.rate.scheduled:
            self.optimizer.learning_rate = client.rate_set
        self._give_back(slots=client.chief)
        self.share.seen(client.step_now, None, True)
        whole = client.stats()[0]
        stats = whole["workers"].get(self.me.task, {})
        self.life.planned.append((notes.own or notes.chief()).get("planned"))
        if client.chief and None not in self.life.planned:
            self.reports.tell("Data", samples=round(whole["samples"]), planned=sum(n or 0 for n in self.life.planned))
        self.reports.tell(
            "Account", samples=self.share.samples, staleness=float(stats.get("staleness_mean", 0.0)),
            staleness_max=int(stats.get("staleness_max", 0)), dropped=int(stats.get("dropped", 0)),
        )  # fmt: skip

    def _give_back(self, slots: bool) -> None:
        """To the optimizer: the count of steps, and the slots that live on the ps."""
        client, steps = self.client, self.client.step_now + self.share.offset
        self.optimizer.iterations.assign(steps)
        if slots:
            kept = {name: client.layout.views(flat) for name, flat in client.state().items() if name}
            count = len(self.compute.trainable)
            give_back(self.optimizer, self.compute.trainable, {name: v[:count] for name, v in kept.items()}, steps)

    def _too_late(self) -> Any:
        """This fit was over before we came back: take what came of it."""
        client, notes = self.client, self.notes
        told = notes.chief()
        self._know(told)
        if client.holds(self.compute.parameters, describe(self.optimizer)):
            client.declare(self.compute.parameters, describe(self.optimizer), self.compute.initial())
            client.turn("done")
            self.compute.bind(client.views)
            self.compute.load(client.views)
            self._finish()
        else:  # the run is in a later fit, whose values we get there
            self.life.planned.append(told.get("planned"))
        self._history(notes.memory())
        notes.mark(LEFT)
        self.reports.ready()
        return self.model.history

    def _history(self, memory: dict[str, Any]) -> None:
        """The run's History, as the chief kept it."""
        history = getattr(self.model, "history", None)
        if not isinstance(history, self.keras.callbacks.History):
            history = self.model.history = self.keras.callbacks.History()
            history.set_model(self.model)
        history.history = {name: list(row) for name, row in memory.get("history", {}).items()}
        history.epoch = list(memory.get("epochs", []))


class Worker(Part):
    """Not the chief."""

    def _train(self) -> Any:
        o, notes = self.options, self.notes
        notes.mark(HERE)
        told = notes.wait(notes.chief, "the chief to begin")
        self._asked_to_stop()  # what we pulled before may have told of the last fit's end
        self._know(told)
        self.reports.ready()
        calls = self.calls = Calls(self.model, o, self._shown(), False, self.keras)
        calls.list.on_train_begin()
        for epoch in range(int(told["closed"]) + 1, o.epochs):
            if self._over(epoch):
                break
            calls.list.on_epoch_begin(epoch)
            self._open(epoch)
            self.model.reset_metrics()
            self.share.train(self._epoch(epoch), epoch, calls, stay=False)
            notes.add_sums(epoch, self.share.sums())
            calls.list.on_epoch_end(epoch, plain(self.model.get_metrics_result()))
        self.client.turn("done")
        notes.mark(OUT)
        notes.wait(lambda: notes.chief().get("end"), "the chief to end")
        self.client.pull()
        self.compute.load(self.client.views)
        self._finish()
        self._history(notes.memory())
        calls.list.on_train_end()
        notes.mark(LEFT)
        return self.model.history

    def _over(self, epoch: int) -> bool:
        """Waits until ``epoch`` may begin; True if it never will."""

        def may() -> Any:
            told = self.notes.chief()
            near = told["closed"] >= epoch - 1 - (0 if self.sync else LEAD)
            return told if near or told["stop"] or told.get("end") or self._asked_to_stop() else None

        told = self.notes.wait(may, "the chief to close the epoch")
        return bool(told["stop"] or told.get("end") or self.client.stopping)

    def _asked_to_stop(self) -> bool:
        """Whether somebody has called ``stop``, though we are not stepping."""
        self.client.stopping = bool(self.client.stats()[0]["stop"])
        return self.client.stopping


def connected(reports: Channel) -> Client:
    """The one client of this process: it lives as long as the process does."""
    hello = reports.hello()
    reports.tell("Joined")
    return introduced(os.environ, hello, notice=reports.say)
