"""What a request means, with peers that have a socket and no process behind it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from muster.errors import Refused
from muster.ps import wire
from muster.ps.peer import Peer
from muster.ps.server import NOTICE_AFTER, Rule, Server
from muster.ps.slabs import Declaration, Parameter
from muster.ps.wire import Header, WireError

TASKS = ("worker/0", "worker/1", "worker/2")
DECLARED = Declaration((Parameter("w", (40,)),), {"class_name": "SGD", "config": {}}, 1)


class Desk:
    """A server, and what it has sent to whom."""

    def __init__(self, **rule: Any) -> None:
        self.sent: dict[str, list[bytes]] = {}
        self.said: list[str] = []
        self.sockets: list[socket.socket] = []
        self.server = Server(0, Rule(workers=TASKS, **rule), self.send, self.said.append, free=lambda: 1 << 20)
        self.peers = {task: self.come(task) for task in TASKS}

    def send(self, peer: Peer, *buffers: Any) -> None:
        self.sent.setdefault(peer.task, []).append(b"".join(bytes(memoryview(buffer)) for buffer in buffers))

    def come(self, task: str, attempt: int = 1, life: bytes = b"") -> Peer:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        peer = Peer(ours, "here", True, 0.0)
        peer.task, peer.attempt, peer.life, peer.known = task, attempt, life, True
        self.server.enter(peer)
        return peer

    def ask(self, task: str, **told: Any) -> dict[str, Any]:
        peer = self.peers[task]
        peer.meta = bytearray(wire.message(wire.ASK, told)[64:])
        self.server.handle(peer, Header(wire.ASK))
        return wire.meta(self.sent[task].pop()[64:])

    def declare(self) -> None:
        meta = wire.message(wire.DECLARE, DECLARED.told())[64:]
        header = Header(wire.DECLARE, data=48 * 4)
        for view in self.server.room(self.peers[TASKS[0]], header, meta):
            view.cast("B")[:] = bytes(view.nbytes)
        self.server.handle(self.peers[TASKS[0]], header)
        self.ask(TASKS[0], ask="commit", fingerprint=DECLARED.fingerprint())
        for task in TASKS:
            self.ask(task, ask="join", at=None)
        self.sent.clear()

    def push(
        self, task: str, number: int, at: int = 0, value: float = 1.0, weight: float = 1.0, flags: int = 1
    ) -> None:
        size = 48 * 4
        header = Header(wire.PUSH, flags, self.server.number, 0, number, at, 1.0, weight, 1.0, size)
        (view,) = self.server.room(self.peers[task], header, b"")
        view.cast("B")[:] = np.full(48, value, np.float32).tobytes()
        self.server.handle(self.peers[task], header)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(mode="sync")
    made.declare()
    yield made
    for sock in made.sockets:
        sock.close()


def test_a_round_is_answered_to_all_with_the_same_values(desk: Desk) -> None:
    for task, value in zip(TASKS, (1.0, 2.0, 6.0), strict=True):
        assert not desk.sent
        desk.push(task, 1, value=value)
    assert len({desk.sent[task][0] for task in TASKS}) == 1
    assert np.frombuffer(desk.sent[TASKS[0]][0][64:], np.float32)[0] == -3


@pytest.mark.parametrize(("mode", "arrays"), [("async", 1), ("sync", 3)])
def test_it_has_as_many_arrays_as_gradients_are_under_way(mode: str, arrays: int) -> None:
    desk = Desk(mode=mode)
    desk.declare()
    for number in (1, 2):
        for task in TASKS:
            desk.push(task, number, at=number - 1, value=float(number))
    assert len({array.ctypes.data for array in desk.server.rooms}) == len(desk.server.rooms) == arrays
    assert desk.server.slab.values[0] == {"async": -3 * (1 + 2), "sync": -(1 + 2)}[mode]


def test_before_the_slab_changes_those_who_still_send_it_are_told() -> None:
    desk = Desk()
    desk.declare()
    seen: list[float] = []
    desk.server.changing = lambda: seen.append(float(desk.server.slab.values[0]))
    desk.push(TASKS[0], 1)
    desk.push(TASKS[1], 1)
    desk.ask(TASKS[0], ask="anew")
    assert seen == [0.0, -1.0, -2.0]


def test_what_weighs_nothing_takes_part_and_changes_nothing(desk: Desk) -> None:
    """float16 that overflowed: one process would skip the step, momentum and count of steps included."""
    for task, weight in zip(TASKS, (0.0, 2.0, 0.0), strict=True):
        desk.push(task, 1, value=3.0, weight=weight)
    assert desk.server.slab.values[0] == -3 and desk.server.samples == 2
    for task in TASKS:
        desk.push(task, 2, at=1, value=float("nan"), weight=0.0)
    assert desk.server.slab.values[0] == -3 and desk.server.slab.steps == 1
    assert desk.server.updates.version == 2 and len(desk.sent[TASKS[2]]) == 2


def test_who_pushes_and_does_not_pull_gets_stale() -> None:
    desk = Desk(mode="async")
    desk.declare()
    for number in (1, 2):
        desk.push(TASKS[0], number, flags=0)
        desk.push(TASKS[1], number)
    told = {task: member.told() for task, member in desk.server.updates.members.items()}
    assert (told[TASKS[0]]["staleness_max"], told[TASKS[1]]["staleness_max"]) == (2, 1)


def test_it_says_once_who_waits_for_whom(desk: Desk) -> None:
    desk.push(TASKS[0], 1)
    for now in (1.0, 2.0, 1.0 + NOTICE_AFTER, 9.0):
        desk.server.now = now
        desk.server.tick()
    assert desk.said == ["worker/0 wait for worker/1, worker/2, since 5 s (ps/0)"]


def test_a_worker_behind_a_broken_network_has_a_moment_to_come_back(desk: Desk) -> None:
    desk.push(TASKS[0], 1)
    desk.push(TASKS[1], 1)
    desk.server.parted(desk.peers[TASKS[2]], grace=1.0)
    desk.server.now = 0.5
    desk.server.tick()
    assert not desk.sent
    desk.server.now = 1.5
    desk.server.tick()
    assert set(desk.sent) == {TASKS[0], TASKS[1]}


def test_a_second_process_of_a_task_is_refused_and_the_same_one_may_come_back(desk: Desk) -> None:
    with pytest.raises(Refused, match="already connected"):
        desk.come(TASKS[1], life=b"other")
    desk.come(TASKS[1], life=b"")


def test_a_new_incarnation_returns_the_chunk_of_the_old_one_and_a_reconnection_does_not(desk: Desk) -> None:
    lend = {"ask": "lend", "epoch": "e", "chunks": 2, "seed": None, "finished": None}
    assert desk.ask(TASKS[0], **lend)["chunk"] == 0
    desk.come(TASKS[0])
    assert desk.ask(TASKS[1], **lend)["chunk"] == 1
    desk.come(TASKS[0], attempt=2)
    assert desk.ask(TASKS[1], **{**lend, "finished": 1})["chunk"] == 0


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (Header(wire.PUSH, layout=9, data=192), "layout 9, where 1 is in use"),
        (Header(wire.PUSH, wire.SHARED, 1), "none is shared"),
        (Header(wire.DECLARE, data=1 << 40), "a declaration that cannot be"),
    ],
)
def test_data_that_is_not_due_has_no_room(desk: Desk, header: Header, says: str) -> None:
    with pytest.raises(WireError, match=says):
        desk.server.room(desk.peers[TASKS[0]], header, b"{}")


def test_a_slab_larger_than_the_memory_is_refused_before_it_is_made(desk: Desk) -> None:
    large = Declaration((Parameter("w", (1 << 30,)),), {"class_name": "Adam", "config": {}}, 1)
    header = Header(wire.DECLARE, data=4 << 30)
    with pytest.raises(WireError, match="a slab of 12288 MiB, where 1 MiB of memory are free"):
        desk.server.room(desk.peers[TASKS[0]], header, wire.message(wire.DECLARE, large.told())[64:])


def test_values_that_came_in_half_are_not_there_to_be_committed() -> None:
    """Its chief died while it sent them; its successor would else go on with zeros."""
    desk = Desk(mode="sync")
    meta = wire.message(wire.DECLARE, DECLARED.told())[64:]
    desk.server.room(desk.peers[TASKS[0]], Header(wire.DECLARE, data=48 * 4), meta)
    desk.server.parted(desk.peers[TASKS[0]], grace=0.0)
    assert desk.ask(TASKS[1], ask="layout")["staged"] == ""
    with pytest.raises(Refused, match="was not declared here"):
        desk.server.commit(desk.peers[TASKS[1]], {"fingerprint": DECLARED.fingerprint()})


def test_who_waits_when_a_new_layout_comes_is_told(desk: Desk) -> None:
    desk.push(TASKS[1], 1)
    meta = wire.message(wire.DECLARE, DECLARED.told())[64:]
    header = Header(wire.DECLARE, data=48 * 4)
    desk.server.room(desk.peers[TASKS[0]], header, meta)
    desk.server.handle(desk.peers[TASKS[0]], header)
    desk.ask(TASKS[0], ask="commit", fingerprint=DECLARED.fingerprint())
    assert b"a new layout has been declared" in desk.sent[TASKS[1]][0]
    assert desk.server.number == 2


SENSELESS = [
    {"ask": "eval"}, {"ask": "join"}, {"ask": "phase", "phase": "x"}, {"ask": ["stats"]}, {"ask": "join", "at": -1},
    {"ask": "join", "at": float("inf")}, {"ask": "join", "at": 1 << 62},
]  # fmt: skip


@pytest.mark.parametrize("told", SENSELESS)
def test_questions_without_sense(desk: Desk, told: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        desk.ask(TASKS[0], **told)


def test_a_round_that_no_header_could_tell_ends_the_connection_not_the_ps(desk: Desk) -> None:
    with pytest.raises(WireError):
        desk.push(TASKS[0], 1, at=(1 << 64) - 1)


def test_a_push_that_cannot_be_is_refused(desk: Desk) -> None:
    for rate, weight in ((float("nan"), 1.0), (0.1, -1.0), (0.1, float("inf"))):
        header = Header(wire.PUSH, wire.WITH_VALUES, 1, number=1, rate=rate, weight=weight, data=192)
        desk.server.room(desk.peers[TASKS[0]], header, b"")
        desk.server.handle(desk.peers[TASKS[0]], header)
        assert wire.parse(desk.sent[TASKS[0]].pop()).kind == wire.REFUSAL
    assert desk.server.updates.members[TASKS[0]].push == 0
