"""``muster.fit``: Keras' ``Model.fit`` over Muster's parameter servers.

The script does not change between one process and many. Run by itself, this is ``model.fit``. In a run, every worker
computes gradients of the batches that it is lent and the parameter servers apply them; the chief (a worker like the
others) also validates, runs the callbacks and keeps the History.

How an epoch ends is the part with ideas in it. Batches are numbered and lent out by ps 0, so each is done once, and an
epoch is over when all that were lent are done, wherever. Metrics are sums: every worker posts those of its share when
it finds nothing left, and the chief adds them up. In async and bounded the others go on with the next epoch while the
chief closes this one (validates, calls the callbacks), but no further: what a callback decides is one epoch late there
at most. In sync all wait for the chief to close the epoch, so that a learning rate which a callback has set, or a
decision to stop, holds for every gradient after it, exactly as in one process.

Whoever waits has said so to every ps, so nobody waits for it: two that wait for each other cannot come about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps.client import Client
from muster.train.batches import Arrays, Chunks, Epochs, Pieces, epochs
from muster.train.calls import Calls
from muster.train.compute import Compute
from muster.train.context import Context, context
from muster.train.notes import HERE, LEFT, OUT, Notes
from muster.train.options import Options, Place, source
from muster.train.report import Channel, channel
from muster.train.settings import Rate, brought, describe, give_back, inner, refuse
from muster.train.share import Share, plain

LEAD = 1  # epochs that the others may be ahead of the last one that the chief has closed (async, bounded)


@dataclass
class Life:
    """What this process has been to its run: one client, and its fits so far, which every worker counts alike."""

    client: Client | None = None
    fits: int = 0
    planned: list[int | None] = field(default_factory=list)  # samples of each fit, undisturbed; None: nobody can know


_life = Life()


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Train ``model``. Takes what Keras' ``Model.fit`` takes, and returns its History: that of the run.

    ``x`` and ``y`` are arrays (or nests of them), a ``tf.data.Dataset``, a PyDataset, a generator, or
    ``muster.chunks(...)``. Arrays, a PyDataset and chunks are dealt out to the workers, each sample once an epoch; a
    dataset or generator is read whole by every worker, with its own seed unless the script shards it, and needs
    ``steps_per_epoch``. ``batch_size`` is a worker's. ``epochs`` x ``steps_per_epoch`` counts steps of the whole run
    (in sync: rounds). Callbacks run on the chief; one with ``every_worker = True`` runs everywhere.

    When it returns, the model of every worker holds the final values, and the chief's optimizer the slots of the ps.
    Raises Refused for what the parameter servers cannot train as Keras would: an overridden ``train_step``, an
    optimizer without counterpart, constraints, variables made during a step.
    """
    wanted = Options(
        batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight, sample_weight,
        initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq,
    )  # fmt: skip
    me = context()
    if me.alone:
        return _alone(model, x, y, wanted)
    if me.engine != "muster":
        raise Refused(
            "muster.fit trains over Muster's own parameter servers", at=f"--engine {me.engine}",
            because="under TensorFlow's runtime each worker would train alone here", try_="muster run --engine muster",
        )  # fmt: skip
    return Fit(model, x, y, wanted, me, channel(), _life).run()


def _alone(model: Any, x: Any, y: Any, options: Options) -> Any:
    told = vars(options)
    if not isinstance(x, Chunks):
        return model.fit(x, y, **told)
    import keras
    import tensorflow as tf

    pieces = source(x, y, options, Place(0, 1, 1), keras, tf)
    assert isinstance(pieces, Pieces)
    first = options.initial_epoch

    def batches() -> Iterator[Any]:
        epoch = first
        while True:
            order = np.random.default_rng([1, epoch]).permutation(len(pieces))
            for number in order:
                yield from pieces.of(int(number), epoch)
            epoch += 1

    steps = sum(1 for number in range(len(pieces)) for _ in pieces.of(number, first))
    return model.fit(batches(), **{**told, "batch_size": None, "class_weight": None, "steps_per_epoch": steps})


