"""``muster.fit``: Keras' ``Model.fit`` over Muster's parameter servers.

The script does not change between one process and many. Run by itself, this is ``model.fit``. In a run, every worker
computes gradients of the batches that it is lent and the parameter servers apply them; the chief (a worker like the
others) also validates, runs the callbacks and keeps the History.

How an epoch ends is the part with ideas in it. Batches are numbered and lent out by ps 0, so each is done once, and an
epoch is over when all that were lent are done, wherever. Metrics are sums: every worker posts those of its share when
it finds nothing left, and the chief adds them up. In async and bounded the others then go on with the next epoch at
once; in sync all wait for the chief to close the epoch, so that a learning rate which a callback has set, or a decision
to stop, holds for every gradient after it, exactly as in one process. All notes are on the board of ps 0, under a name
that every worker derives alike, so a worker that comes back finds where the run is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps.client import Client, Done
from muster.train.batches import Arrays, Batch, Chunks, Pipeline, class_weights
from muster.train.compute import Compute
from muster.train.context import Context, context
from muster.train.report import Channel, channel
from muster.train.settings import Rate, describe, give_back, inner, refuse

POLL = 0.01  # seconds between looks at the board while we wait for others
PATIENCE = 5.0  # seconds of waiting after which the screen is told
REPORT_EVERY = 0.2  # seconds
LEAD = 2  # epochs that the others may be ahead of the last one that the chief has closed (async, bounded)
GROUP = 16  # batches in one loan at most: a loan is a round trip to ps 0
SCALE_AFTER = 2000  # steps without overflow after which float16's loss scale doubles (Keras' LossScaleOptimizer)

_fits = 0  # how many fits this process has begun: every worker counts alike
_client: Client | None = None
_planned: list[int | None] = []  # samples of each fit that an undisturbed run trains on; None: nobody can know


def fit(model: Any, x: Any = None, y: Any = None, **options: Any) -> Any:
    """Train ``model``. Takes what Keras' ``Model.fit`` takes, and returns its History (on the chief: the run's).

    ``x`` and ``y`` are arrays (or nests of them), a ``tf.data.Dataset``, a PyDataset, a generator, or
    ``muster.chunks(...)``. Arrays and chunks are dealt out to the workers, each sample once an epoch; a dataset is read
    whole by every worker, with its own seed unless the script shards it, and needs ``steps_per_epoch``.
    ``batch_size`` is a worker's. ``epochs`` x ``steps_per_epoch`` counts steps of the whole run (in sync: rounds).
    Callbacks run on the chief; one with ``every_worker = True`` runs everywhere.

    When it returns, the model of every worker holds the final values, and the chief's optimizer the slots of the ps.
    Raises Refused for what the parameter servers cannot train as Keras would: an overridden ``train_step``, an
    optimizer without counterpart, variables made during a step.
    """
    me = context()
    if me.alone or me.engine != "muster":
        return _alone(model, x, y, options)
    wanted = Options(**options)
    return Fit(model, x, y, wanted, me, channel()).run()


def _alone(model: Any, x: Any, y: Any, options: dict[str, Any]) -> Any:
    if not isinstance(x, Chunks):
        return model.fit(x, y, **options)
    batch = options.pop("batch_size", None) or 32

    def batches() -> Iterator[Any]:
        while True:
            for loaded in x:
                parts = loaded if isinstance(loaded, tuple) else (loaded,)
                for start in range(0, len(_leaf(parts[0])), batch):
                    yield tuple(_cut(part, start, start + batch) for part in parts)

    if options.get("steps_per_epoch") is None:
        options["steps_per_epoch"] = sum(
            -(-len(_leaf(loaded[0] if isinstance(loaded, tuple) else loaded)) // batch) for loaded in x
        )
    return model.fit(batches(), y, **options)


class Options:
    """The arguments of ``Model.fit``, with its defaults."""

    def __init__(
        self,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> None:
        self.batch_size, self.epochs, self.verbose, self.callbacks = batch_size, epochs, verbose, callbacks
        self.validation_split, self.validation_data, self.shuffle = validation_split, validation_data, shuffle
        self.class_weight, self.sample_weight, self.initial_epoch = class_weight, sample_weight, initial_epoch
        self.steps_per_epoch, self.validation_steps = steps_per_epoch, validation_steps
        self.validation_batch_size, self.validation_freq = validation_batch_size, validation_freq


class Fit:
    """One call of ``fit`` on one worker of a run."""

    def __init__(self, model: Any, x: Any, y: Any, options: Options, me: Context, reports: Channel) -> None:
        import keras
        import tensorflow as tf

        self.keras, self.tf = keras, tf
        self.model, self.options, self.me, self.reports = model, options, me, reports
        self.sync = me.mode == "sync"
        self.workers = me.workers + (0 if me.chief_computes or "chief" not in me.cluster else 1)
        refuse(model, keras)
        self.optimizer, self.scaling = inner(model.optimizer)
        self.scale = float(np.asarray(self.scaling.initial_scale)) if self.scaling is not None else 1.0
        self.good = 0
        self.local = self.samples = 0
        self.said = 0.0
        self.name = _next_name()
        self.source = self._source(x, y)
        self.stop = False

    # --- the data

    def _source(self, x: Any, y: Any) -> Any:
        o, batch = self.options, self.options.batch_size or 32
        if isinstance(x, Chunks):
            return Pieces(x, batch, o, self.keras, self.tf)
        if _is_array(x, self.keras):
            weights = o.sample_weight
            if o.validation_split:
                x, y, weights = self._split(x, y, weights)
            weights = class_weights(y, weights, o.class_weight)
            return Arrays(x, y, weights, batch, o.shuffle, 20_000 + _fits, self.keras, self.tf)
        for name in ("batch_size", "validation_split", "sample_weight"):
            if getattr(o, name):
                raise Refused(
                    f"{name} does not go with {type(x).__name__}", at="muster.fit", because="it yields whole batches"
                )
        source = Pipeline(x, self.keras, self.tf, None, self._weigh if o.class_weight else None)
        if o.steps_per_epoch is None:
            known = f"; one pass is {source.batches} batches" if source.batches else ""
            raise Refused(
                f"steps_per_epoch is needed with {type(x).__name__}", at="muster.fit",
                because=f"every worker reads it whole, so its end is not the end of an epoch{known}",
                try_="steps_per_epoch=..., counted over all workers; arrays and muster.chunks are dealt out instead",
            )  # fmt: skip
        return source

    def _weigh(self, y: Any, weights: Any) -> Any:
        return class_weights(np.asarray(y), weights, self.options.class_weight)

    def _split(self, x: Any, y: Any, weights: Any) -> tuple[Any, Any, Any]:
        tree, share = self.keras.tree, self.options.validation_split
        at = int(len(_leaf(x)) * (1 - share))
        cut = lambda nest, a, b: tree.map_structure(lambda p: None if p is None else p[a:b], nest)  # noqa: E731
        data = (cut(x, at, None), cut(y, at, None))
        self.options.validation_data = data if weights is None else (*data, cut(weights, at, None))
        return cut(x, 0, at), cut(y, 0, at), cut(weights, 0, at)

    def _steps(self) -> int:
        """Steps of an epoch: of the whole run; in sync rounds of one batch a worker."""
        if self.options.steps_per_epoch is not None:
            return int(self.options.steps_per_epoch)
        return -(-self.source.batches // self.workers) if self.sync else int(self.source.batches)

    def _loans(self) -> tuple[int, int]:
        """How many loans make an epoch, and the batches in each."""
        if isinstance(self.source, Pieces):
            return len(self.source), 1
        given = self.options.steps_per_epoch
        batches = self.source.batches if given is None else given * (self.workers if self.sync else 1)
        group = 1 if self.sync else max(1, min(GROUP, batches // (self.workers * 4)))
        return -(-batches // group), group

    # --- the run

    def run(self) -> Any:
        client = self.client = _connected(self.me, self.reports)
        if client.read(f"{self.name}/end"):
            return self._nothing_left()
        self.compute = Compute(self.model, self.source.example(), self.keras, self.tf, self.scaling is not None)
        self.rate = Rate(self.optimizer, self.tf)
        initial = self.compute.initial() if client.chief else ()
        client.declare(self.compute.parameters, describe(self.optimizer), initial)
        self.compute.bind(client.views)
        self.epoch_steps, (self.loans, self.group) = self._steps(), self._loans()
        self.begun = self._begin()
        self.reports.ready()
        client.pull()
        history = self._chief() if client.chief else self._worker()
        self._finish()
        return history

    def _nothing_left(self) -> Any:
        """This fit was over before we came (back): the next one, or the end of the script, brings the values."""
        history = self.keras.callbacks.History()
        history.set_model(self.model)
        history.on_train_begin()
        self.model.history = history
        return history

    def _begin(self) -> int:
        """The global step at which this fit began: posted by the chief, waited for by the others."""
        key = f"{self.name}/begun"
        if self.client.chief and not self.client.read(key):
            self.client.post(key, self.client.step_now)
        found = self._wait(lambda: self.client.read(key), "the chief to begin")
        begun = int(next(iter(found.values())))
        if self.client.chief:
            steps = (self.options.epochs - self.options.initial_epoch) * self.epoch_steps
            self.reports.tell("Total", steps=begun + steps)
        if _fits > 1 and self.sync:
            self._meet(f"{self.name}/meet")
        return begun

    def _chief(self) -> Any:
        o, model = self.options, self.model
        calls = self._callbacks(history=True)
        model.stop_training = False
        self.compute.load(self.client.views)
        calls.on_train_begin()
        logs: dict[str, Any] = {}
        epoch = o.initial_epoch - 1
        for epoch in range(self._resume(), o.epochs):
            self.compute.load(self.client.views)
            calls.on_epoch_begin(epoch)
            self._decide_rate()
            self._open(epoch)
            model.reset_metrics()
            self._train(epoch, calls)
            logs = self._close(epoch, calls)
            calls.on_epoch_end(epoch, logs)
            self._decide_rate()
            self._keep_what_callbacks_set()
            self.stop = bool(model.stop_training) or self.client.stopping
            self.client.post(self._key(epoch, "closed"), {"stop": self.stop})
            if self.stop:
                break
        if self.stop:
            self.client.stop("a callback")
        self.client.pull()
        self.compute.load(self.client.views)
        calls.on_train_end(logs)
        self._keep_what_callbacks_set()
        self.client.post(f"{self.name}/end", {"steps": self.client.step_now})
        known = self.source.samples and o.steps_per_epoch is None
        _planned.append(self.source.samples * (epoch + 1 - o.initial_epoch) if known else None)
        self._wait(
            lambda: set(self.client.read(f"{self.name}/left")) >= self._alive() - {self.me.task}, "the others to end"
        )
        self.client.stop("")
        return model.history

    def _worker(self) -> Any:
        o = self.options
        calls = self._callbacks(history=False)
        calls.on_train_begin()
        for epoch in range(self._resume(), o.epochs):
            calls.on_epoch_begin(epoch)
            if not self.sync and epoch - LEAD >= o.initial_epoch and self._closed(epoch - LEAD)["stop"]:
                break
            self._open(epoch)
            self.model.reset_metrics()
            self._train(epoch, calls)
            self._post_metrics(epoch)
            calls.on_epoch_end(epoch, self.model.get_metrics_result())
            if self.client.stopping:
                break
            if self.sync and self._closed(epoch)["stop"]:
                break
        self.client.turn("done")
        self._wait(lambda: self.client.read(f"{self.name}/end"), "the chief to end")
        self.client.post(f"{self.name}/left", True)
        calls.on_train_end()
        return self._nothing_left()

    def _finish(self) -> None:
        client = self.client
        client.pull()
        self.compute.load(client.views)
        self.step_seen(client.step_now, None, True)
        if client.chief:
            state = client.state()
            views = {slot: client.layout.views(flat) for slot, flat in state.items() if slot}
            give_back(
                self.optimizer,
                dict.fromkeys(views, 0),
                self.compute.trainable,
                _firsts(views, len(self.compute.trainable)),
                client.step_now,
            )
        whole = client.stats()[0]
        stats = whole["workers"].get(self.me.task, {})
        if client.chief and None not in _planned:
            self.reports.tell("Data", samples=round(whole["samples"]), planned=sum(n or 0 for n in _planned))
        self.reports.tell(
            "Account", samples=self.samples, staleness=float(stats.get("staleness_mean", 0.0)),
            staleness_max=int(stats.get("staleness_max", 0)), dropped=int(stats.get("dropped", 0)),
        )  # fmt: skip

    def _callbacks(self, history: bool) -> Any:
        o, keras = self.options, self.keras
        given = o.callbacks if isinstance(o.callbacks, (list, tuple)) else [o.callbacks] if o.callbacks else []
        if not history:
            given = [c for c in given if getattr(c, "every_worker", False)]
        verbose = (2 if o.verbose == "auto" else int(o.verbose)) if history else 0
        made = keras.callbacks.CallbackList(
            list(given),
            add_history=history,
            add_progbar=verbose != 0,
            model=self.model,
            verbose=verbose,
            epochs=o.epochs,
            steps=self.epoch_steps,
        )
        self.each_batch, self.exact = _batch_calls(given, verbose)
        return made

    # --- an epoch

    def _key(self, epoch: int, what: str) -> str:
        return f"{self.name}/{epoch}/{what}"

    def _resume(self) -> int:
        """The first epoch that the chief has not closed."""
        epoch = self.options.initial_epoch
        while epoch < self.options.epochs and self.client.read(self._key(epoch, "closed")):
            epoch += 1
        return epoch

    def _open(self, epoch: int) -> None:
        """In sync nobody begins an epoch before all can: its first rounds would lack somebody."""
        if not self.sync or epoch == self.options.initial_epoch:
            return
        self.client.join()
        self._meet(self._key(epoch, "open"))
        self.client.pull()

    def _meet(self, key: str) -> None:
        """Waits until every worker that is alive has come here; the chief says when."""
        self.client.post(key, True)
        if self.client.chief:
            self._wait(lambda: self._all_at(key), "the other workers")
            self.client.post(f"{key}/go", True)
        self._wait(lambda: self.client.read(f"{key}/go"), "the chief to go on")

    def _all_at(self, key: str) -> bool:
        return set(self.client.read(key)) >= self._alive()

    def _alive(self) -> set[str]:
        return {task for task, told in self.client.stats()[0]["workers"].items() if told["phase"] != "gone"}

    def _train(self, epoch: int, calls: Any) -> None:
        """Works on what is lent until the epoch is over (the chief) or there is nothing left for us (the others)."""
        loan, began, out = None, self.client.step_now, False
        while not self.client.stopping:
            lease = self.client.lend(self._key(epoch, "data"), self.loans, self._seed(), loan)
            loan = lease.chunk
            if loan is not None:
                self._work(loan, epoch, began, calls)
                continue
            if lease.over or (not self.client.chief and not self.sync):
                break
            if not out and self.sync:
                out = True
                self.client.turn("done")  # nobody waits for our gradient any more
            time.sleep(POLL)
        if self.sync and not out:
            self.client.turn("done")

    def _seed(self) -> int | None:
        """Arrays are shuffled by sample already; chunks are dealt in another order each epoch."""
        return 20_000 + _fits if isinstance(self.source, Pieces) and self.options.shuffle else None

    def _work(self, loan: int, epoch: int, began: int, calls: Any) -> None:
        for batch in self._lent(loan, epoch):
            if self.client.stopping:
                return
            if self.each_batch:
                self._before_batch(began, calls)
            self._one(batch)
            if self.each_batch:
                self._after_batch(began, calls)

    def _lent(self, loan: int, epoch: int) -> Iterator[Batch]:
        if isinstance(self.source, Pieces):
            yield from self.source.of(loan, epoch)
            return
        total = self.loans * self.group if self.options.steps_per_epoch is None else self._given()
        passes = self.source.batches
        for number in range(loan * self.group, min((loan + 1) * self.group, total)):
            if not self.source.chunked:
                yield self.source.get(number, epoch)
            elif self.options.steps_per_epoch is None:
                if number < passes:
                    yield self.source.get(number, epoch)
            else:  # an epoch that is not one pass: the data go on where the last epoch left them
                place = (epoch - self.options.initial_epoch) * total + number
                yield self.source.get(place % passes, place // passes)

    def _given(self) -> int:
        return int(self.options.steps_per_epoch or 0) * (self.workers if self.sync else 1)

    def _one(self, batch: Batch) -> Done:
        """One step: gradients at the values we have, applied by the ps, and the values that this leads to."""
        client = self.client
        rate = self.rate.at(client.step_now - self.begun_at_optimizer)
        outcome = self.compute.step(batch, self.scale)
        samples = len(_leaf(batch[0]))
        if not outcome.finite:
            return self._overflow(samples, rate)
        done = client.step(outcome.gradients, float(samples), rate)
        self.samples += samples
        self.local += 1
        self._grow()
        self.last_loss = outcome.loss
        self.step_seen(done.step, outcome.loss)
        return done

    begun_at_optimizer = 0  # a schedule counts the optimizer's steps, which go on over several fits
    last_loss: Any = None

    def _overflow(self, samples: int, rate: float) -> Done:
        """float16: the scale was too large. Nothing is applied; a round in sync still needs our part, without weight."""
        self.scale, self.good = max(self.scale / 2.0, 1.0), 0
        self.local += 1
        if self.sync:
            return self.client.step([None] * len(self.compute.parameters), 1e-9, rate)
        return self.client.pull()

    def _grow(self) -> None:
        if self.scaling is not None:
            self.good += 1
            if self.good >= SCALE_AFTER:
                self.scale, self.good = self.scale * 2.0, 0

    def step_seen(self, step: int, loss: Any, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self.said >= REPORT_EVERY:
            self.said = now
            self.reports.step(step, self.local, None if loss is None else float(loss))

    # --- callbacks on batches

    def _before_batch(self, began: int, calls: Any) -> None:
        if self.exact:
            self.compute.load(self.client.views)
        calls.on_train_batch_begin(self.client.step_now - began)

    def _after_batch(self, began: int, calls: Any) -> None:
        now = time.monotonic()
        if self.exact or now - self.logged >= REPORT_EVERY:
            self.logged = now
            self.logs = self.model.get_metrics_result()
        if self.exact:
            self.compute.load(self.client.views)
        calls.on_train_batch_end(self.client.step_now - began - 1, self.logs)
        if self.exact and self.client.chief:
            self._decide_rate()
            if self.model.stop_training:
                self.client.stop("a callback")

    logged = 0.0
    logs: dict[str, Any] = {}  # noqa: RUF012

    # --- the end of an epoch

    def _post_metrics(self, epoch: int) -> None:
        sums = [np.asarray(self.keras.ops.convert_to_numpy(v.value)).tolist() for v in self._metric_variables()]
        self.client.post(self._key(epoch, "metrics"), sums)

    def _metric_variables(self) -> list[Any]:
        return [v for metric in self.model.metrics for v in metric.variables]

    def _close(self, epoch: int, calls: Any) -> dict[str, Any]:
        """The run's metrics of this epoch: sums over all workers, and validation on values pulled now."""
        key, others = self._key(epoch, "metrics"), lambda: self._alive() - {self.me.task}
        if not self.client.stopping:
            self._wait(lambda: set(self.client.read(key)) >= others(), "the metrics of the other workers")
        variables = self._metric_variables()
        for sums in (told for task, told in self.client.read(key).items() if task != self.me.task):
            for variable, more in zip(variables, sums, strict=True):
                value = self.keras.ops.convert_to_numpy(variable.value)
                variable.assign(value + np.asarray(more, value.dtype))
        logs = dict(self.model.get_metrics_result())
        if not self.sync:
            self.client.turn("validating")
        self.client.pull()
        self.compute.load(self.client.views)
        if self.options.validation_data is not None and self._validates(epoch):
            logs.update(self._validate(calls))
        if not self.sync:
            self.client.join()
        return {name: float(value) for name, value in logs.items()}

    def _validates(self, epoch: int) -> bool:
        every = self.options.validation_freq
        return (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every

    def _validate(self, calls: Any) -> dict[str, Any]:
        o = self.options
        x, y, weights = self.keras.utils.unpack_x_y_sample_weight(o.validation_data)
        if self.sync:
            self.reports.say("the chief validates; in sync the others wait for it")
        found = self.model.evaluate(
            x, y, sample_weight=weights, batch_size=o.validation_batch_size or o.batch_size, steps=o.validation_steps,
            callbacks=calls, return_dict=True, verbose=0,
        )  # fmt: skip
        return {f"val_{name}": value for name, value in found.items()}

    def _closed(self, epoch: int) -> dict[str, Any]:
        found = self._wait(lambda: self.client.read(self._key(epoch, "closed")), "the chief to close the epoch")
        told: dict[str, Any] = next(iter(found.values()))
        return told

    def _decide_rate(self) -> None:
        """A callback on the chief may have set the learning rate: it holds for everybody."""
        if not self.rate.scheduled:
            before = self.rate.at(0)
            if (now := self.rate.read()) != before or self.client.rate_set not in (None, now):
                self.client.set_learning_rate(now)

    def _keep_what_callbacks_set(self) -> None:
        """A callback may have set weights (EarlyStopping restores the best ones): they are the run's from now on."""
        if self.compute.changed(self.client.views):
            self.client.store(self.compute.initial())
            self.client.pull()

    def _wait(self, found: Callable[[], Any], what: str) -> Any:
        """Asks the board until it has an answer; the screen is told when that takes long."""
        since, told = time.monotonic(), False
        while not (answer := found()):
            time.sleep(POLL)
            if not told and time.monotonic() - since > PATIENCE:
                told = True
                self.reports.say(f"waits for {what}")
        return answer


class Pieces:
    """``muster.chunks`` as a source: a loan is a chunk, cut into batches where it is loaded."""

    chunked = True
    samples = 0

    def __init__(self, chunks: Chunks, batch: int, options: Options, keras: Any, tf: Any) -> None:
        self._chunks, self._batch, self._options, self._keras, self._tf = chunks, batch, options, keras, tf
        self.batches = len(chunks.items)
        self._first: Arrays | None = None

    def __len__(self) -> int:
        return len(self._chunks.items)

    def example(self) -> Batch:
        return self._load(0, 0).example()

    def of(self, number: int, epoch: int) -> Iterator[Batch]:
        arrays = self._load(number, epoch)
        for index in range(arrays.batches):
            yield arrays.get(index, epoch)

    def _load(self, number: int, epoch: int) -> Arrays:
        loaded = self._chunks.load(self._chunks.items[number])
        x, y, weights = self._keras.utils.unpack_x_y_sample_weight(loaded)
        weights = class_weights(y, weights, self._options.class_weight)
        seed = 20_000 + _fits + 1000 * number
        return Arrays(x, y, weights, self._batch, self._options.shuffle, seed, self._keras, self._tf)


def _connected(me: Context, reports: Channel) -> Client:
    """The one client of this process: it lives as long as the process does."""
    global _client
    if _client is None:
        import os

        from muster.ps.connect import introduced

        hello = reports.hello()
        reports.tell("Joined")
        _client = introduced(os.environ, hello, notice=reports.say)
    return _client


def _next_name() -> str:
    global _fits
    _fits += 1
    return f"fit-{_fits}"


def _batch_calls(given: Sequence[Any], verbose: int) -> tuple[bool, bool]:
    """Whether any callback wants to hear of batches, and whether one of the user's own does (and sees each exactly)."""

    def wants(callback: Any) -> bool:
        names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
        kinds = [c for c in type(callback).__mro__ if any(name in vars(c) for name in names)]
        return bool(kinds) and kinds[0].__name__ != "Callback"

    own = [c for c in given if wants(c) and not type(c).__module__.startswith("keras.")]
    return verbose == 1 or any(map(wants, given)), bool(own)


def _is_array(x: Any, keras: Any) -> bool:
    flat = keras.tree.flatten(x)
    return (
        bool(flat)
        and all(
            (hasattr(part, "shape") and hasattr(part, "__getitem__")) or isinstance(part, (list, tuple, float, int))
            for part in flat
        )
        and not hasattr(x, "element_spec")
    )


def _leaf(nest: Any) -> Any:
    while isinstance(nest, (list, tuple, dict)):
        nest = next(iter(nest.values())) if isinstance(nest, dict) else nest[0]
    return nest


def _cut(nest: Any, start: int, stop: int) -> Any:
    if isinstance(nest, dict):
        return {name: _cut(part, start, stop) for name, part in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(_cut(part, start, stop) for part in nest)
    return None if nest is None else nest[start:stop]


def _firsts(views: dict[str, list[Any]], count: int) -> dict[str, list[Any]]:
    return {slot: found[:count] for slot, found in views.items()}
