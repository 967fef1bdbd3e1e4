"""Whole fits over parameter servers, against one process: workers and servers are threads of this one."""

import json
import threading
import time

import pytest
from keras_here import BUILDING, apart, classifier, data, fresh, keras, np, tf
from workers import Run, Worker

from muster.errors import Refused
from muster.train.batches import chunks
from muster.train.fit import part
from muster.train.options import Options

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
L = keras.layers
X, Y = data(1200)


def trained(make, **options):
    """A script: make the model, fit it on X and Y, tell what came of it."""

    def script(worker):
        model = fresh(make)
        given = {k: (v() if k == "callbacks" else v) for k, v in options.items()}
        history = worker.fit(model, X, Y, **{"verbose": 0, "shuffle": False, **given})
        return model, history.history, worker

    return script


def alone(make, **options):
    model = fresh(make)
    start = model.get_weights()
    given = {k: (v() if k == "callbacks" else v) for k, v in options.items()}
    history = model.fit(X, Y, **{"verbose": 0, "shuffle": False, **given})
    return model, history.history, start


def agree(results, theirs, start, within=1e-5):
    for model, _, _ in results:
        assert apart(model.get_weights(), theirs.get_weights(), start) < within


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.3),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.3, 250), momentum=0.9),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sync_over_three_workers_is_one_process_with_the_threefold_batch(name, tmp_path):
    """200 rounds: weights, History, slots, the count of steps, and the saved model."""

    def make():
        return classifier(OPTIMIZERS[name](), metrics=["accuracy"])

    theirs, told, start = alone(make, batch_size=60, epochs=10)
    with Run(mode="sync") as run:
        results = run.all(trained(make, batch_size=20, epochs=10))
    agree(results, theirs, start)
    for model, history, _ in results:
        assert history["accuracy"] == pytest.approx(told["accuracy"], abs=1e-3)
        assert history["loss"] == pytest.approx(told["loss"], rel=1e-4)
        assert int(model.optimizer.iterations.numpy()) == 200
    chief, _, worker = results[0]
    chief.save(tmp_path / "ours.keras")
    again = keras.models.load_model(tmp_path / "ours.keras")
    pairs = zip(again.optimizer.variables, theirs.optimizer.variables, strict=True)
    for ours, wanted in pairs:
        assert np.allclose(ours.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-6), wanted.path
    assert worker.reports.of("Data") == [{"kind": "Data", "samples": 12000, "planned": 12000}]
    assert [r[2].reports.of("Account")[0]["samples"] for r in results] == [4000, 4000, 4000]
    assert {r[2].reports.of("Account")[0]["staleness_max"] for r in results} == {0}


class Halve(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


class StopAt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 3


def test_callbacks_decide_in_sync_what_they_decide_in_one_process():
    """The rate is halved, then reduced on a plateau; the rounds are uneven; it stops; the best weights come back."""

    def calls():
        early = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, min_delta=0.05)
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=0.1, min_lr=1e-4)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        return [Halve(), schedule, plateau, early]

    options = {"epochs": 12, "callbacks": calls, "validation_split": 0.25}
    theirs, told, start = alone(classifier, batch_size=60, **options)
    assert 2 < len(told["loss"]) < 12
    with Run(mode="sync") as run:
        results = run.all(trained(classifier, batch_size=20, **options))
    agree(results, theirs, start)
    for _, history, _ in results:
        assert set(history) == set(told)
        for metric in told:
            assert history[metric] == pytest.approx(told[metric], rel=1e-4, abs=1e-3), metric
    rates = [float(np.asarray(model.optimizer.learning_rate)) for model, *_ in results]
    assert rates == pytest.approx([float(np.asarray(theirs.optimizer.learning_rate))] * 3)


def still():
    """Normalizes, and does not learn, so that what the statistics are is known."""
    return classifier(keras.optimizers.SGD(0.0), layers=[L.BatchNormalization(momentum=0.9)])


