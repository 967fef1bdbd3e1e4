"""The chief's part of one call of ``fit``: it trains like the others, and closes the epochs.

Whatever it decides or counts is on the board of ps 0 before it matters, so that its next life goes on from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from muster.train.batches import Arrays
from muster.train.best import Best
from muster.train.calls import Calls
from muster.train.notes import HERE, LEFT, OUT
from muster.train.part import Part
from muster.train.settings import brought, describe
from muster.train.share import plain


class Chief(Part):
    def _declare(self) -> None:
        slots, steps = brought(self.optimizer, self.compute.trainable)
        initial = self.compute.initial()
        self.client.declare(self.compute.parameters, describe(self.optimizer), initial, slots=slots, steps=steps)

    def _train(self) -> Any:
        o, model = self.options, self.model
        calls = self.calls = Calls(model, o, self._shown(), True, self.keras)
        self.best = Best(calls, self.compute, self.client, self.reports)
        model.stop_training = False
        logs: dict[str, Any] = {}
        start = self._prepare(calls)
        end = start if self.notes.own["stop"] else o.epochs
        if start >= end:
            self._begin()
        for epoch in range(start, end):
            self.compute.load(self.client.views)
            calls.list.on_epoch_begin(epoch)
            self._heed()
            if epoch == start:
                self._begin()
            self._open(epoch)
            model.reset_metrics()
            began = self.client.step_now
            self.share.train(self._epoch(epoch), epoch, calls, stay=True)
            logs = self._close(epoch)
            calls.count(self.client.step_now - began)  # in async the others may be a few steps into the next one
            calls.list.on_epoch_end(epoch, logs)
            self._heed()
            self._closed(epoch, bool(model.stop_training) or self.client.stopping)
            if self.notes.own["stop"]:
                self.client.stop("a callback")
                break
        return self._end(calls, logs)

    def _prepare(self, calls: Calls) -> int:
        """Begins, or goes on where the chief's last life ended; the epoch to go on with."""
        client, notes, before = self.client, self.notes, self.notes.chief()
        self.compute.load(client.views) if before else None
        if not before:  # what the script did to the model since the last fit holds
            self._take_back()
            self._take_over()
        elif client.rate_set is not None and not self.rate.scheduled:
            self.optimizer.learning_rate = client.rate_set
        calls.list.on_train_begin()
        if before:
            memory = notes.memory()
            calls.remember(memory.get("calls", []))
            self._history(memory)
            self.best.back(memory.get("best", ""))
            notes.own = before
        else:
            self._heed()
            first = int(getattr(self.model, "_initial_epoch", None) or self.options.initial_epoch)
            base = int(np.asarray(self.optimizer.iterations))
            notes.own = {"begun": client.step_now, "base": base, "first": first, "closed": first - 1, "stop": False}
        self._know(notes.own)
        return int(notes.own["closed"]) + 1

    def _take_over(self) -> None:
        if not int(np.asarray(self.optimizer.iterations)):  # the model may have been compiled anew since
            self.client.anew()
        ours, views = self.compute.initial(), self.client.views
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, views, strict=True)):
            self.client.store(ours)
            self.client.pull()
        self.compute.load(self.client.views)

    def _begin(self) -> None:
        """Everybody may start: what the callbacks wanted before the first step is done."""
        self.notes.tell()
        self.notes.mark(HERE)
        if self.deal.steps and not self.me.spare:
            told = self.notes.own
            whole = max(0, self.options.epochs - int(told["first"])) * self.deal.steps
            self.reports.tell("Total", steps=int(told["begun"]) + whole)
        self.reports.ready()
        if self.sync and self.life.fits > 1:
            self.notes.wait(self.notes.everybody_here, "the other workers")

    def _close(self, epoch: int) -> dict[str, Any]:
        """The run's metrics of this epoch: sums over all workers, and validation on values pulled now."""
        client, notes = self.client, self.notes
        client.pull()
        self.compute.load(client.views)
        if not client.stopping:
            notes.wait(lambda: self._all_told(epoch), "the metrics of the other workers")
        for task, sums in notes.sums(epoch).items():
            if task != self.me.task:
                self.share.add(sums)
        logs = plain(self.model.get_metrics_result())
        if self.options.validates(epoch):
            logs.update(self._validate())
        self._give_back(slots=self.calls.saves)
        self.reports.metrics({name: value for name, value in logs.items() if isinstance(value, float)})
        return logs

    def _all_told(self, epoch: int) -> bool:
        return set(self.notes.sums(epoch)) >= set(self.notes.marks()) - {self.me.task}

    def _validate(self) -> dict[str, Any]:
        o = self.options
        x, y, weights = self.keras.utils.unpack_x_y_sample_weight(o.validation_data)
        if self.sync and self.place.workers > 1:
            self.reports.say("the chief validates; in sync the others wait for it")
        found = self.model.evaluate(
            x, y, sample_weight=weights, batch_size=o.validation_batch_size or o.batch_size, steps=o.validation_steps,
            callbacks=self.calls.list, return_dict=True, verbose=0,
        )  # fmt: skip
        return {f"val_{name}": value for name, value in plain(found).items()}

    def _heed(self) -> None:
        """A callback may have set the learning rate, or weights: they are the run's from now on."""
        self.share.decide_rate()
        if self.compute.changed():
            self.client.store(self.compute.initial())
            self.client.pull()
            self.compute.load(self.client.views)

    def _closed(self, epoch: int, stop: bool) -> None:
        history = self.model.history
        told = {name: [v if isinstance(v, float) else None for v in row] for name, row in history.history.items()}
        self.best.keep(f"{self.me.attempt}/{epoch}")
        memory = {"history": told, "epochs": list(history.epoch), "calls": self.calls.memory(), "best": self.best.label}
        self.notes.keep(memory)
        self.notes.tell(closed=epoch, stop=stop)

    def _end(self, calls: Calls, logs: dict[str, Any]) -> Any:
        """Nobody pushes any more before the last word of the callbacks, and nobody leaves before it is known."""
        client, notes, me = self.client, self.notes, self.me.task
        client.turn("done")
        notes.wait(lambda: notes.all_at(OUT, but=me), "the others to stop")
        client.pull()
        self.compute.load(client.views)
        calls.list.on_train_end(logs)
        self._heed()
        notes.tell(end=True, planned=self._plans())
        self._finish()
        notes.wait(lambda: notes.all_at(LEFT, but=me), "the others to end")
        self._take_back()
        return self.model.history

    def _take_back(self) -> None:
        """What was decided in one fit does not hold in the next; a chief may have died before it could say so."""
        self.client.stop("")
        self.client.set_learning_rate(None)

    def _plans(self) -> int | None:
        """Samples that an undisturbed fit of these epochs trains on."""
        done = int(self.notes.own["closed"]) + 1 - int(self.notes.own["first"])
        if not isinstance(self.source, Arrays) or self.client.stopping:
            return None
        return self.source.count(done * (self.source.passes if self.deal.whole else self.deal.batches))
