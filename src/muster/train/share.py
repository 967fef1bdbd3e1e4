"""One worker's share of a fit: what it is lent, step by step, and what it counts meanwhile."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from muster.ps.client import Client, Done
from muster.train.batches import Batch, Epochs, Pieces, Pipeline, Source
from muster.train.calls import Calls
from muster.train.compute import Compute
from muster.train.options import Place
from muster.train.report import Channel
from muster.train.settings import Rate

POLL = 0.005  # seconds between looks for work while others hold the last of it
REPORT_EVERY = 0.2  # seconds


class Share:
    """Works with the values that ``client`` holds; ``compute`` must be bound to them."""

    def __init__(
        self, client: Client, compute: Compute, source: Source, deal: Epochs, rate: Rate, place: Place, reports: Channel
    ) -> None:
        self.client, self.compute, self.source, self.deal = client, compute, source, deal
        self.rate, self.place, self.reports, self.model = rate, place, reports, compute.model
        self.sync = client.mode == "sync"
        self.offset = 0  # from the run's global step to the optimizer's own, which goes on over fits and files
        self.first = 0  # the epoch at which this fit began
        self.scale, self.good, self.growth = 1.0, 0, 2000  # float16: doubles after so many steps without overflow
        self.local = self.samples = 0
        self.logs: dict[str, Any] = {}
        self._said = self._logged = self._told = 0.0

    def train(self, name: str, epoch: int, calls: Calls, stay: bool) -> None:
        """Works on what is lent until nothing is left of the epoch; with ``stay`` until it is done, wherever.

        Somebody may die with a part of it, so whoever stays, or has nothing better to do (sync), takes that over.
        Nobody waits for a worker that has nothing to do.
        """
        loan, began, idle = None, self.client.step_now, False
        while not self.client.stopping:
            lease = self.client.lend(name, self.deal.loans, self._seed(), loan)
            loan = lease.chunk
            if loan is not None:
                if idle:
                    self.client.join()
                idle = False
                self._work(loan, epoch, began, calls)
                continue
            if not idle:
                self.client.turn("done")
                idle = True
            if lease.over or not (stay or self.sync):
                return
            time.sleep(POLL)
        if not idle:
            self.client.turn("done")

    def _seed(self) -> int | None:
        """Arrays are shuffled by sample already; chunks are dealt in another order each epoch."""
        return self.place.seed if isinstance(self.source, Pieces) else None

    def _work(self, loan: int, epoch: int, began: int, calls: Calls) -> None:
        for batch in self._batches(loan, epoch):
            if self.client.stopping:
                return
            told = calls.hears and self._due(calls)
            if told:
                self._before(began, calls)
            self._one(batch)
            if told:
                self._after(began, calls)

    def _batches(self, loan: int, epoch: int) -> Iterator[Batch]:
        source = self.source
        if isinstance(source, Pieces):
            yield from source.of(loan, epoch)
            return
        for number in self.deal.numbers(loan):
            if isinstance(source, Pipeline) or self.deal.whole:
                yield source.get(number, epoch)
            else:  # an epoch that is not one pass: the data go on where the last epoch left them
                place = (epoch - self.first) * self.deal.batches + number
                yield source.get(place % source.passes, place // source.passes)

    def _one(self, batch: Batch) -> Done:
        """One step: gradients at the values we have, applied by the ps, and the values that this leads to."""
        rate = self.rate.at(self.client.step_now + self.offset)
        outcome = self.compute.step(batch, self.scale)
        self.local += 1
        samples = int(_leaf(batch[0]).shape[0])
        done = self._push(outcome.gradients, samples, rate) if outcome.finite else self._overflow(rate)
        self.seen(done.step, outcome.loss)
        return done

    def _push(self, gradients: list[Any], samples: int, rate: float) -> Done:
        done = self.client.step(gradients, float(samples), rate)
        if not done.late:
            self.samples += samples
        if self.compute.scaled:
            self.good += 1
            if self.good >= self.growth:
                self.scale, self.good = self.scale * 2.0, 0
        return done

    def _overflow(self, rate: float) -> Done:
        """float16: the scale was too large. Nothing of this batch is applied."""
        self.scale, self.good = max(self.scale / 2.0, 1.0), 0
        if self.sync:
            return self.client.step([None] * len(self.compute.parameters), 0.0, rate)  # the round needs our part
        return self.client.pull()

    def seen(self, step: int, loss: Any, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._said >= REPORT_EVERY:
            self._said = now
            self.reports.step(step, self.local, None if loss is None else float(loss))

    # --- callbacks on batches

    def _due(self, calls: Calls) -> bool:
        now = time.monotonic()
        if now - self._told < calls.pause:
            return False
        self._told = now
        return True

    def _before(self, began: int, calls: Calls) -> None:
        if calls.exact:
            self.compute.load(self.client.views)
        calls.list.on_train_batch_begin(max(0, self.client.step_now - began))

    def _after(self, began: int, calls: Calls) -> None:
        now = time.monotonic()
        if calls.exact or now - self._logged >= REPORT_EVERY:
            self._logged = now
            self.logs = plain(self.model.get_metrics_result())
        if calls.exact:
            self.compute.load(self.client.views)
        calls.list.on_train_batch_end(max(0, self.client.step_now - began - 1), self.logs)
        if not self.client.chief:
            return
        if calls.exact:
            self.decide_rate()
        if self.model.stop_training:
            self.client.stop("a callback")

    def decide_rate(self) -> None:
        """A callback on the chief may have set the learning rate: it holds for everybody."""
        if not self.rate.scheduled:
            before = self.rate.at(0)
            if (now := self.rate.read()) != before or self.client.rate_set not in (None, now):
                self.client.set_learning_rate(now)

    # --- metrics

    def sums(self) -> list[str]:
        """The metrics' variables, their bytes in base64: sums over this worker's share of the epoch."""
        found = [self.compute.keras.ops.convert_to_numpy(v.value) for v in self._variables()]
        return [base64.b64encode(np.asarray(value).tobytes()).decode() for value in found]

    def add(self, sums: list[str]) -> None:
        """Another worker's share."""
        for variable, more in zip(self._variables(), sums, strict=True):
            value = np.asarray(self.compute.keras.ops.convert_to_numpy(variable.value))
            variable.assign(value + np.frombuffer(base64.b64decode(more), value.dtype).reshape(value.shape))

    def _variables(self) -> list[Any]:
        return [v for metric in self.model.metrics for v in metric.variables]


def plain(logs: dict[str, Any]) -> dict[str, Any]:
    """Numbers as Python has them; a metric with many values (one a class) as an array."""
    found = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(value) if value.ndim == 0 else value for name, value in found.items()}


def _leaf(nest: Any) -> Any:
    while isinstance(nest, (list, tuple, dict)):
        nest = next(iter(nest.values())) if isinstance(nest, dict) else nest[0]
    return nest