class Fit:
    """One call of ``fit`` on one worker of a run."""

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
        self.rate = Rate(self.optimizer, keras, tf)
        client = self.client = life.client or _connected(reports)
        life.client = client
        self.notes = Notes(client, f"fit-{life.fits}", reports)
        self.share = Share(client, self.compute, self.source, self.deal, self.rate, self.place, reports)
        if self.scaling is not None:
            self.share.scale = float(np.asarray(self.scaling.initial_scale))

    def _deal(self) -> Epochs:
        given = self.options.steps_per_epoch
        made = epochs(self.source.passes, given, self.place.workers, self.sync)
        if isinstance(self.source, Pieces):
            return Epochs(len(self.source), 1, len(self.source), made.steps, True)
        return made

    def run(self) -> Any:
        client = self.client
        if self.notes.chief().get("end"):
            return self._too_late()
        slots, steps = brought(self.optimizer, self.compute.trainable) if client.chief else ({}, 0)
        initial = self.compute.initial()
        client.declare(self.compute.parameters, describe(self.optimizer), initial, slots=slots, steps=steps)
        self.compute.bind(client.views)
        return self._chief() if client.chief else self._worker()

    # --- the chief

    def _chief(self) -> Any:
        o, model = self.options, self.model
        calls = self.calls = Calls(model, o, self._shown(), True, self.keras)
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
            self.share.train(self._epoch(epoch), epoch, calls, stay=True)
            logs = self._close(epoch)
            calls.list.on_epoch_end(epoch, logs)
            self._heed()
            self._closed(epoch, bool(model.stop_training) or self.client.stopping)
            if self.notes.own["stop"]:
                self.client.stop("a callback")
                break
        return self._end(calls, logs)

    def _shown(self) -> int | None:
        return None if isinstance(self.source, Pieces) else self.deal.steps

    def _epoch(self, epoch: int) -> str:
        return f"{self.notes.name}/{epoch}"

    def _prepare(self, calls: Calls) -> int:
        """Begins, or goes on where the chief's last life ended; the epoch to go on with."""
        client, notes, before = self.client, self.notes, self.notes.chief()
        self.compute.load(client.views) if before else None
        if not before:  # what the script did to the model since the last fit holds
            self._take_over()
        elif client.rate_set is not None and not self.rate.scheduled:
            self.optimizer.learning_rate = client.rate_set
        calls.list.on_train_begin()
        if before:
            memory = notes.memory()
            calls.remember(memory.get("calls", []))
            self._history(memory)
            notes.own = before
        else:
            self._heed()
            first = int(getattr(self.model, "_initial_epoch", None) or self.options.initial_epoch)
            base = int(np.asarray(self.optimizer.iterations))
            notes.own = {"begun": client.step_now, "base": base, "first": first, "closed": first - 1, "stop": False}
        self._know(notes.own)
        return int(notes.own["closed"]) + 1

    def _take_over(self) -> None:
        ours, views = self.compute.initial(), self.client.views
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, views, strict=True)):
            self.client.store(ours)
            self.client.pull()
        self.compute.load(self.client.views)

    def _know(self, told: dict[str, Any]) -> None:
        self.share.first = int(told["first"])
        self.share.offset = int(told["base"]) - int(told["begun"])

    def _begin(self) -> None:
        """Everybody may start: what the callbacks wanted before the first step is done."""
        self.notes.tell()
        self.notes.mark(HERE)
        if self.deal.steps:
            told = self.notes.own
            whole = max(0, self.options.epochs - int(told["first"])) * self.deal.steps
            self.reports.tell("Total", steps=int(told["begun"]) + whole)
        self.reports.ready()
        if self.sync and self.life.fits > 1:
            self.notes.wait(self.notes.everybody_here, "the other workers")

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
        self.notes.keep({"history": told, "epochs": list(history.epoch), "calls": self.calls.memory()})
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
        client.stop("")
        client.set_learning_rate(None)
        return self.model.history

    def _plans(self) -> int | None:
        """Samples that an undisturbed fit of these epochs trains on."""
        done = int(self.notes.own["closed"]) + 1 - int(self.notes.own["first"])
        if not isinstance(self.source, Arrays) or self.client.stopping:
            return None
        return self.source.count(done * (self.source.passes if self.deal.whole else self.deal.batches))

    # --- the others

    def _worker(self) -> Any:
        o, notes = self.options, self.notes
        notes.mark(HERE)
        told = notes.wait(notes.chief, "the chief to begin")
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


def _connected(reports: Channel) -> Client:
    """The one client of this process: it lives as long as the process does."""
    import os

    from muster.ps.connect import introduced

    hello = reports.hello()
    reports.tell("Joined")
    return introduced(os.environ, hello, notice=reports.say)
