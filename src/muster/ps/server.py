"""What a request means: a ps without its sockets.

``Server`` holds what was declared, the rule of the mode, and on ps 0 the board. The loop gives it whole messages of
peers that have proved who they are; it answers by putting views into their outboxes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from muster.errors import MusterError, Refused
from muster.ps import wire
from muster.ps.board import NOTE_BYTES, Board
from muster.ps.layers import Layers, available
from muster.ps.optimizers import exchanges
from muster.ps.peer import Peer, Shared
from muster.ps.slab import Slab
from muster.ps.slabs import Doubles, Floats, aligned
from muster.ps.updates import Answer, Apply, Effect, Forget, Phase, Sums, Updates, updates
from muster.ps.wire import Header, WireError

ROUNDS = 1 << 62  # no worker comes this far, and what comes after it still fits into a header
NOTICE_AFTER = 5.0  # seconds of waiting after which the ps says who waits for whom


@dataclass(frozen=True)
class Rule:
    """The part of the run's settings that a ps needs."""

    mode: str = "async"
    spare: int = 0
    max_staleness: int | None = None
    workers: tuple[str, ...] = ()  # every task that may connect


@dataclass
class Gradient:
    """``lent``: the array is one of the ps' own, and is free again once the gradient was applied or dropped."""

    array: Floats
    weight: float
    rate: float
    scales: Doubles | None
    lent: bool


