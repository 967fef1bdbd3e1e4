"""One training step of a Keras model as a function of its parameters: values in, gradients out, nothing copied.

The parameters are not the model's variables but the client's buffer, aliased as tensors once; inside the step they
stand in for the variables (``keras.StatelessScope``), so that a step is one call whatever the number of variables, and
gradients are read where TensorFlow has put them. Two facts make aliasing safe: every tensor in the buffer begins on a
multiple of 64 bytes (TensorFlow ends the process otherwise), and the buffer is written only between steps.

What a step changes besides, the scope writes down, whatever object owns it. Float variables of the model that the
forward pass assigns (BatchNormalization's statistics) are averaged over the workers and travel like parameters. All
else stays with its worker: seeds and counters for good, metrics until the epoch ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.errors import Refused
from muster.ps.slabs import Parameter
from muster.train.direct import direct
from muster.train.settings import refuse_variables

# What Keras and TensorFlow say where a layer makes a variable as it is called
CREATES = ("create a variable", "add new elements of state", "Variables created on the first call")
Batch = tuple[Any, Any, Any]
Shapes = tuple[tuple[int | None, ...], ...]  # of a batch's tensors


class Outcome(NamedTuple):
    """``gradients``: one buffer per parameter, for ``Client.step``. ``finite`` is False for float16 overflow."""

    gradients: list[Any]
    loss: Any
    finite: bool


class Compute:
    """Built from one batch (numpy or tensors; ``weights`` may be None). ``parameters`` is what to declare."""

    def __init__(self, model: Any, batch: Batch, keras: Any, tf: Any, scaled: bool = False) -> None:
        self.model, self.keras, self.tf, self.scaled = model, keras, tf, scaled
        self.strategy = getattr(model, "distribute_strategy", None)
        self.replicas = max(1, getattr(self.strategy, "num_replicas_in_sync", 1))
        self._takes_training = "training" in inspect.signature(model.compute_loss).parameters
        self._eager = bool(getattr(model, "run_eagerly", False))
        self._scope = recording(keras)
        self.trainable: list[Any] = []
        self.statistics: list[Any] = []
        self._own: list[Any] = []  # state that stays here, metrics apart
        self._build(batch)
        self.trainable = list(model.trainable_variables)
        refuse_variables(model, self.trainable)
        self._find_state(batch)
        self.parameters = self._describe()
        self._functions: dict[Any, Any] = {}  # by the shapes of a batch
        self._traces: dict[Shapes, Any] = {}  # by shapes that leave open (None) what has differed
        self._inputs: list[Any] = []
        self._loaded: list[Any] = []
        self._host: bool | None = None

    def _describe(self) -> list[Parameter]:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        decays = getattr(optimizer, "_use_weight_decay", lambda variable: True)
        names: dict[str, int] = {}
        rows: list[Parameter] = []
        for variable in [*self.trainable, *self.statistics]:
            count = names[variable.path] = names.get(variable.path, 0) + 1
            name = variable.path if count == 1 else f"{variable.path}#{count}"
            trained = len(rows) < len(self.trainable)
            shape = tuple(int(side) for side in variable.shape)
            decay = bool(trained and decays(variable))
            rows.append(Parameter(name, shape, trained, decay, _dtype(variable)))
        return rows

    # --- the model's own variables

    def initial(self) -> list[Any]:
        """The model's present values, float32, in the order of ``parameters``."""
        return [
            np.array(self.keras.ops.convert_to_numpy(v.value), np.float32) for v in [*self.trainable, *self.statistics]
        ]

    def load(self, views: Sequence[Any]) -> None:
        """Writes ``views`` into the model's own variables: for validation, callbacks and the end."""
        for variable, view in zip([*self.trainable, *self.statistics], views, strict=True):
            variable.assign(view)
        self._loaded = self.initial()

    def changed(self) -> bool:
        """Whether somebody (a callback) has set the model's variables since ``load``."""
        pairs = zip(self.initial(), self._loaded, strict=True)
        return any(not np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in pairs)

    def scatter_seeds(self, index: int) -> None:
        """Random layers draw other numbers on each worker (the first keeps its own), and the same in the next run."""
        for variable in self._own if index else ():
            if "seed_generator" in variable.path:
                now = self.keras.ops.convert_to_numpy(variable.value)
                seeds = np.random.default_rng([index, *np.ravel(now).tolist()]).integers(1, 2**31 - 1, now.shape)
                variable.assign(np.asarray(seeds).astype(now.dtype))

    # --- a step

    def bind(self, views: Sequence[Any]) -> None:
        """From now on steps read their parameters from ``views`` (the client's, filled in place by pulls)."""
        self._inputs = [alias(view, self.tf) for view in views]

    def prepare(self, batch: Batch, varies: bool) -> None:
        """Traces the step ahead of time. ``varies``: batches will not all have as many samples."""
        tensors = self._tensors(batch)
        if varies:
            open_ = tuple([(None, *part.shape[1:]) for part in tensors])
            self._traces[open_] = self._compile(batch, open_)
        self._function(batch, tensors)

    def step(self, batch: Batch, scale: float = 1.0) -> Outcome:
        """Forward and backward on one batch at the bound values. Updates metrics and the state that stays here."""
        tensors = self._tensors(batch)
        function = self._function(batch, tensors)
        extra = [self.tf.constant(scale, self.tf.float32)] if self.scaled else []
        *gradients, loss, finite = function(*self._inputs, *tensors, *extra)
        if self._host is None:
            self._host = all("CPU" in gradient.device for gradient in gradients)
        read = memoryview if self._host else np.asarray
        return Outcome([read(gradient) for gradient in gradients], loss, not self.scaled or bool(finite))

    def _tensors(self, batch: Batch) -> list[Any]:
        return [part for part in self.keras.tree.flatten(batch) if part is not None]

    def _function(self, batch: Batch, tensors: list[Any]) -> Any:
        """One trace for the first shapes of a batch. A second serves any number of samples (the last of an epoch has
        fewer), and so on for what else turns out to differ: sequences as long as the longest of their batch, say."""
        key = tuple([part.shape for part in tensors])
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = self._traced_for(batch, tuple([tuple(shape) for shape in key]))
        return found

    def _traced_for(self, batch: Batch, key: Shapes) -> Any:
        alike = [known for known in self._traces if _alike(known, key)]
        shapes = _joined([*alike, key])
        if shapes not in self._traces:
            self._traces[shapes] = self._compile(batch, shapes)
        return self._traces[shapes]

    def _compile(self, batch: Batch, shapes: Shapes) -> Any:
        tf, tree = self.tf, self.keras.tree
        flat = tree.flatten(batch)
        present = [part is not None for part in flat]
        count = len(self.trainable) + len(self.statistics)

        def call(*args: Any) -> list[Any]:
            values, rest = list(args[:count]), list(args[count:])
            scale = rest.pop() if self.scaled else None
            parts = iter(rest)
            whole = tree.pack_sequence_as(batch, [next(parts) if there else None for there in present])
            return self._traced(values, whole, scale)

        if self._eager:
            return call
        specs = [tf.TensorSpec(p.shape, tf.float32) for p in self.parameters]
        parts = zip(shapes, self._tensors(batch), strict=True)
        specs += [tf.TensorSpec(shape, part.dtype) for shape, part in parts]
        specs += [tf.TensorSpec([], tf.float32)] if self.scaled else []
        traced = tf.function(call, autograph=False).get_concrete_function(*specs)
        return direct(traced, tf) if self.replicas == 1 else traced

    # --- what is traced

    def _traced(self, values: list[Any], batch: Batch, scale: Any) -> list[Any]:
        if self.replicas > 1:
            gradients, fresh, own, loss = self._over_replicas(values, batch, scale)
        else:
            gradients, fresh, own, loss = self._replica(values, batch, scale)
        for variable, value in zip(self._own, own, strict=True):
            variable.assign(value)
        return self._finish(values, gradients, fresh, loss, scale)

    def _finish(self, values: list[Any], gradients: list[Any], fresh: list[Any], loss: Any, scale: Any) -> list[Any]:
        """Gradients unscaled, statistics as what they lose by this step, and whether all is finite."""
        tf = self.tf
        finite = tf.constant(True)
        if scale is not None:
            gradients = [g / scale for g in gradients]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        lost = [old - new for old, new in zip(values[len(self.trainable) :], fresh, strict=True)]
        return [*gradients, *lost, loss, finite]

    def _replica(self, values: list[Any], batch: Batch, scale: Any) -> tuple[list[Any], list[Any], list[Any], Any]:
        """Gradients, new statistics, new state of our own, and the loss of one replica."""
        tf, variables = self.tf, [*self.trainable, *self.statistics]
        cast = [
            v if _dtype(var) == "float32" else tf.cast(v, var.dtype) for v, var in zip(values, variables, strict=True)
        ]
        trained = cast[: len(self.trainable)]
        scope = self._scope(list(zip(variables, cast, strict=True)))
        with tf.GradientTape() as tape:
            tape.watch(trained)
            loss, predicted = self._forward(scope, batch)
            target = loss if scale is None else loss * tf.cast(scale, loss.dtype)
        found = tape.gradient(target, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]
        self._measure(scope, batch, predicted, loss)
        now = scope.get_current_value
        fresh = [tf.cast(now(s), tf.float32) for s in self.statistics]
        return gradients, fresh, [v.value if now(v) is None else now(v) for v in self._own], loss

    def _forward(self, scope: Any, batch: Batch) -> tuple[Any, Any]:
        x, y, weights = batch
        extra = {"training": True} if self._takes_training else {}
        with scope:
            predicted = _call(self.model, x)
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights, **extra)
        return loss, predicted

    def _measure(self, scope: Any, batch: Batch, predicted: Any, loss: Any) -> None:
        """Metrics, in the scope too, since one may look at the model; then those that changed are written."""
        tf, model = self.tf, self.model
        x, y, weights = batch
        tracker = getattr(model, "_loss_tracker", None)
        with scope:
            if tracker is not None:
                whole = loss * tf.cast(self.replicas, loss.dtype) if self.replicas > 1 else loss
                tracker.update_state(whole, sample_weight=tf.shape(self._tensors((x, None, None))[0])[0])
            model.compute_metrics(x, y, predicted, sample_weight=weights)
        for variable in self._metric_variables():
            if id(variable) in scope.touched:
                variable.assign(scope.get_current_value(variable))

    def _metric_variables(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]

    def _over_replicas(self, values: list[Any], batch: Batch, scale: Any) -> Any:
        """Each replica takes its slice; gradients are their sum (Keras has divided the loss by their number)."""
        tf, tree, many, strategy = self.tf, self.keras.tree, self.replicas, self.strategy
        assert strategy is not None

        def one() -> Any:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            index = number if isinstance(number, int) else tf.get_static_value(number)

            def mine(part: Any) -> Any:
                size = tf.shape(part)[0]
                return part[size * index // many : size * (index + 1) // many]

            share = tree.map_structure(lambda part: None if part is None else mine(part), batch)
            gradients, fresh, own, loss = self._replica(values, share, scale)
            whole, ours = (tf.cast(tf.shape(self._tensors(b)[0])[0], tf.float32) for b in (batch, share))
            part = ours * float(many) / whole
            scaled = [tf.math.multiply_no_nan(g, part) for g in [*gradients, tf.cast(loss, tf.float32)]]
            return scaled[:-1], fresh, own, scaled[-1]

        gradients, fresh, own, loss = strategy.run(one)
        add, mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
        return (
            [strategy.reduce(add, g, axis=None) for g in gradients],
            [strategy.reduce(mean, s, axis=None) for s in fresh],
            [strategy.experimental_local_results(value)[0] for value in own],
            strategy.reduce(add, loss, axis=None),
        )

    # --- getting to know the model

    def _build(self, batch: Batch) -> None:
        """Makes all variables of model, loss and metrics, as Keras' own fit does before its first step."""
        first = _first(batch, self.keras)
        if self.replicas > 1:
            with self.strategy.scope():  # type: ignore[union-attr]
                self.model._symbolic_build(data_batch=first)
            return

        def once() -> None:
            predicted = _call(self.model, first[0])
            extra = {"training": True} if self._takes_training else {}
            self.model.compute_loss(x=first[0], y=first[1], y_pred=predicted, sample_weight=first[2], **extra)
            self.model.compute_metrics(first[0], first[1], predicted, sample_weight=first[2])

        self._trace(once)
        self.model.reset_metrics()

    def _trace(self, function: Any) -> None:
        """Only traced, so no seed moves on and no metric counts; an eager model has to run."""
        try:
            function() if self._eager else self.tf.function(function, autograph=False).get_concrete_function()
        except ValueError as error:
            if not any(words in str(error) for words in CREATES):
                raise
            raise _creates(self.model, next(line for line in str(error).splitlines() if "ariable" in line)) from None

    def _find_state(self, batch: Batch) -> None:
        """Traces the forward pass once to see which variables it assigns, and that it makes none."""
        first, touched, before = _first(batch, self.keras), list[Any](), len(self.model.variables)

        def probe() -> None:
            scope = self._scope([(v, v.value) for v in self.trainable])
            self._forward(scope, first)
            touched.extend(scope.touched.values())

        self._trace(probe)
        if len(self.model.variables) > before:
            raise _creates(self.model, f"{len(self.model.variables) - before} came up in one step")
        trained = next((v for v in touched if any(v is t for t in self.trainable)), None)
        if trained is not None:
            raise _assigns(self.model, trained)
        metrics = {id(v) for v in self._metric_variables()}
        rest = [v for v in touched if id(v) not in metrics]
        known = {id(v) for v in self.model.non_trainable_variables}
        self.statistics = [v for v in rest if id(v) in known and self.tf.as_dtype(v.dtype).is_floating]
        self._own = [v for v in rest if all(v is not s for s in self.statistics)]


def recording(keras: Any) -> Any:
    """A stateless scope that also knows which variables were assigned in it."""

    class Recording(keras.StatelessScope):  # type: ignore[misc]
        def __init__(self, mapping: list[tuple[Any, Any]]) -> None:
            super().__init__(state_mapping=mapping, collect_losses=True)
            self.touched: dict[int, Any] = {}

        def add_update(self, update: tuple[Any, Any]) -> None:
            self.touched[id(update[0])] = update[0]
            super().add_update(update)

    return Recording


def alias(view: Any, tf: Any) -> Any:
    """A tensor over the memory of a NumPy array. A copy would go stale, so an array that cannot be aliased is a bug."""
    if view.ctypes.data % 64 or not view.flags.c_contiguous:
        raise ValueError(f"an array at {view.ctypes.data:#x} cannot be aliased")
    return tf.experimental.dlpack.from_dlpack(view.__dlpack__())


def _call(model: Any, x: Any) -> Any:
    return model(x, training=True) if getattr(model, "_call_has_training_arg", True) else model(x)


def _first(batch: Batch, keras: Any) -> Batch:
    """The first sample of a batch, as tensors."""
    made: Batch = keras.tree.map_structure(lambda p: None if p is None else keras.ops.convert_to_tensor(p[:1]), batch)
    return made


def _alike(one: Shapes, other: Shapes) -> bool:
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def _joined(all_: list[Shapes]) -> Shapes:
    """What all of these are, with None where they differ."""
    columns = [list(zip(*shapes, strict=True)) for shapes in zip(*all_, strict=True)]
    return tuple([tuple([sides[0] if len(set(sides)) == 1 else None for sides in shape]) for shape in columns])


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))


def _creates(model: Any, why: str) -> Refused:
    return Refused(
        f"{model.name} makes variables during a step", at=type(model).__name__, because=why.splitlines()[0],
        try_="make them in __init__ or build()",
    )  # fmt: skip


def _assigns(model: Any, variable: Any) -> Refused:
    return Refused(
        f"{model.name} sets {variable.path} in its forward pass", at=type(model).__name__,
        because="that is a trained variable, whose value lives on the parameter servers",
        try_="make it trainable=False, or leave out the layer that does it (SpectralNormalization does)",
    )  # fmt: skip
