"""Listener and prober on loopback: what they measure there, and what strangers get."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from muster.check import pairs

TOKEN = "ab" * 16


@pytest.fixture
def listener() -> Iterator[pairs.Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    listening = pairs.Listener(TOKEN, [("127.0.0.1", port)])
    assert listening.errors == {}
    yield listening
    listening.close()


def port_of(listener: pairs.Listener) -> int:
    return next(iter(listener.ports))


def test_reached_refused_and_nameless(listener: pairs.Listener) -> None:
    port = port_of(listener)
    targets: list[dict[str, Any]] = [
        {"id": "good", "address": "127.0.0.1", "port": port},
        {"id": "closed", "address": "127.0.0.2", "port": port},
        {"id": "nameless", "address": "no such name", "port": port},
    ]
    told = pairs.reach(targets, TOKEN, 2.0)
    assert {name: answer["outcome"] for name, answer in told.items()} == {
        "good": "ok",
        "closed": "refused",
        "nameless": "no_name",
    }


def test_a_stranger_behind_the_port_is_not_taken_for_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert pairs.knock("127.0.0.1", server.getsockname()[1], TOKEN, 0.1)["outcome"] == "timeout"


def test_a_stranger_that_talks_is_named_as_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"220 mail.example.com ready to serve you\r\n")

        threading.Thread(target=talk, daemon=True).start()
        assert pairs.knock("127.0.0.1", server.getsockname()[1], TOKEN, 2.0)["outcome"] == "wrong"


def test_strangers_get_nothing(listener: pairs.Listener) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n".ljust(96), os.urandom(96), f"{'0' * 32} echo 0".encode().ljust(96)):
        with socket.create_connection(("127.0.0.1", port_of(listener)), 2) as stranger:
            stranger.settimeout(2)
            stranger.sendall(said)
            assert stranger.recv(100) == b""
    assert pairs.knock("127.0.0.1", port_of(listener), TOKEN, 1.0)["outcome"] == "ok"


def test_a_crowd_of_strangers_is_turned_away(listener: pairs.Listener) -> None:
    address = ("127.0.0.1", port_of(listener))
    crowd = [socket.create_connection(address, 2) for _ in range(pairs.GUESTS + 20)]
    crowd[-1].settimeout(2)
    assert crowd[-1].recv(1) == b"", "hung up on at once"
    for stranger in crowd:
        stranger.close()
    until = time.monotonic() + 5
    while pairs.knock(*address, TOKEN, 1.0)["outcome"] != "ok":
        assert time.monotonic() < until


def test_measure_counts_pings_segments_and_bits(listener: pairs.Listener) -> None:
    began = time.monotonic()
    told = pairs.measure({"address": "127.0.0.1", "port": port_of(listener)}, TOKEN, 8.0)
    assert time.monotonic() - began < 5
    assert (
        told["rtt_ms"]["pings"] >= 200 and 0 < told["rtt_ms"]["min"] <= told["rtt_ms"]["p50"] <= told["rtt_ms"]["p99"]
    )
    for way in ("forth", "back"):
        assert told["loss"][way]["sent"] >= 1000 and told["loss"][way]["lost"] <= 2
        assert told["mbit"][way] > 100


def test_measuring_nobody_is_an_error_and_not_a_wait() -> None:
    assert pairs.measure({"address": "127.0.0.1", "port": 1}, TOKEN, 5.0) == {"error": "refused"}


def test_a_lane_that_stands_still_is_taken_out_in_time() -> None:
    near, far = socket.socketpair()
    with near, far:
        lanes, began = [near], time.monotonic()
        trips = pairs.volley(lanes, 1, 10, time.monotonic() - pairs.GRACE + 0.05)
        assert time.monotonic() - began < 1
        assert lanes == [] and len(trips) == 1


def test_a_taken_port_is_an_error_of_the_listener(listener: pairs.Listener) -> None:
    second = pairs.Listener(TOKEN, [("127.0.0.1", port_of(listener)), ("no such name", 1)])
    assert second.errors[str(port_of(listener))] == "EADDRINUSE"
    assert "1" in second.errors
    second.close()


def test_a_spare_port_is_reachable_too(listener: pairs.Listener) -> None:
    spare = listener.spare("127.0.0.1")
    assert pairs.knock(spare["address"], spare["port"], TOKEN, 1.0)["outcome"] == "ok"


def test_a_closed_listener_listens_no_more(listener: pairs.Listener) -> None:
    listener.close()
    assert pairs.knock("127.0.0.1", port_of(listener), TOKEN, 1.0)["outcome"] == "refused"


def test_addresses_as_the_kernel_writes_them() -> None:
    assert pairs._address("0100007F:08AE") == "127.0.0.1"
    assert pairs._address("0000000000000000FFFF00000B004D0A:08AE") == "10.77.0.11"
    assert pairs._address("00000000000000000000000001000000:08AE") == "::1"


def test_a_receiver_that_slept_through_its_time_measures_later() -> None:
    """Else a busy host would make a link of 0 Mbit/s."""
    near, far = socket.socketpair()
    moments = iter([0.0, 0.4, 0.45, 0.5, 0.61])  # asleep until 0.4 s, when it should have been done at 0.3 s
    with near, far:
        for _ in range(5):
            far.sendall(bytes(1000))
        room = iter(range(5))

        class Slowly:
            def recv_into(self, into: bytearray) -> int:
                next(room)
                return near.recv_into(into, 1000)

        bits = pairs._receive(Slowly(), 0.3, lambda: next(moments))  # type: ignore[arg-type]
    assert bits == pytest.approx(3 * 8000 / 0.21)