def test_weights_of_samples_and_classes_and_an_uneven_end_are_keras_own():
    """1200 samples in batches of 70: the last round of an epoch has two gradients, one of a smaller batch."""
    weights = np.random.default_rng(3).random(1200).astype("float32")
    for options in ({"sample_weight": weights}, {"class_weight": {0: 3.0, 1: 0.2}}):

        def make():
            return classifier(metrics=[], weighted_metrics=["accuracy"])

        theirs, told, start = alone(make, batch_size=210, epochs=4, **options)
        with Run(mode="sync") as run:
            results = run.all(trained(make, batch_size=70, epochs=4, **options))
        agree(results, theirs, start)
        assert results[0][1]["accuracy"] == pytest.approx(told["accuracy"], abs=1e-4)
        assert results[0][1]["loss"] == pytest.approx(told["loss"], rel=1e-4)


def test_statistics_are_the_mean_over_the_workers_and_the_same_everywhere():
    with Run(mode="sync") as run:
        results = run.all(trained(still, batch_size=20, epochs=2))
    theirs, _, _ = alone(still, batch_size=60, epochs=2)
    for name, near in (("moving_mean", 1e-5), ("moving_variance", 0.1)):
        wanted, *ends = (
            next(v.numpy() for v in model.variables if v.path.endswith(name))
            for model in (theirs, *(r[0] for r in results))
        )
        assert all(np.array_equal(ends[0], end) for end in ends)
        assert np.abs(ends[0] - wanted).max() < near * np.abs(wanted).max()
    with Run() as run:
        results = run.all(trained(still, batch_size=20, epochs=5))
    end = next(v.numpy() for v in results[0][0].variables if v.path.endswith("moving_variance"))
    assert np.abs(end - wanted).max() < 0.25 * np.abs(wanted).max(), "in async too, though each moves it in turn"


