"""The best weights that a callback holds (EarlyStopping with ``restore_best_weights``) outlive the chief.

They are a second copy of the model, which no note on the board could hold. So the ps keep it beside the values in use,
and the chief's note says under which label: where the two do not agree, the chief died between one and the other, and
its successor says that the weights are lost rather than take others for them.
"""

from __future__ import annotations

from typing import Any

from muster.ps.client import Client
from muster.train.calls import Calls
from muster.train.compute import Compute
from muster.train.report import Channel


class Best:
    """Of the first such callback; ``label`` is what was kept last, empty where nothing was."""

    def __init__(self, calls: Calls, compute: Compute, client: Client, reports: Channel) -> None:
        self.compute, self.client, self.reports = compute, client, reports
        self.holders = [c for c in calls.list.callbacks if getattr(c, "restore_best_weights", False)]
        self.label = ""
        self._held: Any = None

    def keep(self, label: str) -> None:
        """After an epoch: if the callback has found better weights, the ps keep them."""
        found = self.holders[0].best_weights if self.holders else None
        if found is None or found is self._held:
            return
        self.client.keep([found[place] for place in self._places()], label)
        self._held, self.label = found, label

    def back(self, label: str) -> None:
        """In the chief's next life: what its last one had kept under ``label``."""
        views = self.client.kept(label) if label and self.holders else None
        if views is not None:
            whole = self.compute.model.get_weights()
            for place, view in zip(self._places(), views, strict=True):
                whole[place] = view.astype(whole[place].dtype)
            self.holders[0].best_weights = self._held = whole
            self.label = label
        if (label and views is None) or len(self.holders) > 1:
            self.reports.say(
                "the best weights so far died with the chief: restore_best_weights gives the best from here on"
            )

    def _places(self) -> list[int]:
        """Where each parameter is among the model's weights."""
        places = {id(variable): place for place, variable in enumerate(self.compute.model.weights)}
        return [places[id(variable)] for variable in (*self.compute.trainable, *self.compute.statistics)]
