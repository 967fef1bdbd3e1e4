"""A worker's view of all ps: one flat vector of values, one of gradients, and a step that is one round trip.

Three parts stand under it: ``exchange`` carries out requests, ``agreement`` comes to the parameters that all train, and
``room`` has the arrays. Here is what a worker does with them: take part, pull, step, decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.errors import Refused, RunFailed
from muster.ps import wire
from muster.ps.agreement import Agreement, declared
from muster.ps.board import Lease
from muster.ps.exchange import Exchange, checked
from muster.ps.link import Identity, Link, Place
from muster.ps.optimizers import exchanges, factors
from muster.ps.room import Room, can_share
from muster.ps.slabs import Floats, Layout, Parameter
from muster.ps.wire import Header

SHARE_FROM = 1 << 13  # bytes of a slab from which shared memory beats a Unix socket


class Done(NamedTuple):
    """What became of a push. ``step`` is the global step now (updates applied by ps 0; in sync: rounds).

    ``late``: the round was closed without this gradient, which was dropped. With ``spare`` each ps closes its rounds
    with the gradients that it has first, and what is late at one may be in time at another; this is ps 0's word, as
    is every count. ``stop``: somebody has asked to stop.
    """

    step: int
    late: bool
    stop: bool


class Client:
    """Connected to every ps. Not thread-safe: one thread at a time.

    ``places`` are the ps in order, ``who`` is this task. ``chief`` says whether this worker declares. ``patience`` is
    how long, in seconds, a ps may be away before ``RunFailed`` is raised. ``notice`` is told whom we wait for.
    """

    values: Floats  # float32 (layout.size,): the parameters as last pulled; written in place by pull and step
    gradient: Floats  # float32 (layout.size,): fill it, then step(); zero between tensors, keep it so
    views: list[Floats]  # values, per parameter in the order declared, in its shape
    gradients: list[Floats]  # the same of gradient
    layout: Layout

    def __init__(
        self,
        places: Sequence[Place],
        who: Identity,
        chief: bool,
        patience: float = 60.0,
        notice: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.who, self.chief = who, chief
        self.mode = ""
        self.at = 0  # the round (sync) or own step (bounded) that the next push belongs to
        self.number = 0  # of the last push
        self.step_now = 0  # the global step at the last answer of ps 0
        self.stopping = False
        self.rate_set: float | None = None  # the chief's decision, over any schedule
        self.layout_number = 0
        self.shared: set[int] = set()  # the ps with which memory is shared
        self._known = 0  # the last layout that we agreed on
        self._joined = False
        self._room: Room | None = None
        self.exchange = Exchange(places, who, self._met, patience, notice, clock)
        self.links = self.exchange.links
        self.exchange.connect()

    def _met(self, link: Link) -> None:
        """A connection has been made: be to this ps what we were."""
        self.mode = str(link.welcome["mode"])
        self.number = max(self.number, int(link.welcome["push"]))
        if self.layout_number and link.welcome["layout"] != self.layout_number:
            raise RunFailed(
                f"{link.place.name} came back without the parameters of this training", at=str(link.place),
                because=f"it has layout {link.welcome['layout']}, and we train layout {self.layout_number}",
                try_="see the log of that task",
            )  # fmt: skip
        if link.place.index in self.shared:
            self._share(link)
        if self._joined:
            self.exchange.one(link, {"ask": "join", "at": self.at})

    def close(self) -> None:
        for link in self.links:
            link.close()
        if self._room is not None:
            self._room.close()

    # --- declaring

    def declare(
        self,
        parameters: Sequence[Parameter],
        optimizer: Mapping[str, Any],
        values: Sequence[Any] = (),
        limit: float = 600.0,
        slots: Mapping[str, Sequence[Any]] | None = None,
        steps: int = 0,
    ) -> None:
        """Agree with everybody on the parameters, take part, and pull their values.

        On the chief ``values`` are the initial values, float32 arrays in the order and shapes of ``parameters``. Where
        the ps hold parameters of these names and shapes already (declared before, or by the chief's predecessor),
        their values stay, and their slots where the optimizer is of the same class. Other workers wait up to ``limit``
        seconds for the chief. ``optimizer`` is what ``muster.ps.optimizers.parse`` takes. ``slots`` (by name, in the
        order of ``parameters``, trained ones first) and ``steps`` are what an optimizer brings along that has trained
        before; the chief's count, and only where the ps hold nothing yet.

        Afterwards ``values``, ``gradient``, ``views``, ``gradients`` and ``layout`` are there. Raises Refused for an
        optimizer without counterpart, MusterError where our declaration is not the chief's.
        """
        agreed = self.agreed = self._agreement(parameters, optimizer)
        self.layout = agreed.layout
        self._joined, self.layout_number = False, 0
        number = agreed.declare(values, slots or {}, steps) if self.chief else agreed.await_chief(self._known, limit)
        self.layout_number = self._known = number
        self._make_room()
        self.join()

    def holds(self, parameters: Sequence[Parameter], optimizer: Mapping[str, Any]) -> bool:
        """Whether the ps train just these parameters now, so that declaring them would change nothing for anybody."""
        return self._agreement(parameters, optimizer).holds()

    def store(self, values: Sequence[Any]) -> None:
        """The chief's way to set the parameters: float32 arrays as in ``declare``. Slots and counts stay."""
        self.agreed.store(values)

    def anew(self) -> None:
        """The chief's way to begin with a new optimizer of the same kind: no slots, no steps; the values stay."""
        self.exchange.all({"ask": "anew"})

    def keep(self, values: Sequence[Any], label: str) -> None:
        """Have the ps keep values (as in ``declare``) beside those in use, for whoever is the chief then."""
        self.agreed.keep(values, label)

    def kept(self, label: str) -> list[Floats] | None:
        """The values that were kept last, per parameter, where that was under ``label``."""
        return self.agreed.kept(label)

    def state(self) -> dict[str, Floats]:
        """Values (key "") and each slot (by its Keras name: "momentum"), float32 (layout.size,), from all ps."""
        return self.agreed.state()

    def _agreement(self, parameters: Sequence[Parameter], optimizer: Mapping[str, Any]) -> Agreement:
        return Agreement(self.exchange, declared(parameters, optimizer, len(self.links)))

    def _make_room(self) -> None:
        pairs = zip(self.links, self.layout.cuts, strict=True)
        large = [link for link, cut in pairs if link.local and cut.size * 4 >= SHARE_FROM and can_share()]
        if self._room is not None:
            self._room.close()
        room = self._room = Room(self.layout, shared=bool(large))
        self.values, self.gradient, self.views, self.gradients = room.values, room.gradient, room.views, room.gradients
        self._clips = exchanges(self.agreed.optimizer, self.layout)
        self.shared = set()
        for link in large:
            self._share(link)

    def _share(self, link: Link) -> None:
        assert self._room is not None
        if not self.exchange.one(link, {"ask": "share", "from": SHARE_FROM})["shared"]:
            return
        link.send_fds([wire.message(wire.ASK, {"ask": "shared"})], self._room.fds)
        link.ask([])
        self.exchange.carry_out([link])
        checked(link)
        self.shared.add(link.place.index)

    # --- taking part

    def join(self) -> None:
        """Take part from now on (again, after ``turn``), and pull."""
        self.at = int(self.exchange.one(self.links[0], {"ask": "join", "at": None})["at"])
        for told in self.exchange.all({"ask": "join", "at": self.at}):
            self.at = max(self.at, int(told["at"]))
        self._joined = True
        self.pull()

    def turn(self, phase: str) -> None:
        """Tell every ps that nobody should wait for us: "validating" or "done" (out of data). ``join`` ends it."""
        self._joined = False
        self.exchange.all({"ask": "phase", "phase": phase})

    # --- steps

    def pull(self) -> Done:
        """Fresh values from every ps into ``values``. In sync they are those at the beginning of our next round."""
        assert self._room is not None
        header = Header(wire.PULL, layout=self.layout_number, round=self.at).pack()
        for link, landing in zip(self.links, self._room.landing, strict=True):
            link.ask([header], landing)
        self.exchange.carry_out(self.links)
        return self._read()

    def step(self, gradient: Any = None, samples: float = 1.0, rate: float | None = None) -> Done:
        """Push a gradient and pull the values it leads to, in one round trip. In sync: a whole round.

        ``gradient``: None for what ``self.gradient`` holds; a float32 array of its layout; or a sequence with one entry
        per parameter: anything with a float32 buffer of its shape (sent from where it lies), or None for zeros. For a
        statistic (``trainable=False``) the entry is the value pulled minus the new value.
        ``samples`` is what the gradient is the mean over: its weight in a sync round; with 0 it only takes part, and
        changes nothing. ``rate`` is the learning rate.
        """
        return self._push(gradient, samples, rate, wire.WITH_VALUES)

    def push(self, gradient: Any = None, samples: float = 1.0, rate: float | None = None) -> Done:
        """The same without pulling."""
        return self._push(gradient, samples, rate, 0)

    def _push(self, gradient: Any, samples: float, rate: float | None, flags: int) -> Done:
        rate = self.rate_set if self.rate_set is not None else rate
        if rate is None:
            raise Refused("A push needs a learning rate", try_="step(gradient, rate=0.01)")
        room = self._room
        assert room is not None
        data = room.buffers(gradient)
        scales: list[Any] = []
        if self._clips and self.mode != "sync":
            flags |= wire.SCALED
            scales = [np.ascontiguousarray(part) for part in room.factors(self.agreed.optimizer, data)]
        self.number += 1
        for k, (link, buffers) in enumerate(zip(self.links, data, strict=True)):
            shared, size = 0, self.layout.cuts[k].size * 4
            if k in self.shared:
                room.fill(k, buffers)
                shared, size, buffers = wire.SHARED, 0, []
            if scales:
                size += scales[k].nbytes
                buffers = [scales[k], *buffers]
            header = Header(
                wire.PUSH, flags | shared, self.layout_number, 0, self.number, self.at, float(rate), float(samples),
                1.0, size,
            )  # fmt: skip
            link.ask([header.pack(), *buffers], room.landing[k])
        self.exchange.carry_out(self.links)
        if self._clips and self.mode == "sync":
            self._second_phase(flags)
        return self._read()

    def _second_phase(self, flags: int) -> None:
        """Sync, clipped by a norm over several ps: each has told its sums of squares; we tell all of them the factors.

        A ps that did not tell sums has this round behind it, so somebody has told the factors to it, and to the others
        (or we are the one to do that, with the sums of all).
        """
        assert self._room is not None
        asked = [link for link in self.links if link.reply.header.flags & wire.SUMS]
        sums = {link.place.index: np.frombuffer(link.reply.sums, np.float64) for link in asked}
        found = factors(self.agreed.optimizer, self.layout, sums) if len(asked) == len(self.links) else {}
        for link in asked:
            part = found.get(link.place.index)
            data = [part] if part is not None else []
            size = part.nbytes if part is not None else 0
            known = 0 if part is not None else wire.LATE
            header = Header(wire.NORMS, flags | known, self.layout_number, 0, self.number, self.at, data=size)
            link.ask([header.pack(), *data], self._room.landing[link.place.index])
        self.exchange.carry_out(asked)

    def _read(self) -> Done:
        for link in self.links:
            self.at = max(self.at, checked(link).reply.header.round)
        first = self.links[0].reply.header
        self.step_now, self.stopping = first.number, bool(first.flags & wire.STOP)
        self.rate_set = None if math.isnan(first.rate) else first.rate
        return Done(self.step_now, bool(first.flags & wire.LATE), self.stopping)

    # --- ps 0 as the place of decisions

    def _board(self, ask: str, **told: Any) -> dict[str, Any]:
        return self.exchange.one(self.links[0], {"ask": ask, **told})

    def set_learning_rate(self, rate: float | None) -> None:
        """From its next answer on, every worker pushes with this rate, whatever it passes; None takes it back."""
        self._board("rate", rate=rate)
        self.rate_set = rate

    def stop(self, why: str = "stop") -> None:
        """Every worker's next step says ``stop``. An empty ``why`` takes it back."""
        self._board("stop", why=why)
        self.stopping = bool(why)

    def lend(self, epoch: str, chunks: int, seed: int | None = None, finished: int | None = None) -> Lease:
        """The next chunk (0 to ``chunks`` - 1) of ``epoch``; each is lent to one worker, and again if that one dies.

        Every worker must give the same ``chunks`` and ``seed``. ``finished`` is the chunk done since. With ``chunk``
        None and ``over`` False somebody still works on the last ones: ask again.
        """
        return Lease(**self._board("lend", epoch=epoch, chunks=chunks, seed=seed, finished=finished))

    def post(self, key: str, value: Any) -> None:
        """Put a JSON value (up to 256 KiB) under ``key`` for all to read, over what this task put there before."""
        self._board("post", key=key, value=value)

    def read(self, key: str) -> dict[str, Any]:
        """What is under ``key``, by task."""
        return dict(self._board("read", key=key)["values"])

    def stats(self) -> list[dict[str, Any]]:
        """Per ps: ``version``, ``waiting``, ``owing``, and per worker applied, dropped, repeated, ahead, staleness."""
        return self.exchange.all({"ask": "stats"})
