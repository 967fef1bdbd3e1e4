from __future__ import annotations

import os
import random

import pytest

from muster.ps import wire
from muster.ps.wire import Header, WireError

KEY = wire.task_key(b"secret", "worker/1")


def test_the_header_has_64_bytes_and_comes_back() -> None:
    header = Header(wire.PUSH, wire.WITH_VALUES, 3, 0, 1 << 60, 7, 0.5, 100.0, 1.0, 1 << 40)
    assert len(header.pack()) == 64 and wire.parse(header.pack()) == header


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(64), "an HTTP request"),
        (b"\x16\x03\x01\x02\x00".ljust(64, b"\1"), "a TLS hello"),
        (b"\x80\x04\x95".ljust(64, b"\0"), "it begins with 80 04 95"),
        (Header(99).pack(), "no such kind"),
    ],
)
def test_what_is_not_ours_is_named(raw: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        wire.parse(raw)


def test_random_bytes_are_never_a_message() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        with pytest.raises(WireError):
            wire.parse(chance.randbytes(64))


@pytest.mark.parametrize("raw", [b"[1]", b"\xff\xfe", b"{", b"[" * 100_000, b"\x80\x04K\x01."])
def test_meta_is_a_json_object_or_an_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        wire.meta(raw)


def test_a_hello_tells_task_attempt_and_life() -> None:
    life = os.urandom(16)
    assert wire.read_hello(wire.hello("worker/1", 3, life, os.urandom(32))) == ("worker/1", 3, life)
    with pytest.raises(WireError, match="32 bytes"):
        wire.hello("w" * 33, 1, life, os.urandom(32))


def test_a_proof_depends_on_everything_that_was_said() -> None:
    said, nonce = wire.hello("worker/1", 1, bytes(16), bytes(32)), bytes(32)
    right = wire.proof(KEY, "worker", said, nonce, "ps/0")
    wrong = [
        wire.proof(KEY, "ps", said, nonce, "ps/0"),
        wire.proof(KEY, "worker", said, nonce, "ps/1"),
        wire.proof(KEY, "worker", said, b"\1" * 32, "ps/0"),
        wire.proof(KEY, "worker", wire.hello("worker/1", 2, bytes(16), bytes(32)), nonce, "ps/0"),
        wire.proof(wire.task_key(b"secret", "worker/2"), "worker", said, nonce, "ps/0"),
        wire.proof(wire.task_key(b"other", "worker/1"), "worker", said, nonce, "ps/0"),
    ]
    assert wire.same(right, wire.proof(KEY, "worker", said, nonce, "ps/0"))
    assert not any(wire.same(right, other) for other in wrong)
    assert len({right, *wrong}) == 7


class Trickle(wire.Stream):
    """A socket that takes seven bytes at a time, and none every third time."""

    def __init__(self) -> None:
        self.taken, self.calls = b"", 0

    def send(self, views: list[memoryview]) -> int:
        self.calls += 1
        if self.calls % 3 == 0:
            return 0
        some = b"".join(views)[:7]
        self.taken += some
        return len(some)


def test_an_outbox_sends_everything_in_order_however_little_is_taken() -> None:
    outbox, socket = wire.Outbox(), Trickle()
    data = bytearray(range(50))
    outbox.add(b"header", b"", data)
    flushes = 0
    while not outbox.flush(socket):
        outbox.own()
        data[:] = bytes(50)  # what is left was copied, so this changes nothing
        flushes += 1
    assert socket.taken == b"header" + bytes(range(50)) and flushes > 2