@dataclass
class Server:
    """``index`` is the number of this ps; ``send`` puts buffers on the way to a peer; ``say`` reaches the screen.

    ``changing`` is called before an array changes that may be on its way.
    """

    index: int
    rule: Rule
    send: Callable[..., None]
    say: Callable[[str], None] = print
    free: Callable[[], int] = available
    now: float = 0.0  # set by the loop
    peers: dict[str, Peer] = field(default_factory=dict)
    board: Board = field(default_factory=Board)
    samples: float = 0.0  # in all gradients that were applied
    changing: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.layers = Layers(self.index, self.free)
        self.updates: Updates = self._rule(exchange=False)
        self.gradients: dict[str, Gradient] = {}
        self.rooms: list[Floats] = []  # free arrays of the slab's size, the one that was used last at the end
        self.requests: dict[str, Header] = {}
        self.sums: tuple[int, Doubles] = (-1, np.zeros(0))
        self.waited = (0.0, frozenset[str](), frozenset[str](), False)
        self.lost: dict[str, float] = {}
        self.kinds: dict[int, Callable[[Peer, Header], None]] = {
            wire.DECLARE: self.declare, wire.PULL: self.pull, wire.PUSH: self.push,
            wire.NORMS: self.norms, wire.ASK: self.ask,
        }  # fmt: skip
        self.questions: dict[str, Callable[[Peer, Mapping[str, Any]], dict[str, Any]]] = {
            "layout": self.tell_layout, "commit": self.commit, "join": self.join, "phase": self.turn,
            "share": self.share, "shared": self.shared, "lend": self.lend, "post": self.post, "read": self.read,
            "rate": self.set_rate, "stop": self.set_stop, "stats": self.stats, "store": self.store,
            "keep": self.keep, "anew": self.anew,
        }  # fmt: skip

    def _rule(self, exchange: bool) -> Updates:
        rule = self.rule
        return updates(rule.mode, len(rule.workers), rule.spare, rule.max_staleness, exchange)

    @property
    def number(self) -> int:
        """Of the layout; 0: nothing is declared."""
        return self.layers.number

    @property
    def slab(self) -> Slab:
        return self.layers.slab

    # --- connections

    def enter(self, peer: Peer) -> dict[str, Any]:
        """A task has proved who it is. Raises Refused where that is somebody who may not take part."""
        other = self.peers.get(peer.task)
        if other is not None and other.attempt == peer.attempt and other.life != peer.life:
            raise Refused(
                f"{peer.task} is already connected", at=other.source,
                because=f"two processes say that they are {peer.task}, attempt {peer.attempt}",
                try_="end the one that was started by hand",
            )  # fmt: skip
        before = self.updates.members.get(peer.task)
        again = before is not None and before.attempt < peer.attempt
        effects = self.updates.enter(peer.task, peer.attempt)
        if again:
            self.board.gone(peer.task)  # what its dead incarnation worked on goes back
        self.peers[peer.task] = peer
        self.lost.pop(peer.task, None)
        self.carry_out(effects)
        told = {"push": self.updates.members[peer.task].push, "layout": self.number}
        return {"ps": f"ps/{self.index}", "mode": self.rule.mode, "version": self.updates.version, **told}

    def parted(self, peer: Peer, grace: float) -> None:
        """Its connection has ended. It has ``grace`` seconds to come back, where a network may have been the cause."""
        if self.peers.get(peer.task) is not peer:
            return
        del self.peers[peer.task]
        if grace:
            self.lost[peer.task] = self.now + grace
        else:
            self._gone(peer.task)

    def _gone(self, task: str) -> None:
        self.lost.pop(task, None)
        self.board.gone(task)
        self.carry_out(self.updates.turn(task, Phase.GONE))

    def tick(self) -> None:
        for task in [task for task, deadline in self.lost.items() if deadline <= self.now]:
            self._gone(task)
        waiting, owing = (frozenset(group) for group in self.updates.waits())
        since, before, missed, told = self.waited
        if not waiting or (waiting, owing) != (before, missed):
            self.waited = (self.now, waiting, owing, False)
        elif not told and owing and self.now - since >= NOTICE_AFTER:
            self.waited = (since, waiting, owing, True)
            self.say(f"{_names(waiting)} wait for {_names(owing)}, since {self.now - since:.0f} s (ps/{self.index})")

    # --- messages

    def room(self, peer: Peer, header: Header, meta: bytes) -> list[memoryview]:
        """Where the data of a message goes. Raises WireError where the length is not the one that is due."""
        if header.kind == wire.DECLARE:
            return self.layers.stage(header, meta)
        if header.kind == wire.PUSH:
            return self._room_to_push(peer, header)
        if header.kind == wire.NORMS:
            peer.scales = self._scales(peer)
            return [peer.scales.data] if header.data else []
        return []

    def _room_to_push(self, peer: Peer, header: Header) -> list[memoryview]:
        if header.layout != self.number or not self.number:
            raise WireError(f"a gradient for layout {header.layout}, where {self.number} is in use")
        views = [self._scales(peer).data] if header.flags & wire.SCALED else []
        if not header.flags & wire.SHARED:
            if peer.gradient is None or len(peer.gradient) != self.slab.cut.size:
                # As many as are under way at one moment, whatever the number of workers; the warmest one first.
                peer.gradient = self.rooms.pop() if self.rooms else aligned(self.slab.cut.size)
            views.append(peer.gradient.data)
        elif peer.shared is None:
            raise WireError("a gradient in shared memory where none is shared")
        return views

    def _scales(self, peer: Peer) -> Doubles:
        pieces = len(self.slab.cut.pieces)
        if peer.scales is None or len(peer.scales) != pieces:
            peer.scales = np.ones(pieces)
        return peer.scales

    def handle(self, peer: Peer, header: Header) -> None:
        """One whole message. Raises WireError where it makes no sense; answers with REFUSAL where it asks in vain."""
        handler = self.kinds.get(header.kind)
        if handler is None:
            raise WireError(f"a message of kind {header.kind} from a worker")
        if header.round >= ROUNDS:
            raise WireError(f"round {header.round}")
        peer.busy = True
        try:
            handler(peer, header)
        except MusterError as error:
            peer.busy = False
            self.send(
                peer, wire.message(wire.REFUSAL, {"why": error.what, "because": error.because, "try": error.try_})
            )

    def pull(self, peer: Peer, header: Header) -> None:
        slab = self.slab
        if header.flags & wire.KEPT:
            kept = self.layers.kept()
            self._reply(peer, Header(wire.ANSWER, layout=self.number, data=kept.nbytes).pack(), kept)
            return
        if header.flags & wire.WITH_SLOTS:
            data = [slab.values, *slab.slots]
            fields = {"number": self.updates.version, "layout": self.number, "data": sum(a.nbytes for a in data)}
            self._reply(peer, wire.message(wire.ANSWER, {"steps": slab.steps}, flags=wire.WITH_SLOTS, **fields), *data)
            return
        self.requests[peer.task] = header._replace(flags=header.flags | wire.WITH_VALUES)
        self.carry_out(self.updates.pull(peer.task, header.round))

    def push(self, peer: Peer, header: Header) -> None:
        if not (math.isfinite(header.rate) and 0 <= header.weight < math.inf):
            raise Refused(f"A push with learning rate {header.rate} and weight {header.weight}")
        self.requests[peer.task] = header
        if header.number > self.updates.members[peer.task].push:
            scales = peer.scales.copy() if header.flags & wire.SCALED and peer.scales is not None else None
            shared = peer.shared.gradient if header.flags & wire.SHARED and peer.shared else None
            array, peer.gradient = (shared, peer.gradient) if shared is not None else (peer.gradient, None)
            assert array is not None, "room() has made it"
            self.gradients[peer.task] = Gradient(array, header.weight, header.rate, scales, shared is None)
        self.carry_out(self.updates.push(peer.task, header.number, header.round))

    def norms(self, peer: Peer, header: Header) -> None:
        self.requests[peer.task] = header
        unknown = header.flags & wire.LATE
        if unknown and self.updates.closes(header.round):
            raise Refused(f"Round {header.round} waits for factors, and {peer.task} does not know them")
        self.carry_out(self.updates.factors(peer.task, header.round), None if unknown else peer.scales)

    def carry_out(self, effects: Sequence[Effect], scales: Doubles | None = None) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self._apply(effect.tasks, scales)
            elif isinstance(effect, Answer):
                self._answer(effect.task, effect.late)
            elif isinstance(effect, Sums):
                self._tell_sums(effect.task)
            elif isinstance(effect, Forget):
                self._free(self.gradients.pop(effect.task, None))

    def _apply(self, tasks: tuple[str, ...], scales: Doubles | None) -> None:
        taken = [self.gradients.pop(task) for task in tasks]
        self._update(_weighing(taken), scales)
        for gradient in taken:
            self._free(gradient)

    def _free(self, gradient: Gradient | None) -> None:
        if gradient is not None and gradient.lent:
            self.rooms.append(gradient.array)

    def _update(self, parts: list[Gradient], scales: Doubles | None) -> None:
        if not parts:
            return
        together = self.rule.mode == "sync"
        share = 1.0 if together else 1.0 / max(1, len(self.updates.active()))
        chosen = scales if scales is not None else parts[0].scales
        self.changing()
        self.slab.apply([(part.array, part.weight) for part in parts], parts[0].rate, chosen, share)
        self.samples += sum(part.weight for part in parts)

    def _answer(self, task: str, late: bool) -> None:
        peer, request = self.peers.get(task), self.requests.pop(task, None)
        if peer is None or request is None or not peer.busy:
            return  # it is gone; what it asked for is asked again when it is back
        flags = (wire.STOP if self.board.stop else 0) | (wire.LATE if late else 0)
        data: list[Floats] = []
        if request.flags & wire.WITH_VALUES:
            self.updates.sent(task)
            if peer.shared is not None:
                np.copyto(peer.shared.values, self.slab.values)
                flags |= wire.SHARED
            else:
                data = [self.slab.values]
        header = Header(
            wire.ANSWER, flags, self.number, 0, self.updates.version, self.updates.next_for(task),
            wire.NAN if self.board.rate is None else self.board.rate, data=sum(array.nbytes for array in data),
        )  # fmt: skip
        self._reply(peer, header.pack(), *data)

    def _tell_sums(self, task: str) -> None:
        closed, now = self.updates.closed, self.updates.round
        if closed and self.sums[0] != now:
            parts = _weighing([self.gradients[t] for t in closed])
            self.sums = (now, self.slab.sums([(part.array, part.weight) for part in parts]))
        peer = self.peers.get(task)
        if peer is not None and peer.busy:
            data = self.sums[1]
            header = Header(wire.ANSWER, wire.SUMS, self.number, number=self.updates.version, data=data.nbytes)
            self._reply(peer, header.pack(), data, keep=True)

    def _reply(self, peer: Peer, *buffers: Any, keep: bool = False) -> None:
        peer.busy = False
        if not keep:
            self.requests.pop(peer.task, None)
        self.send(peer, *buffers)

    # --- declaring

    def declare(self, peer: Peer, header: Header) -> None:
        self.layers.arrived()
        self._reply(peer, wire.message(wire.ANSWER, {}))

    def tell_layout(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.layers.told(bool(told.get("whole"))), "version": self.updates.version}

    def commit(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self._restart_updates(self.layers.commit(told.get("fingerprint")).slab)
        for other in self.peers.values():
            other.shared = None
        return {"number": self.number}

    def store(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.changing()
        self.layers.store()
        return {}

    def keep(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.layers.keep(str(told["label"]))
        return {}

    def anew(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.changing()
        self.slab.anew()
        return {}

    def _restart_updates(self, slab: Slab) -> None:
        """The rule begins anew with the layout; the count of updates, and who has pushed what, go on."""
        rule = self._rule(exchanges(slab.optimizer, slab.layout))
        rule.members, rule.version = self.updates.members, self.updates.version
        rule.clear()
        self.updates = rule
        self.gradients.clear()
        self.rooms.clear()
        self.sums = (-1, np.zeros(0))
        for task, peer in self.peers.items():
            if peer.busy and self.requests.pop(task, None) is not None:
                peer.busy = False
                self.send(peer, wire.message(wire.REFUSAL, {"why": "a new layout has been declared"}))

    # --- questions

    def ask(self, peer: Peer, header: Header) -> None:
        told = peer.told()
        question = self.questions.get(str(told.get("ask")))
        if question is None:
            raise WireError(f"no such question: {told.get('ask')!r}")
        try:
            answer = question(peer, told)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"a question without sense: {error!r}") from None
        self._reply(peer, wire.message(wire.ANSWER, answer))

    def join(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        given = None if told["at"] is None else int(told["at"])
        if given is not None and not 0 <= given < ROUNDS:
            raise ValueError(given)
        at, effects = self.updates.join(peer.task, given)
        self.carry_out(effects)
        return {"at": at}

    def turn(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.carry_out(self.updates.turn(peer.task, Phase(told["phase"])))
        return {}

    def share(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        if not peer.local or self.slab.cut.size * 4 < int(told["from"]):
            return {"shared": False}
        peer.fds = []
        return {"shared": True}

    def shared(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        fds, peer.fds = peer.fds or [], None
        try:
            if len(fds) != 2:
                raise WireError(f"{len(fds)} file descriptors where 2 were due")
            peer.shared = Shared(fds[0], fds[1], self.slab.cut)
        except OSError as error:
            raise WireError(f"shared memory that cannot be mapped: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)
        return {}

    def lend(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        finished = None if told["finished"] is None else int(told["finished"])
        lease = self.board.lend(peer.task, str(told["epoch"]), int(told["chunks"]), told["seed"], finished)
        return lease._asdict()

    def post(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        if len(peer.meta) > NOTE_BYTES:
            raise Refused(f"A note of {len(peer.meta)} bytes", because=f"the limit is {NOTE_BYTES}")
        self.board.post(str(told["key"]), peer.task, told["value"])
        return {}

    def read(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        return {"values": self.board.read(str(told["key"]))}

    def set_rate(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.board.rate = None if told["rate"] is None else float(told["rate"])
        return {}

    def set_stop(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        self.board.stop = str(told["why"])
        return {}

    def stats(self, peer: Peer, told: Mapping[str, Any]) -> dict[str, Any]:
        members = {task: member.told() for task, member in self.updates.members.items()}
        waiting, owing = self.updates.waits()
        return {
            "version": self.updates.version, "stop": self.board.stop, "workers": members,
            "waiting": sorted(waiting), "owing": sorted(owing), "samples": self.samples,
        }  # fmt: skip


def _weighing(parts: list[Gradient]) -> list[Gradient]:
    """Without those that only took part: a gradient that overflowed weighs nothing and changes nothing."""
    return [part for part in parts if part.weight]


def _names(tasks: frozenset[str]) -> str:
    return ", ".join(sorted(tasks))