@pytest.mark.parametrize("mode, rule", [("async", {}), ("bounded", {"max_staleness": 2}), ("sync", {})])
def test_every_sample_of_an_epoch_is_trained_on_once(mode, rule):
    """The ids are taken where they are used: by a layer, as the batch goes through the model."""
    seen, lock = [], threading.Lock()

    def note(values):
        with lock:
            seen.append(values.numpy()[:, 0].astype(int).tolist())
        return values

    class Ids(keras.layers.Layer):
        def call(self, x, training=False):
            return tf.ensure_shape(tf.py_function(note, [x], tf.float32), x.shape) if training else x

    def make():
        model = keras.Sequential([keras.Input((1,)), Ids(), L.Rescaling(1e-3), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    x = np.arange(333, dtype="float32")[:, None]

    def script(worker):
        return worker.fit(fresh(make), x, x, batch_size=10, epochs=3, verbose=0).history, worker

    with Run(mode=mode, **rule) as run:
        results = run.all(script)
    ids = [i for batch in seen for i in batch]
    assert sorted(ids) == sorted(list(range(333)) * 3)
    assert len(seen) == 34 * 3
    (history, chief), *_ = results
    assert len(history["loss"]) == 3 and all(r[0] == history for r in results)
    assert chief.reports.of("Data") == [{"kind": "Data", "samples": 999, "planned": 999}]
    if mode == "bounded":
        members = run.servers[0].updates.members.values()
        assert max(member.ahead for member in members) <= 2


def test_labels_without_meaning_are_not_learned():
    random = np.random.default_rng(5)
    x = random.standard_normal((900, 8)).astype("float32")
    y = random.permutation(np.arange(900) % 3)

    def script(worker):
        model = fresh(lambda: classifier(keras.optimizers.Adam(0.01)))
        worker.fit(model, x[:600], y[:600], batch_size=20, epochs=5, verbose=0)
        return model.evaluate(x[600:], y[600:], verbose=0)[1]

    with Run() as run:
        assert all(0.2 < accuracy < 0.47 for accuracy in run.all(script))


def test_two_fits_in_one_script_pre_train_and_unfreeze():
    """What is frozen stays, what was set between the two holds, and the second begins where the first ended."""

    def script(fit, model):
        told = []
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.3), model.loss, metrics=["accuracy"])
        frozen = model.layers[0].get_weights()
        told.append(fit(model, X, Y, epochs=2, verbose=0, shuffle=False).history)
        assert all(np.array_equal(a, b) for a, b in zip(frozen, model.layers[0].get_weights(), strict=True))
        model.layers[0].trainable = True
        model.layers[-1].bias.assign(model.layers[-1].bias + 0.25)
        model.compile(keras.optimizers.SGD(0.05), model.loss, metrics=["accuracy"])
        told.append(fit(model, X, Y, epochs=3, verbose=0, shuffle=False).history)
        told.append(fit(model, X, Y, epochs=4, initial_epoch=3, verbose=0, shuffle=False).history)
        return model, told

    theirs = fresh(classifier)
    start = theirs.get_weights()
    _, told = script(lambda model, *a, **o: model.fit(*a, batch_size=60, **o), theirs)
    with Run(mode="sync") as run:
        results = run.all(lambda worker: script(lambda *a, **o: worker.fit(*a, batch_size=20, **o), fresh(classifier)))
    for model, ours in results:
        assert apart(model.get_weights(), theirs.get_weights(), start) < 1e-5
        for one, other in zip(ours, told, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_metrics_of_many_numbers_are_added_up_and_too_many_refused_before_training():
    y = np.eye(40, dtype="float32")[np.arange(1200) % 40]

    def make(thresholds):
        auc = keras.metrics.AUC(multi_label=True, num_labels=40, num_thresholds=thresholds, name="auc")
        model = keras.Sequential([keras.Input((8,)), L.Dense(40, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=[auc])
        return model

    theirs = fresh(lambda: make(200)).fit(X, y, batch_size=60, epochs=1, shuffle=False, verbose=0).history
    with Run(mode="sync") as run:
        told = run.all(
            lambda worker: worker.fit(fresh(lambda: make(200)), X, y, batch_size=20, shuffle=False, verbose=0).history
        )
    assert told[0]["auc"] == pytest.approx(theirs["auc"], rel=1e-4)

    def refused(worker):
        with pytest.raises(Refused, match="The metric auc keeps 64000 numbers"):
            worker.fit(fresh(lambda: make(400)), X, y)

    with Run() as run:
        run.all(refused)


def test_a_second_fit_goes_on_with_the_slots_unless_the_model_was_compiled_anew():
    def script(fit, model):
        for anew in (False, True, False):
            if anew:
                model.compile(keras.optimizers.Adam(0.01), model.loss)
            fit(model, X, Y, epochs=2, verbose=0, shuffle=False)
        return model

    def make():
        return classifier(keras.optimizers.Adam(0.01))

    theirs = fresh(make)
    start = theirs.get_weights()
    script(lambda model, *a, **o: model.fit(*a, batch_size=60, **o), theirs)
    with Run(mode="sync") as run:
        models = run.all(lambda worker: script(lambda *a, **o: worker.fit(*a, batch_size=20, **o), fresh(make)))
    for model in models:
        assert apart(model.get_weights(), theirs.get_weights(), start) < 1e-5
        assert int(model.optimizer.iterations.numpy()) == 80


def test_who_begins_the_second_fit_early_does_not_take_the_first_ones_stop_for_its_own():
    """Worker 2 leaves the first fit only when worker 1 is in the second: till then the chief has taken nothing back."""
    ahead = threading.Event()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    class Wait(keras.callbacks.Callback):
        every_worker = True

        def on_train_end(self, logs=None):
            assert ahead.wait(20)

    def script(worker):
        post, last = worker.client.post, worker.index == 2

        def posted(key, value):
            post(key, value)
            if worker.index == 1 and key == "fit-2/marks":
                ahead.set()

        worker.client.post = posted
        model = fresh(classifier)
        first = worker.fit(model, X, Y, batch_size=20, epochs=9, verbose=0, callbacks=[Stop(), *([Wait()] * last)])
        told = [len(first.epoch)]
        told.append(len(worker.fit(model, X, Y, batch_size=20, epochs=3, verbose=0).epoch))
        return told, worker.reports.of("Account")[-1]["samples"]

    with Run(mode="sync") as run:
        results = run.all(script)
    assert [told for told, _ in results] == [[2, 3]] * 3
    assert [samples for _, samples in results] == [1200] * 3


def test_a_chief_that_died_at_the_very_end_leaves_no_stop_behind():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    def fits(worker):
        model = fresh(classifier)
        given = {"batch_size": 20, "verbose": 0}
        worker.fit(model, X, Y, epochs=9, callbacks=[Stop()], **given)
        return worker.fit(model, X, Y, epochs=3, **given).epoch, worker.reports.of("Account")[-1]["samples"]

    class Died(Exception):
        pass

    def dies(why=""):
        if not why:
            raise Died
        stop(why)

    def script(worker):
        nonlocal stop
        stop, worker.client.stop = worker.client.stop, dies
        with pytest.raises(Died):
            fits(worker)
        worker.client.close()
        again = Worker(worker.run, 0, attempt=2)
        try:
            return fits(again)
        finally:
            again.client.close()

    stop = None
    with Run(workers=1) as run:
        assert run.all(script) == [([0, 1, 2], 3600)]


def test_a_model_that_was_saved_goes_on_with_its_slots(tmp_path):
    def make():
        return classifier(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.02, 200)))

    first, _, _ = alone(make, batch_size=60, epochs=4)
    first.save(tmp_path / "half.keras")
    theirs = keras.models.load_model(tmp_path / "half.keras")
    theirs.fit(X, Y, batch_size=60, epochs=3, shuffle=False, verbose=0)

    def script(worker):
        with BUILDING:
            model = keras.models.load_model(tmp_path / "half.keras")
        worker.fit(model, X, Y, batch_size=20, epochs=3, shuffle=False, verbose=0)
        return model

    with Run(mode="sync") as run:
        models = run.all(script)
    for model in models:
        assert apart(model.get_weights(), theirs.get_weights(), first.get_weights()) < 1e-5
    assert int(models[0].optimizer.iterations.numpy()) == 140


def test_a_worker_that_leaves_does_not_stop_a_sync_run_and_its_part_is_done_by_others():
    class Leave(keras.callbacks.Callback):
        every_worker = True

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and worker_of(self.model).index == 2:
                raise Gone

    class Gone(Exception):
        pass

    owners = {}
    worker_of = lambda model: owners[id(model)]  # noqa: E731

    def script(worker):
        model = fresh(classifier)
        owners[id(model)] = worker
        try:
            return worker.fit(model, X, Y, batch_size=20, epochs=4, verbose=0, callbacks=[Leave()]).history
        except Gone:
            return None  # its connection ends with this

    with Run(mode="sync") as run:
        first, second, left = run.all(script)
    assert left is None and first == second and len(first["loss"]) == 4
    assert run.servers[0].samples == 4800


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_worker_that_is_restarted_goes_on_where_the_run_is(mode, who):
    """Attempt 2 of the chief and of another: no epoch twice, the History whole, nothing hangs."""

    class Die(keras.callbacks.Callback):
        every_worker = True
        index = -1

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2 and self.index == who and not died.is_set():
                died.set()
                raise Died

    class Died(Exception):
        pass

    died = threading.Event()

    def life(worker):
        model, die = fresh(classifier), Die()
        die.index = worker.index
        stop = keras.callbacks.EarlyStopping("loss", patience=50)
        history = worker.fit(model, X, Y, batch_size=20, epochs=5, verbose=0, callbacks=[die, stop])
        return model.get_weights(), history.history, history.epoch, stop.best

    def script(worker):
        try:
            return life(worker)
        except Died:
            worker.client.close()
            again = Worker(worker.run, worker.index, attempt=2)
            try:
                return life(again)
            finally:
                again.client.close()

    with Run(mode=mode) as run:
        results = run.all(script)
    assert died.is_set()
    for weights, history, epochs, _ in results:
        assert epochs == [0, 1, 2, 3, 4] and len(history["loss"]) == 5
        assert all(np.array_equal(a, b) for a, b in zip(weights, results[0][0], strict=True))
    assert results[0][3] == min(results[0][1]["loss"]), "EarlyStopping's best is remembered"
    assert run.servers[0].samples >= 6000


def test_a_worker_that_comes_back_after_the_end_gets_the_values_and_ends():
    with Run() as run:
        results = run.all(trained(classifier, batch_size=20, epochs=2))
        late = Worker(run, 1, attempt=2)
        model = fresh(lambda: classifier(), seed=99)
        began = time.monotonic()
        history = late.fit(model, X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)
        assert time.monotonic() - began < 20 and history.history == results[0][1]
        for a, b in zip(model.get_weights(), results[0][0].get_weights(), strict=True):
            assert np.array_equal(a, b)
        late.client.close()


@pytest.mark.parametrize("told", [True, False])
def test_the_best_weights_outlive_the_chief_or_it_is_said_that_they_do_not(told):
    """The best epoch is the second; the chief dies in the third. ``told``: whether its note came to match the ps."""

    class Score(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = float(epoch == 1)
            at_end.setdefault(epoch, self.model.get_weights())

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2 and not died.is_set():
                died.set()
                raise Died

    class Died(Exception):
        pass

    at_end, died = {}, threading.Event()

    def life(worker):
        model = fresh(lambda: classifier(layers=[L.BatchNormalization(), L.Dropout(0.1)]))
        stop = keras.callbacks.EarlyStopping("score", mode="max", patience=50, restore_best_weights=True)
        calls = [Score(), stop] if worker.index == 0 else []
        worker.fit(model, X, Y, batch_size=20, epochs=4, callbacks=calls, verbose=0)
        return model.get_weights(), [r["text"] for r in worker.reports.of("Said") if "best weights" in r["text"]]

    def script(worker):
        try:
            return life(worker)
        except Died:
            worker.client.close()
            if not told:
                for server in worker.run.servers:
                    server.layers.now.label = "of an epoch that no note tells of"
            again = Worker(worker.run, worker.index, attempt=2)
            try:
                return life(again)
            finally:
                again.client.close()

    with Run(mode="sync") as run:
        (weights, said), *others = run.all(script)
    floats = [i for i, w in enumerate(weights) if w.dtype == np.float32]
    restored = all(np.array_equal(weights[i], at_end[1][i]) for i in floats)
    assert restored is told and bool(said) is not told
    assert all(np.array_equal(weights[i], other[i]) for other, _ in others for i in floats)


def test_chunks_are_each_loaded_once_an_epoch():
    loaded, lock = [], threading.Lock()

    def load(n):
        with lock:
            loaded.append(n)
        return X[n * 100 : n * 100 + 95], Y[n * 100 : n * 100 + 95]

    def script(worker):
        return worker.fit(fresh(classifier), chunks(range(12), load), batch_size=30, epochs=3, verbose=0).history

    with Run() as run:
        run.all(script)
    assert sorted(loaded) == sorted([*range(12)] * 3 + [0] * 3)  # once by each worker to see what they are like
    assert run.servers[0].samples == 12 * 95 * 3


def test_an_epoch_whose_steps_nobody_could_know_is_shown_with_those_it_had(capfd):
    def script(worker):
        pieces = chunks(range(6), lambda n: (X[n * 100 : n * 100 + 100], Y[n * 100 : n * 100 + 100]))
        worker.fit(fresh(classifier), pieces, batch_size=50, epochs=2, verbose=2)

    with Run(mode="sync") as run:
        run.all(script)
        steps = run.servers[0].updates.version
    lines = [line.split(" - ")[0] for line in capfd.readouterr().out.splitlines() if " - accuracy" in line]
    shown = [tuple(map(int, line.split("/"))) for line in lines]
    assert len(shown) == 2 and all(done == of for done, of in shown) and sum(done for done, _ in shown) == steps


def test_a_dataset_counts_steps_of_the_run_and_validates_on_a_dataset():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    held_out = tf.data.Dataset.from_tensor_slices((X[:100], Y[:100])).batch(50)

    def script(worker):
        model = fresh(classifier)
        told = worker.fit(
            model, dataset, epochs=4, steps_per_epoch=25, validation_data=held_out, validation_steps=1,
            validation_freq=[2, 4], verbose=0,
        )  # fmt: skip
        return told.history

    with Run() as run:
        history, *_ = run.all(script)
    assert len(history["loss"]) == 4 and len(history["val_loss"]) == 2
    assert run.servers[0].updates.version == 100 and run.servers[0].samples == 2000


def test_arrays_go_on_where_the_last_epoch_left_them():
    """steps_per_epoch smaller than a pass: three epochs of 20 rounds are one pass over 1,200 samples."""
    theirs = fresh(classifier)
    start = theirs.get_weights()
    theirs.fit(X, Y, batch_size=60, epochs=2, shuffle=False, verbose=0)
    with Run(mode="sync") as run:
        results = run.all(trained(classifier, batch_size=20, epochs=4, steps_per_epoch=10))
    agree(results, theirs, start)
    assert results[0][2].reports.of("Data") == [{"kind": "Data", "samples": 2400, "planned": 2400}]


def test_half_precision_trains_and_skips_what_overflows():
    def make():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return classifier(keras.optimizers.Adam(0.01))
        finally:
            keras.config.set_dtype_policy("float32")

    def script(worker):
        model = fresh(make)
        model.optimizer.initial_scale = 2.0**30 if worker.index == 1 else 2.0**10
        history = worker.fit(model, X, Y, batch_size=20, epochs=6, verbose=0)
        return history.history, model.get_weights()

    for mode in ("async", "sync"):
        with Run(mode=mode) as run:
            (history, weights), *_ = run.all(script)
        assert history["accuracy"][-1] > 0.75 and all(np.isfinite(w).all() for w in weights)


def test_the_loss_scale_grows_as_its_optimizer_says():
    def script(worker):
        model = fresh(classifier)
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0, dynamic_growth_steps=5)
        model.compile(scaled, model.loss)
        mine = part(model, X, Y, Options(batch_size=100, verbose=0), worker.me, worker.reports, worker.life)
        mine.run()
        return mine.share.scale

    with Run(workers=1) as run:
        assert run.all(script) == [32.0], "12 steps: doubled twice"


def test_random_layers_differ_between_workers_and_repeat_between_runs():
    def make():
        return classifier(layers=[L.Dropout(0.5, seed=11), L.GaussianNoise(0.1)])

    def script(worker):
        model = fresh(make)
        worker.fit(model, X, Y, batch_size=20, epochs=1, verbose=0, shuffle=False)
        return [v.numpy()[0] for layer in model.layers for v in layer.variables if "seed_generator" in v.path]

    runs = []
    for _ in range(2):
        with Run(mode="sync") as run:
            runs.append([tuple(map(int, seeds)) for seeds in run.all(script)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 3 and len(runs[0][0]) == 2


def test_callbacks_hear_of_batches_with_the_values_of_that_moment(tmp_path):
    """The bar, a log and checkpoints; a callback of the script's own that stops in the middle of an epoch."""

    class Watch(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.moves, self.logs, self.last = [], [], None

        def on_train_batch_end(self, batch, logs=None):
            weights = np.concatenate([w.ravel() for w in self.model.get_weights()])
            self.moves.append(self.last is None or bool(np.abs(weights - self.last).max()))
            self.last = weights
            self.logs.append(dict(logs))
            self.model.stop_training = len(self.moves) == 25

    watch = Watch()

    def script(worker):
        model = fresh(classifier)
        extra = [
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), keras.callbacks.TerminateOnNaN(), watch,
            keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
        ]  # fmt: skip
        calls = extra if worker.index == 0 else []
        return worker.fit(model, X, Y, batch_size=20, epochs=3, callbacks=calls, verbose=1).history

    with Run(mode="sync") as run:
        history, *_ = run.all(script)
    assert len(watch.moves) == 25 and all(watch.moves)
    assert all(set(logs) == {"loss", "accuracy"} for logs in watch.logs)
    assert len(history["loss"]) == 2 and 25 <= run.servers[0].updates.version <= 27
    assert (tmp_path / "2.keras").exists() and len((tmp_path / "log.csv").read_text().splitlines()) == 3
    saved = keras.models.load_model(tmp_path / "1.keras")
    assert int(saved.optimizer.iterations.numpy()) == 20


def test_notes_do_not_grow_with_the_epochs():
    with Run(workers=1, ps=1) as run:
        run.all(trained(classifier, batch_size=600, epochs=40))
    board = run.servers[0].board
    assert len(board.notes) <= 8 and len(json.dumps(board.notes)) < 20_000


def test_alone_it_is_model_fit(monkeypatch):
    import muster

    for name in ("MUSTER_TASK", "MUSTER_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    theirs, told, _ = alone(classifier, batch_size=60, epochs=3)
    ours = fresh(classifier)
    history = muster.fit(ours, X, Y, batch_size=60, epochs=3, verbose=0, shuffle=False)
    assert history.history == told
    assert all(np.array_equal(a, b) for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True))
    pieces = muster.chunks(range(4), lambda n: (X[n * 300 : n * 300 + 300], Y[n * 300 : n * 300 + 300]))
    model = fresh(classifier)
    told = muster.fit(model, pieces, batch_size=70, epochs=2, verbose=0).history
    assert len(told["loss"]) == 2 and int(model.optimizer.iterations.numpy()) == 2 * 4 * 5


def test_with_a_spare_worker_late_gradients_are_dropped_and_counted():
    class Slow(keras.callbacks.Callback):
        every_worker = True
        pause = 0.0

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(self.pause)

    def script(worker):
        model, slow = fresh(classifier), Slow()
        slow.pause = 0.02 * (worker.index == 2)
        worker.fit(model, X, Y, batch_size=20, epochs=2, verbose=0, callbacks=[slow])
        return model.get_weights(), worker.reports.of("Account")[0]

    with Run(mode="sync", spare=1) as run:
        results = run.all(script)
    accounts = [account for _, account in results]
    assert accounts[2]["dropped"] > 0 and accounts[2]["samples"] < accounts[0]["samples"]
    trained_on, dropped = run.servers[0].samples, sum(account["dropped"] for account in accounts)
    assert trained_on == sum(account["samples"] for account in accounts) == 2400 - 20 * dropped
    assert all(np.array_equal(a, b) for w, _ in results for a, b in zip(w, results[0][0], strict=True))


@pytest.mark.parametrize("sets", [False, True])
def test_the_ps_values_are_set_only_where_a_callback_has_set_weights(sets):
    """While the chief validates in async the others go on: what it has looked at must not come back over theirs."""

    class Slow(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            time.sleep(0.1)

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = sets and epoch == 1  # in async, while the others are in the third

        def on_train_end(self, logs=None):
            if sets:
                self.model.set_weights([np.ones_like(w) for w in self.model.get_weights()])

    class Late(keras.callbacks.Callback):
        every_worker = True
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.4 * (sets and self.epoch == 2))  # it pushes after the chief has decided to stop

    stores = []

    def script(worker):
        model = fresh(classifier)
        worker.fit(model, X, Y, batch_size=20, epochs=4, verbose=0, validation_data=(X, Y), callbacks=[Slow(), Late()])
        return model.get_weights()

    with Run() as run:
        plain = run.servers[0].questions["store"]
        run.servers[0].questions["store"] = lambda peer, told: stores.append(told) or plain(peer, told)
        ends = run.all(script)
    assert len(stores) == sets
    assert all(np.array_equal(a, b) for end in ends for a, b in zip(end, ends[0], strict=True))
    assert all((w == 1).all() for w in ends[1]) is sets


def test_under_tensorflows_own_engine_it_is_refused(monkeypatch):
    import muster

    cluster = {"cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]}, "chief": "worker/0", "engine": "tensorflow"}
    monkeypatch.setenv("MUSTER_TASK", "worker/0")
    monkeypatch.setenv("MUSTER_CLUSTER", json.dumps(cluster))
    with pytest.raises(Refused, match="own parameter servers"):
        muster.fit(fresh(classifier), X, Y)
