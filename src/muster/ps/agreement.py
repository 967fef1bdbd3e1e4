"""How all workers come to train the same parameters: the chief declares them, the others are held against it.

A declaration is *staged* on every ps, with its values, and then *committed* on one after the other, ps 0 last: where
ps 0 has a layout, all have it. So a chief that dies half way leaves either the old layout or one that its successor
completes. What the ps hold already under the same names and shapes stays, and passes through the chief on its way,
since it may move to another ps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import MusterError, Refused, RunFailed
from muster.ps import wire
from muster.ps.exchange import NOTICE_AFTER, Exchange
from muster.ps.optimizers import Optimizer, parse
from muster.ps.slabs import Declaration, Floats, Layout, Parameter, aligned, declaration, differences, floats
from muster.ps.wire import Header

PAUSE = 0.02  # seconds between looks for the chief's declaration


class Agreement:
    """One declaration of ours, over the ps that ``exchange`` reaches. Raises Refused for what cannot be declared."""

    def __init__(self, exchange: Exchange, wanted: Declaration) -> None:
        self.exchange, self.wanted = exchange, wanted
        self.optimizer: Optimizer = parse(wanted.optimizer)
        self.layout: Layout = wanted.layout()
        self.fingerprint = wanted.fingerprint()

    def holds(self) -> bool:
        """Whether this is what every ps has in use."""
        return all(told["fingerprint"] == self.fingerprint for told in self.exchange.all({"ask": "layout"}))

    # --- the chief

    def declare(self, values: Sequence[Any], slots: Mapping[str, Sequence[Any]], steps: int) -> int:
        """Have every ps use it; the number of the layout. For the arguments see ``Client.declare``."""
        exchange, ours = self.exchange, self.fingerprint
        found = exchange.all({"ask": "layout", "whole": True})
        if not all(ours in (told["fingerprint"], told["staged"]) for told in found):
            self._stage(values, slots, steps, found)
            found = exchange.all({"ask": "layout"})
        for link, told in zip(exchange.links[::-1], found[::-1], strict=True):  # ps 0 last: where it is new, all are
            if told["fingerprint"] != ours:
                exchange.one(link, {"ask": "commit", "fingerprint": ours})
        return int(exchange.one(exchange.links[0], {"ask": "layout"})["number"])

    def store(self, values: Sequence[Any]) -> None:
        """Set the parameters: float32 arrays as in ``declare``. Slots and counts stay."""
        self._send([self._flat(values)], {}, 0)
        self.exchange.all({"ask": "store"})

    def keep(self, values: Sequence[Any], label: str) -> None:
        """Have the ps keep such values beside those in use, in the place of what they kept before."""
        self._send([self._flat(values)], {}, 0)
        self.exchange.all({"ask": "keep", "label": label})

    def _flat(self, values: Sequence[Any]) -> Floats:
        flat = aligned(self.layout.size)
        for view, parameter, value in zip(self.layout.views(flat), self.layout.parameters, values, strict=True):
            view[...] = floats(value, parameter).reshape(parameter.shape)
        return flat

    def _send(self, arrays: Sequence[Floats], told: Mapping[str, Any], flags: int) -> None:
        for link, cut in zip(self.exchange.links, self.layout.cuts, strict=True):
            data = [array[cut.start : cut.stop] for array in arrays]
            size = sum(array.nbytes for array in data)
            link.ask([wire.message(wire.DECLARE, {**self.wanted.told(), **told}, flags=flags, data=size), *data])
        self.exchange.answered()

    def _stage(
        self, values: Sequence[Any], slots: Mapping[str, Sequence[Any]], steps: int, found: list[dict[str, Any]]
    ) -> None:
        if len(values) != len(self.layout.parameters):
            raise Refused(f"{len(self.layout.parameters)} parameters are declared with {len(values)} initial values")
        flat = self._flat(values)
        arrays: list[Floats] = []
        told: dict[str, Any] = {}
        if all(row["fingerprint"] for row in found):
            arrays, told = self._carry(flat, found)
        elif slots or steps:
            arrays, told = self._bring(slots, steps)
        self._send([flat, *arrays], told, wire.WITH_SLOTS if arrays else 0)

    def _bring(self, given: Mapping[str, Sequence[Any]], steps: int) -> Any:
        """Slots of an optimizer that has trained before, and its age."""
        slots = []
        for name in self.optimizer.kept():
            slots.append(aligned(self.layout.size))
            slots[-1].fill(self.optimizer.initial(name))
            for view, value in zip(self.layout.views(slots[-1]), given.get(name, ()), strict=False):
                view[...] = value
        return slots, {"steps": steps, "born": [0] * len(self.layout.parameters)}

    def _carry(self, flat: Floats, found: list[dict[str, Any]]) -> Any:
        """Values, slots and ages of parameters that stay."""
        before = declaration(found[0]["declaration"])
        old, new, place = parse(before.optimizer), self.optimizer, before.layout()
        arrays = self._fetch(place, old)
        rows = {p.name: (start, p) for start, p in zip(place.starts, before.parameters, strict=True)}
        ages = {p.name: int(at) for p, at in zip(before.parameters, found[0]["born"], strict=True)}
        keep = type(old) is type(new) and old.kept() == new.kept()
        steps = int(found[0]["steps"]) if keep else 0
        slots = [aligned(self.layout.size) for _ in new.kept()] if keep else []
        for slot, name in zip(slots, new.kept(), strict=False):
            slot.fill(new.initial(name))
        born = []
        for start, parameter in zip(self.layout.starts, self.layout.parameters, strict=True):
            begin, other = rows.get(parameter.name, (0, None))
            stays = other is not None and other.shape == parameter.shape
            trained = keep and stays and other is not None and other.trainable
            born.append(ages[parameter.name] if trained else steps)
            if stays:
                for to, source in zip([flat, *slots], arrays, strict=False):
                    to[start : start + parameter.size] = source[begin : begin + parameter.size]
        return slots, {"steps": steps, "born": born}

    # --- what the ps hold

    def state(self) -> dict[str, Floats]:
        """Values (key "") and each slot (by its Keras name: "momentum"), float32 (layout.size,), from all ps."""
        return dict(zip(["", *self.optimizer.kept()], self._fetch(self.layout, self.optimizer), strict=True))

    def kept(self, label: str) -> list[Floats] | None:
        """What was kept under ``label``, per parameter; None where a ps has not that."""
        if any(row["kept"] != label for row in self.exchange.all({"ask": "layout"})):
            return None
        flat = aligned(self.layout.size)
        for link, cut in zip(self.exchange.links, self.layout.cuts, strict=True):
            link.ask([Header(wire.PULL, wire.KEPT).pack()], [flat[cut.start : cut.stop].data])
        self.exchange.answered()
        return self.layout.views(flat)

    def _fetch(self, layout: Layout, optimizer: Optimizer) -> list[Floats]:
        arrays = [aligned(layout.size) for _ in range(1 + len(optimizer.kept()))]
        for link, cut in zip(self.exchange.links, layout.cuts, strict=True):
            landing = [array[cut.start : cut.stop].data for array in arrays]
            link.ask([Header(wire.PULL, wire.WITH_SLOTS).pack()], landing)
        self.exchange.answered()
        return arrays

    # --- the others

    def await_chief(self, known: int, limit: float) -> int:
        """Wait until the chief has declared the same; the number of the layout.

        ``known``: the last layout that we agreed on, so that it is not taken for the chief's next declaration.
        Raises MusterError where the two do not agree, RunFailed after ``limit`` seconds.
        """
        exchange, task = self.exchange, self.exchange.who.task
        since, told = exchange.clock(), False
        while True:
            found = exchange.all({"ask": "layout"})
            if all(row["fingerprint"] == self.fingerprint for row in found):
                return int(found[0]["number"])
            if all(row["number"] > known for row in found) and not any(row["staged"] for row in found):
                self._compare()
            waited = exchange.clock() - since
            if waited > limit:
                raise RunFailed(
                    f"{task} waited {limit:.0f} s for the chief to declare the parameters",
                    at=str(exchange.links[0].place), try_="see the log of the chief",
                )  # fmt: skip
            if waited > NOTICE_AFTER and not told:
                told = True
                exchange.notice(f"{task} waits for the chief to declare the parameters, since {waited:.0f} s")
            time.sleep(PAUSE)

    def _compare(self) -> None:
        exchange, task = self.exchange, self.exchange.who.task
        chief = declaration(exchange.one(exchange.links[0], {"ask": "layout", "whole": True})["declaration"])
        lines = differences(self.wanted, chief)
        if lines:
            raise MusterError(
                f"{task} does not train the same model as the chief", at=task, because=lines,
                try_="run the same script everywhere, with the same seed for anything that decides the model's shape",
            )  # fmt: skip


def declared(parameters: Sequence[Parameter], optimizer: Mapping[str, Any], ps: int) -> Declaration:
    """A declaration of what a script has: a learning rate that is a schedule stays here, since numbers travel."""
    outer = ("learning_rate", "class_name", "module", "registered_name", "build_config")
    config = {k: v for k, v in dict(optimizer.get("config", optimizer)).items() if k not in outer}
    name = str(optimizer.get("class_name") or config.get("name") or "")
    return Declaration(tuple(parameters), {"class_name": name, "config": config}, ps)
