"""A worker's view of all ps: one flat vector of values, one of gradients, and a step that is one round trip.

The arrays are made once per declaration and never move, and each tensor in them begins on a multiple of 64 bytes, so a
framework may alias them. Where every ps is on this host and slabs are large, they are memory that the ps sees too, and
a step sends 64 bytes.

A request is repeated until it is answered: pushes carry numbers, so a ps that has seen one does not apply it again.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.errors import MusterError, Refused, RunFailed
from muster.ps import wire
from muster.ps.board import Lease
from muster.ps.link import Identity, Link, Place
from muster.ps.optimizers import Optimizer, exchanges, factors, parse
from muster.ps.slabs import Cut, Declaration, Doubles, Floats, Layout, Parameter, aligned, declaration, differences
from muster.ps.wire import Header, WireError

SHARE_FROM = 1 << 13  # bytes of a slab from which shared memory beats a Unix socket
NOTICE_AFTER = 5.0  # seconds


class Done(NamedTuple):
    """What became of a push. ``step`` is the global step now (updates applied by ps 0; in sync: rounds).

    ``late``: the round was closed without this gradient, which was dropped. ``stop``: somebody has asked to stop.
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
        self.who, self.chief, self.patience, self.notice, self.clock = who, chief, patience, notice, clock
        self.links = [Link(place, who) for place in places]
        self.mode = ""
        self.at = 0  # the round (sync) or own step (bounded) that the next push belongs to
        self.number = 0  # of the last push
        self.step_now = 0  # the global step at the last answer of ps 0
        self.stopping = False
        self.rate_set: float | None = None  # the chief's decision, over any schedule
        self.layout_number = 0
        self._declared = 0
        self._joined = False
        self._fds: list[int] = []
        self._shared: dict[int, bool] = {}
        for link in self.links:
            self._dial(link)

    # --- connections

    def _dial(self, link: Link) -> None:
        link.dial(self.clock() + self.patience, self.clock)
        self.mode = str(link.welcome["mode"])
        self.number = max(self.number, int(link.welcome["push"]))

    def _back(self, link: Link, error: Exception) -> None:
        """Connect again after ``error``, and be to this ps what we were."""
        self.notice(f"{self.who.task} lost {link.place.name} at {link.place} ({error}); connecting again")
        request, landing = link.request, link.landing
        self._dial(link)
        if self.layout_number and link.welcome["layout"] != self.layout_number:
            raise RunFailed(
                f"{link.place.name} came back without the parameters of this training", at=str(link.place),
                because=f"it has layout {link.welcome['layout']}, and we train layout {self.layout_number}",
                try_="see the log of that task",
            )  # fmt: skip
        if self._shared.get(link.place.index):
            self._share(link)
        if self._joined:
            self._one(link, {"ask": "join", "at": self.at})
        link.request, link.landing = request, landing

    def _exchange(self, links: Iterable[Link]) -> None:
        """Carry out the requests that ``links`` hold, all at once. Raises RunFailed where a ps stays away.

        Each call watches its own links only: what it does to bring one back is such a call too.
        """
        poll = select.poll()
        waiting: dict[int, Link] = {}
        try:
            for link in links:
                waiting[self._begin(link, poll)] = link
            self._await(waiting, poll)
        except BaseException:  # a ps refuses, or Ctrl-C: answers that are under way must not meet a later request
            for link in waiting.values():
                link.close()
            raise

    def _await(self, waiting: dict[int, Link], poll: select.poll) -> None:
        since, due = self.clock(), NOTICE_AFTER
        while waiting:
            events = poll.poll(NOTICE_AFTER * 1000)
            waited = self.clock() - since
            if not events and waited >= due:
                due = 4 * waited  # a long wait is said a few times, not every few seconds
                names = ", ".join(f"{link.place.name} at {link.place}" for link in waiting.values())
                self.notice(f"{self.who.task} waits for {names}, since {waited:.0f} s")
            for fd, _ in events:
                self._turn(fd, waiting, poll)

    def _begin(self, link: Link, poll: select.poll) -> int:
        while True:
            try:
                link.begin()
            except OSError as error:
                self._back(link, error)
                continue
            poll.register(link.fileno(), select.POLLIN | select.POLLOUT if link.outbox.views else select.POLLIN)
            return link.fileno()

    def _turn(self, fd: int, waiting: dict[int, Link], poll: select.poll) -> None:
        link = waiting[fd]
        sending = bool(link.outbox.views)
        try:
            whole = link.turn()
        except OSError as error:
            poll.unregister(fd)
            del waiting[fd]
            self._back(link, error)
            waiting[self._begin(link, poll)] = link
            return
        except WireError as error:
            raise RunFailed(f"{link.place.name} said what it may not", at=str(link.place), because=str(error)) from None
        if whole:
            poll.unregister(fd)
            del waiting[fd]
        elif sending and not link.outbox.views:
            poll.modify(fd, select.POLLIN)

    def _checked(self, link: Link) -> Link:
        if link.reply.header.kind == wire.REFUSAL:
            told = link.reply.meta
            raise RunFailed(
                str(told.get("why", "refused")), at=f"{link.place.name} at {link.place}",
                because=str(told.get("because", "")), try_=str(told.get("try", "")),
            )  # fmt: skip
        return link

    def _one(self, link: Link, told: Mapping[str, Any]) -> dict[str, Any]:
        link.ask([wire.message(wire.ASK, dict(told))])
        self._exchange([link])
        return self._checked(link).reply.meta

    def _all(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        for link in self.links:
            link.ask([wire.message(wire.ASK, dict(told))])
        self._exchange(self.links)
        return [self._checked(link).reply.meta for link in self.links]

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
        wanted = Declaration(tuple(parameters), _plain(optimizer), len(self.links))
        self.optimizer: Optimizer = parse(wanted.optimizer)
        self.layout, self._wanted = wanted.layout(), wanted
        self._declared += 1
        self._joined, self.layout_number = False, 0
        self._brought = (slots or {}, steps)
        if self.chief:
            self._declare_as_chief(wanted, values)
        else:
            self._wait_for_chief(wanted, limit)
        self._make_room()
        self.join()

    def holds(self, parameters: Sequence[Parameter], optimizer: Mapping[str, Any]) -> bool:
        """Whether the ps train just these parameters now, so that declaring them would change nothing for anybody."""
        ours = Declaration(tuple(parameters), _plain(optimizer), len(self.links)).fingerprint()
        return all(told["fingerprint"] == ours for told in self._all({"ask": "layout"}))

    def _declare_as_chief(self, wanted: Declaration, values: Sequence[Any]) -> None:
        ours = wanted.fingerprint()
        found = self._all({"ask": "layout", "whole": True})
        if not all(ours in (told["fingerprint"], told["staged"]) for told in found):
            self._stage(wanted, values, found)
            found = self._all({"ask": "layout"})
        for link, told in zip(self.links[::-1], found[::-1], strict=True):  # ps 0 last: where it is new, all are
            if told["fingerprint"] != ours:
                self._one(link, {"ask": "commit", "fingerprint": ours})
        self.layout_number = int(self._one(self.links[0], {"ask": "layout"})["number"])

    def _stage(self, wanted: Declaration, values: Sequence[Any], found: list[dict[str, Any]]) -> None:
        if len(values) != len(wanted.parameters):
            raise Refused(f"{len(wanted.parameters)} parameters are declared with {len(values)} initial values")
        flat = aligned(self.layout.size)
        for view, parameter, value in zip(self.layout.views(flat), wanted.parameters, values, strict=True):
            view[...] = _floats(value, parameter).reshape(parameter.shape)
        slots: list[Floats] = []
        told: dict[str, Any] = {}
        if all(row["fingerprint"] for row in found):
            slots, told = self._carry(wanted, flat, found)
        elif self._brought[0] or self._brought[1]:
            slots, told = self._bring(wanted)
        for link, cut in zip(self.links, self.layout.cuts, strict=True):
            data = [array[cut.start : cut.stop] for array in (flat, *slots)]
            fields = {"flags": wire.WITH_SLOTS if slots else 0, "data": sum(array.nbytes for array in data)}
            link.ask([wire.message(wire.DECLARE, {**wanted.told(), **told}, **fields), *data])
        self._exchange(self.links)
        for link in self.links:
            self._checked(link)

    def _bring(self, wanted: Declaration) -> Any:
        """Slots of an optimizer that has trained before, and its age."""
        given, steps = self._brought
        slots = []
        for name in self.optimizer.kept():
            slots.append(aligned(self.layout.size))
            slots[-1].fill(self.optimizer.initial(name))
            for view, value in zip(self.layout.views(slots[-1]), given.get(name, ()), strict=False):
                view[...] = value
        return slots, {"steps": steps, "born": [0] * len(wanted.parameters)}

    def _carry(self, wanted: Declaration, flat: Floats, found: list[dict[str, Any]]) -> Any:
        """Values, slots and ages of parameters that stay. They pass through here, since they may move to another ps."""
        before = declaration(found[0]["declaration"])
        old, new = parse(before.optimizer), self.optimizer
        arrays = self._fetch(before, old)
        places = {p.name: (i, p) for i, p in enumerate(before.parameters)}
        keep = type(old) is type(new) and old.kept() == new.kept()
        steps = int(found[0]["steps"]) if keep else 0
        slots = [aligned(self.layout.size) for _ in new.kept()] if keep else []
        for slot, name in zip(slots, new.kept(), strict=True):
            slot.fill(new.initial(name))
        born = []
        for start, parameter in zip(self.layout.starts, wanted.parameters, strict=True):
            index, other = places.get(parameter.name, (0, None))
            stays = other is not None and other.shape == parameter.shape
            born.append(0 if stays and other is not None and other.trainable else steps)
            if stays:
                begin = before.layout().starts[index]
                for to, source in zip([flat, *slots], arrays, strict=False):
                    to[start : start + parameter.size] = source[begin : begin + parameter.size]
        return slots, {"steps": steps, "born": born}

    def _fetch(self, before: Declaration, optimizer: Optimizer) -> list[Floats]:
        layout = before.layout()
        arrays = [aligned(layout.size) for _ in range(1 + len(optimizer.kept()))]
        for link, cut in zip(self.links, layout.cuts, strict=True):
            landing = [array[cut.start : cut.stop].data for array in arrays]
            link.ask([Header(wire.PULL, wire.WITH_SLOTS).pack()], landing)
        self._exchange(self.links)
        for link in self.links:
            self._checked(link)
        return arrays

    def store(self, values: Sequence[Any]) -> None:
        """The chief's way to set the parameters: float32 arrays as in ``declare``. Slots and counts stay."""
        flat = aligned(self.layout.size)
        for view, parameter, value in zip(self.layout.views(flat), self.layout.parameters, values, strict=True):
            view[...] = _floats(value, parameter).reshape(parameter.shape)
        told = self._wanted.told()
        for link, cut in zip(self.links, self.layout.cuts, strict=True):
            data = flat[cut.start : cut.stop]
            link.ask([wire.message(wire.DECLARE, told, data=data.nbytes), data])
        self._exchange(self.links)
        for link in self.links:
            self._checked(link)
        self._all({"ask": "store"})

    def state(self) -> dict[str, Floats]:
        """Values (key "") and each slot (by its Keras name: "momentum"), float32 (layout.size,), from all ps."""
        declared = Declaration(self.layout.parameters, {}, len(self.links))
        return dict(zip(["", *self.optimizer.kept()], self._fetch(declared, self.optimizer), strict=True))

    def _wait_for_chief(self, wanted: Declaration, limit: float) -> None:
        ours, since, told = wanted.fingerprint(), self.clock(), False
        while True:
            found = self._all({"ask": "layout"})
            if all(row["fingerprint"] == ours for row in found):
                self.layout_number = int(found[0]["number"])
                return
            if all(row["number"] >= self._declared for row in found) and not any(row["staged"] for row in found):
                self._compare(wanted)
            waited = self.clock() - since
            if waited > limit:
                raise RunFailed(
                    f"{self.who.task} waited {limit:.0f} s for the chief to declare the parameters",
                    at=str(self.links[0].place), try_="see the log of the chief",
                )  # fmt: skip
            if waited > NOTICE_AFTER and not told:
                told = True
                self.notice(f"{self.who.task} waits for the chief to declare the parameters, since {waited:.0f} s")
            time.sleep(0.02)

    def _compare(self, wanted: Declaration) -> None:
        chief = declaration(self._one(self.links[0], {"ask": "layout", "whole": True})["declaration"])
        lines = differences(wanted, chief)
        if lines:
            raise MusterError(
                f"{self.who.task} does not train the same model as the chief", at=self.who.task, because=lines,
                try_="run the same script everywhere, with the same seed for anything that decides the model's shape",
            )  # fmt: skip

    def _make_room(self) -> None:
        large = [
            link
            for link, cut in zip(self.links, self.layout.cuts, strict=True)
            if link.local and cut.size * 4 >= SHARE_FROM
        ]
        for fd in self._fds:
            os.close(fd)
        self._fds, self._shared = [], {}
        if large:
            self.gradient, self.values = (self._memory(name) for name in ("gradient", "values"))
        else:
            self.gradient, self.values = aligned(self.layout.size), aligned(self.layout.size)
        self.views, self.gradients = self.layout.views(self.values), self.layout.views(self.gradient)
        self._landing = [[self.values[cut.start : cut.stop].data] for cut in self.layout.cuts]
        self._own = [[self.gradient[cut.start : cut.stop].data] for cut in self.layout.cuts]
        self._scatter = [_scatter(self.layout, cut) for cut in self.layout.cuts]
        self._zeros = bytes(max([wire.HEADER.size, *(p.size * 4 for p in self.layout.parameters)]))
        self._clips = exchanges(self.optimizer, self.layout)
        for link in large:
            self._share(link)

    def _memory(self, name: str) -> Floats:
        """Memory without a name in any file system, which cannot be resized, so that a ps can trust its size."""
        fd = os.memfd_create(f"muster-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._fds.append(fd)
        os.ftruncate(fd, self.layout.size * 4)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return np.frombuffer(mmap.mmap(fd, self.layout.size * 4), np.float32)

    def _share(self, link: Link) -> None:
        if not self._one(link, {"ask": "share", "from": SHARE_FROM})["shared"]:
            return
        link.send_fds([wire.message(wire.ASK, {"ask": "shared"})], self._fds)
        link.ask([])
        self._exchange([link])
        self._checked(link)
        self._shared[link.place.index] = True

    # --- taking part

    def join(self) -> None:
        """Take part from now on (again, after ``turn``), and pull."""
        self.at = int(self._one(self.links[0], {"ask": "join", "at": None})["at"])
        for told in self._all({"ask": "join", "at": self.at}):
            self.at = max(self.at, int(told["at"]))
        self._joined = True
        self.pull()

    def turn(self, phase: str) -> None:
        """Tell every ps that nobody should wait for us: "validating" or "done" (out of data). ``join`` ends it."""
        self._joined = False
        self._all({"ask": "phase", "phase": phase})

    def close(self) -> None:
        for link in self.links:
            link.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    # --- steps

    def pull(self) -> Done:
        """Fresh values from every ps into ``values``. In sync they are those at the beginning of our next round."""
        header = Header(wire.PULL, layout=self.layout_number, round=self.at).pack()
        for link, landing in zip(self.links, self._landing, strict=True):
            link.ask([header], landing)
        self._exchange(self.links)
        return self._read()

    def step(self, gradient: Any = None, samples: float = 1.0, rate: float | None = None) -> Done:
        """Push a gradient and pull the values it leads to, in one round trip. In sync: a whole round.

        ``gradient``: None for what ``self.gradient`` holds; a float32 array of its layout; or a sequence with one entry
        per parameter: anything with a float32 buffer of its shape (sent from where it lies), or None for zeros. For a
        statistic (``trainable=False``) the entry is the value pulled minus the new value.
        ``samples`` is what the gradient is the mean over: its weight in a sync round. ``rate`` is the learning rate.
        """
        return self._push(gradient, samples, rate, wire.WITH_VALUES)

    def push(self, gradient: Any = None, samples: float = 1.0, rate: float | None = None) -> Done:
        """The same without pulling."""
        return self._push(gradient, samples, rate, 0)

    def _push(self, gradient: Any, samples: float, rate: float | None, flags: int) -> Done:
        rate = self.rate_set if self.rate_set is not None else rate
        if rate is None:
            raise Refused("A push needs a learning rate", try_="step(gradient, rate=0.01)")
        data = self._data(gradient)
        if self._clips and self.mode != "sync":
            flags |= wire.SCALED
            data = [
                [np.ascontiguousarray(part), *buffers] for part, buffers in zip(self._factors(data), data, strict=True)
            ]
        self.number += 1
        for k, link in enumerate(self.links):
            shared = wire.SHARED if self._shared.get(k) else 0
            buffers = self._shared_part(k, data[k], flags) if shared else data[k]
            size = sum(memoryview(buffer).nbytes for buffer in buffers)
            header = Header(
                wire.PUSH,
                flags | shared,
                self.layout_number,
                0,
                self.number,
                self.at,
                float(rate),
                float(samples),
                1.0,
                size,
            )
            link.ask([header.pack(), *buffers], self._landing[k])
        self._exchange(self.links)
        if self._clips and self.mode == "sync":
            self._second_phase(flags)
        return self._read()

    def _data(self, gradient: Any) -> list[list[Any]]:
        """The buffers of each slab's gradient."""
        if gradient is None:
            return self._own
        if isinstance(gradient, (list, tuple)):
            return self._scattered(gradient)
        flat = _buffer(gradient)
        if flat.size != self.layout.size:
            raise Refused(f"A flat gradient of {flat.size} floats", because=f"the layout has {self.layout.size}")
        return [[flat[cut.start : cut.stop].data] for cut in self.layout.cuts]

    def _scattered(self, gradient: Sequence[Any]) -> list[list[Any]]:
        if len(gradient) != len(self.layout.parameters):
            raise Refused(f"{len(gradient)} gradients for {len(self.layout.parameters)} parameters")
        zeros = memoryview(self._zeros)
        flat = [
            zeros if given is None else _floats(given, parameter).data.cast("B")
            for given, parameter in zip(gradient, self.layout.parameters, strict=True)
        ]
        out = []
        for rows in self._scatter:
            buffers: list[Any] = []
            for index, low, high, pad in rows:
                buffers.append(flat[index][: high - low] if gradient[index] is None else flat[index][low:high])
                if pad:
                    buffers.append(zeros[:pad])
            out.append(buffers)
        return out

    def _shared_part(self, k: int, buffers: list[Any], flags: int) -> list[Any]:
        """Put the gradient into the memory that the ps sees; what is left to send are the factors, if any."""
        head, body = (buffers[:1], buffers[1:]) if flags & wire.SCALED else ([], buffers)
        if body is not self._own[k] and not (len(body) == 1 and body[0] is self._own[k][0]):
            cut, at = self.layout.cuts[k], 0
            to = self.gradient[cut.start : cut.stop].data.cast("B")
            for buffer in body:
                view = memoryview(buffer).cast("B")
                to[at : at + view.nbytes] = view
                at += view.nbytes
        return head

    def _factors(self, data: list[list[Any]]) -> list[Doubles]:
        """In async each worker clips its own gradient by the norm over all ps."""
        sums = {}
        for k, (cut, buffers) in enumerate(zip(self.layout.cuts, data, strict=True)):
            whole = [np.frombuffer(buffer, np.float32) for buffer in buffers]
            flat = whole[0] if len(whole) == 1 else np.concatenate(whole) if whole else np.zeros(0, np.float32)
            sums[k] = np.array([self._square(flat, piece.start, piece.stop, piece.parameter) for piece in cut.pieces])
        found = factors(self.optimizer, self.layout, sums)
        return [found[k] for k in range(len(self.links))]

    def _square(self, flat: Floats, start: int, stop: int, parameter: int) -> float:
        part = flat[start:stop]
        return float(np.dot(part, part)) if self.layout.parameters[parameter].trainable else 0.0

    def _second_phase(self, flags: int) -> None:
        """Sync, clipped by a norm over several ps: each has told its sums of squares; we tell all of them the factors.

        A ps that did not tell sums has this round behind it, so somebody has told the factors to it, and to the others
        (or we are the one to do that, with the sums of all).
        """
        asked = [link for link in self.links if link.reply.header.flags & wire.SUMS]
        sums = {link.place.index: np.frombuffer(link.reply.sums, np.float64) for link in asked}
        found = factors(self.optimizer, self.layout, sums) if len(asked) == len(self.links) else {}
        for link in asked:
            part = found.get(link.place.index)
            data = [part] if part is not None else []
            size = part.nbytes if part is not None else 0
            header = Header(
                wire.NORMS, flags | (0 if size else wire.LATE), self.layout_number, number=self.number, data=size
            )
            link.ask([header.pack(), *data], self._landing[link.place.index])
        self._exchange(asked)

    def _read(self) -> Done:
        late = False
        for link in self.links:
            header = self._checked(link).reply.header
            late = late or bool(header.flags & wire.LATE)
            self.at = max(self.at, header.round)
        first = self.links[0].reply.header
        self.step_now, self.stopping = first.number, bool(first.flags & wire.STOP)
        self.rate_set = None if math.isnan(first.rate) else first.rate
        return Done(self.step_now, late, self.stopping)

    # --- ps 0 as the place of decisions

    def _board(self, ask: str, **told: Any) -> dict[str, Any]:
        return self._one(self.links[0], {"ask": ask, **told})

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
        return self._all({"ask": "stats"})


def _scatter(layout: Layout, cut: Cut) -> list[tuple[int, int, int, int]]:
    """Per piece: parameter, first and last byte of it in this slab, and bytes of zeros behind it."""
    if not cut.pieces:
        return []  # a model smaller than the ps are many
    ends = [piece.start for piece in cut.pieces[1:]] + [cut.size]
    return [
        (p.parameter, p.first * 4, (p.first + p.stop - p.start) * 4, (end - p.stop) * 4)
        for p, end in zip(cut.pieces, ends, strict=True)
    ]


def _buffer(given: Any) -> Floats:
    """``given`` as a flat float32 array, without a copy where it has such a buffer (a memoryview of a tensor has)."""
    try:
        array = np.asarray(memoryview(given))
    except (TypeError, BufferError):
        array = np.asarray(given)
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def _floats(given: Any, parameter: Parameter) -> Floats:
    flat = _buffer(given)
    if flat.size != parameter.size:
        raise Refused(f"{flat.size} floats for {parameter.name}", because=f"its shape is {parameter.shape}")
    return flat


def _plain(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer as JSON: a learning rate that is a schedule stays here, since numbers travel."""
    outer = ("learning_rate", "class_name", "module", "registered_name", "build_config")
    config = {k: v for k, v in dict(optimizer.get("config", optimizer)).items() if k not in outer}
    name = str(optimizer.get("class_name") or config.get("name") or "")
    return {"class_name": name, "config": config}
