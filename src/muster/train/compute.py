"""One training step of a Keras model as a function of its parameters: values in, gradients out, nothing copied.

The parameters are not the model's variables but the client's buffer, aliased as tensors once; inside the step they
stand in for the variables (``keras.StatelessScope``), so that a step is one call whatever the number of variables, and
gradients are read where TensorFlow has put them. Two facts make aliasing safe: every tensor in the buffer begins on a
multiple of 64 bytes (TensorFlow ends the process otherwise), and the buffer is written only between steps.

What a step changes besides is told apart by tracing it once: float variables that the forward pass assigns
(BatchNormalization's statistics) are averaged over the workers and travel like parameters; any other state (seeds,
counters) stays with its worker, and so do the metrics until the epoch ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.errors import Refused
from muster.ps.slabs import Parameter

CREATES = "create a variable"  # Keras' words when a layer makes one inside a stateless scope


class Outcome(NamedTuple):
    """``gradients``: one buffer per parameter, for ``Client.step``. ``finite`` is False for float16 overflow."""

    gradients: list[Any]
    loss: Any
    finite: bool


class Compute:
    """Built from one batch (numpy or tensors; ``weights`` may be None). ``parameters`` is what to declare."""

    def __init__(self, model: Any, batch: tuple[Any, Any, Any], keras: Any, tf: Any, scaled: bool = False) -> None:
        self.model, self.keras, self.tf, self.scaled = model, keras, tf, scaled
        self.replicas = max(1, getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1))
        self._takes_training = "training" in inspect.signature(model.compute_loss).parameters
        build(model, _first(batch, keras), self._takes_training)
        self.trainable = list(model.trainable_variables)
        if not self.trainable:
            raise Refused("The model has nothing to train", at=model.name, try_="layer.trainable = True for some layer")
        self.statistics: list[Any] = []
        self._own: list[Any] = []  # state that stays here
        self._functions: dict[Any, Any] = {}
        self._find_state(batch)
        self.parameters = self._describe()
        self._inputs: list[Any] = []

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

    def initial(self) -> list[Any]:
        """The model's present values, float32, in the order of ``parameters``."""
        return [
            np.asarray(self.keras.ops.convert_to_numpy(v.value), np.float32)
            for v in [*self.trainable, *self.statistics]
        ]

    def bind(self, views: Sequence[Any]) -> None:
        """From now on steps read their parameters from ``views`` (the client's, filled in place by pulls)."""
        self._inputs = [alias(view, self.tf) for view in views]

    def load(self, views: Sequence[Any]) -> None:
        """Writes ``views`` into the model's own variables: for validation, callbacks and the end."""
        for variable, view in zip([*self.trainable, *self.statistics], views, strict=True):
            variable.assign(view)

    def changed(self, views: Sequence[Any]) -> bool:
        """Whether the model's variables differ from ``views``: a callback has set them."""
        pairs = zip(self.initial(), views, strict=True)
        return any(not np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in pairs)

    def step(self, batch: tuple[Any, Any, Any], scale: float = 1.0) -> Outcome:
        """Forward and backward on one batch at the bound values. Updates metrics and the state that stays here."""
        x, y, weights = batch
        inputs = self.keras.tree.flatten((x, y, weights))
        tensors = [part for part in inputs if part is not None]
        key = tuple((tuple(t.shape), t.dtype) for t in tensors)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._compile(batch)
        extra = [self.tf.constant(scale, self.tf.float32)] if self.scaled else []
        *gradients, loss, finite = function(*self._inputs, *tensors, *extra)
        return Outcome(
            [memoryview(g) if self._on_host(g) else g.numpy() for g in gradients], loss, not self.scaled or bool(finite)
        )

    def _on_host(self, tensor: Any) -> bool:
        return "CPU" in tensor.device

    # --- tracing

    def _compile(self, batch: tuple[Any, Any, Any]) -> Any:
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

        specs = [tf.TensorSpec(p.shape, tf.float32) for p in self.parameters]
        specs += [tf.TensorSpec(part.shape, part.dtype) for part in flat if part is not None]
        specs += [tf.TensorSpec([], tf.float32)] if self.scaled else []
        if getattr(self.model, "run_eagerly", False):
            return call
        return tf.function(call, autograph=False).get_concrete_function(*specs)

    def _traced(self, values: list[Any], batch: tuple[Any, Any, Any], scale: Any) -> list[Any]:
        if self.replicas > 1:
            return self._over_replicas(values, batch, scale)
        gradients, fresh, own, loss = self._replica(values, batch, scale, 1.0)
        for variable, value in own:
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

    def _replica(self, values: list[Any], batch: tuple[Any, Any, Any], scale: Any, share: Any) -> Any:
        """Gradients, new statistics, new state of our own, and the loss of one replica."""
        tf, keras, model = self.tf, self.keras, self.model
        x, y, weights = batch
        variables = [*self.trainable, *self.statistics]
        cast = [
            v if _dtype(var) == "float32" else tf.cast(v, var.dtype) for v, var in zip(values, variables, strict=True)
        ]
        trained = cast[: len(self.trainable)]
        with tf.GradientTape() as tape:
            tape.watch(trained)
            scope = keras.StatelessScope(state_mapping=list(zip(variables, cast, strict=True)))
            with scope:
                predicted = _forward(model, x)
                loss = self._loss(x, y, predicted, weights)
            target = loss if scale is None else loss * tf.cast(scale, loss.dtype)
        found = tape.gradient(target, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]
        fresh = [tf.cast(scope.get_current_value(s), tf.float32) for s in self.statistics]
        own = [(v, scope.get_current_value(v)) for v in self._own]
        self._measure(x, y, predicted, weights, loss, share)
        return gradients, fresh, [(v, value) for v, value in own if value is not None], loss

    def _loss(self, x: Any, y: Any, predicted: Any, weights: Any) -> Any:
        extra = {"training": True} if self._takes_training else {}
        return self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights, **extra)

    def _measure(self, x: Any, y: Any, predicted: Any, weights: Any, loss: Any, share: Any) -> None:
        tf, model = self.tf, self.model
        samples = tf.shape(self.keras.tree.flatten(x)[0])[0]
        tracker = getattr(model, "_loss_tracker", None)
        if tracker is not None:
            tracker.update_state(loss * share if share != 1.0 else loss, sample_weight=samples)
        model.compute_metrics(x, y, predicted, sample_weight=weights)

    def _over_replicas(self, values: list[Any], batch: tuple[Any, Any, Any], scale: Any) -> list[Any]:
        """Each replica takes its slice; gradients are their sum (Keras has divided the loss by their number)."""
        tf, tree, many = self.tf, self.keras.tree, self.replicas
        strategy = self.model.distribute_strategy

        def one() -> Any:
            n = tf.distribute.get_replica_context().replica_id_in_sync_group
            index = tf.get_static_value(n) if not isinstance(n, int) else n

            def mine(part: Any) -> Any:
                size = tf.shape(part)[0]
                return part[size * index // many : size * (index + 1) // many]

            share = tree.map_structure(lambda part: None if part is None else mine(part), batch)
            gradients, fresh, own, loss = self._replica(values, share, scale, float(many))
            whole = tf.cast(tf.shape(tree.flatten(batch)[0])[0], tf.float32)
            part = tf.cast(tf.shape(tree.flatten(share)[0])[0], tf.float32) * float(many) / whole
            return [g * part for g in gradients], fresh, [value for _, value in own], loss * tf.cast(part, loss.dtype)

        gradients, fresh, own, loss = strategy.run(one)
        add, mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
        gradients = [strategy.reduce(add, g, axis=None) for g in gradients]
        fresh = [strategy.reduce(mean, s, axis=None) for s in fresh]
        for variable, value in zip(self._kept, own, strict=False):
            variable.assign(strategy.experimental_local_results(value)[0])
        return self._finish(values, gradients, fresh, strategy.reduce(add, loss, axis=None), scale)

    def _find_state(self, batch: tuple[Any, Any, Any]) -> None:
        """Traces the forward pass once to see which variables it assigns, and that it makes none."""
        keras, tf, model = self.keras, self.tf, self.model
        rest = list(model.non_trainable_variables)
        assigned: list[Any] = []

        def probe(x: Any, y: Any, weights: Any) -> Any:
            scope = keras.StatelessScope()
            with scope:
                self._loss(x, y, _forward(model, x), weights)
            assigned.extend(v for v in rest if scope.get_current_value(v) is not None)

        before = len(model.variables)
        try:
            if getattr(model, "run_eagerly", False):
                probe(*batch)
            else:
                tf.function(probe, autograph=False).get_concrete_function(
                    *keras.tree.map_structure(lambda p: None if p is None else tf.convert_to_tensor(p), batch)
                )
        except ValueError as error:
            if CREATES not in str(error):
                raise
            raise _creates(model, str(error)) from None
        if len(model.variables) > before:
            raise _creates(model, f"{len(model.variables) - before} came up in one step")
        floats = [v for v in assigned if _dtype(v).startswith(("float", "bfloat"))]
        self.statistics = [v for v in floats if tf.as_dtype(v.dtype).is_floating]
        self._own = [v for v in assigned if all(v is not s for s in self.statistics)]
        self._kept = list(self._own)


def build(model: Any, batch: tuple[Any, Any, Any], takes_training: bool) -> None:
    """Makes all variables of model, loss and metrics, as Keras' own fit does before its first step."""
    x, y, weights = batch
    predicted = _forward(model, x, training=False)
    extra = {"training": False} if takes_training else {}
    model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights, **extra)
    model.compute_metrics(x, y, predicted, sample_weight=weights)
    model.reset_metrics()


def alias(view: Any, tf: Any) -> Any:
    """A tensor over the memory of a NumPy array. A copy would go stale, so an array that cannot be aliased is a bug."""
    if view.ctypes.data % 64 or not view.flags.c_contiguous:
        raise ValueError(f"an array at {view.ctypes.data:#x} cannot be aliased")
    return tf.experimental.dlpack.from_dlpack(view.__dlpack__())


def _forward(model: Any, x: Any, training: bool = True) -> Any:
    if getattr(model, "_call_has_training_arg", True):
        return model(x, training=training)
    return model(x)


def _first(batch: tuple[Any, Any, Any], keras: Any) -> tuple[Any, Any, Any]:
    """The first sample of a batch, as tensors."""
    made: tuple[Any, Any, Any] = keras.tree.map_structure(
        lambda p: None if p is None else keras.ops.convert_to_tensor(p[:1]), batch
    )
    return made


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))


def _creates(model: Any, why: str) -> Refused:
    return Refused(
        f"{model.name} makes variables during a step", at=type(model).__name__, because=why.splitlines()[0],
        try_="make them in __init__ or build()",
    )  # fmt: skip
