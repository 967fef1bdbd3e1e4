"""What a stranger, a broken program or a second copy of a worker can do to a parameter server: nothing."""

from __future__ import annotations

import os
import pickle
import random
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from ps_fleet import Fleet

from muster.errors import RunFailed
from muster.ps import wire
from muster.ps.client import Client
from muster.ps.link import Identity, Place
from muster.ps.loop import STRANGERS, Loop, listen_at, listen_local, remove_local, socket_path
from muster.ps.server import Rule, Server
from muster.ps.slabs import Parameter
from muster.ps.wire import Header

ROWS = [Parameter("w", (784, 10)), Parameter("b", (10,))]
MB = 1 << 20


class Besieged:
    """A ps with a port, a worker that trains over it, and how much memory it had before."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.worker = fleet.client(0)
        self.worker.declare(ROWS, {"class_name": "SGD"}, [np.zeros(p.shape, np.float32) for p in ROWS])
        self.before = fleet.rss(0)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.fleet.ports[0]), timeout=5)

    def stands(self) -> None:
        """It lives, is no larger, and serves both who is connected and who comes now, each within a second."""
        assert self.fleet.processes[0].poll() is None
        assert self.fleet.rss(0) < self.before + 50 * MB
        began = time.perf_counter()
        step = self.worker.step(rate=0.1).step
        assert time.perf_counter() - began < 1
        began = time.perf_counter()
        other = self.fleet.client(1, attempt=step)
        other.declare(ROWS, {"class_name": "SGD"})
        other.step(rate=0.1)
        assert time.perf_counter() - began < 1
        other.close()


@pytest.fixture
def besieged() -> Iterator[Besieged]:
    with Fleet(ps=1, workers=3, tcp=True) as fleet:
        yield Besieged(fleet)


def refused(sock: socket.socket) -> bool:
    """Whether the ps hangs up, without having said a word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def hello(size: int = wire.HELLO_BODY.size, meta: int = 0, kind: int = wire.HELLO) -> bytes:
    return Header(kind, meta=meta, data=size).pack()


GARBAGE = {
    "random": random.Random(5).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 64,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    "pickle": pickle.dumps({"a": [1] * 100}, protocol=4),
    "2 GiB of data": hello(1 << 31) + bytes(1000),
    "2 GiB of data in a push": hello(1 << 31, kind=wire.PUSH) + bytes(1000),
    "4 GiB of JSON": hello(meta=(1 << 32) - 1) + bytes(1000),
    "16 EiB": hello((1 << 64) - 1, kind=wire.DECLARE) + bytes(1000),
    "a proof without a hello": hello(32, kind=wire.PROOF) + bytes(32),
    "a question without a hello": wire.message(wire.ASK, {"ask": "stats"}),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused(besieged: Besieged, what: str) -> None:
    with besieged.dial() as sock:
        sock.sendall(GARBAGE[what])
        besieged.stands()
        assert refused(sock)
    besieged.stands()


def test_a_wrong_an_empty_and_a_truncated_secret(besieged: Besieged) -> None:
    fleet, places = besieged.fleet, besieged.fleet.places()
    for secret in (os.urandom(32), b"", fleet.secret[:-1], fleet.secret + b"\0"):
        who = Identity("worker/1", 1, os.urandom(16), wire.task_key(secret, "worker/1"))
        with pytest.raises(RunFailed, match="refused worker/1") as caught:
            Client(places, who, chief=False, patience=1)
        assert "does not know the key" in str(caught.value)
    besieged.stands()


def challenged(sock: socket.socket, said: bytes) -> bytes:
    sock.sendall(said)
    return wire.exactly(sock, 64 + wire.NONCE + wire.DIGEST)[64:]


def prove(key: bytes, said: bytes, nonce: bytes) -> bytes:
    return Header(wire.PROOF, data=wire.DIGEST).pack() + wire.proof(key, "worker", said, nonce, "ps/0")


def test_a_false_proof_a_replayed_one_and_the_key_of_another_task(besieged: Besieged) -> None:
    secret = besieged.fleet.secret
    said = wire.hello("worker/2", 1, bytes(16), bytes(32))
    with besieged.dial() as sock:
        challenged(sock, said)
        sock.sendall(Header(wire.PROOF, data=32).pack() + bytes(32))
        assert refused(sock)
    with besieged.dial() as sock:
        nonce = challenged(sock, said)[: wire.NONCE]
        good = prove(wire.task_key(secret, "worker/2"), said, nonce)
        sock.sendall(good)
        assert wire.parse(wire.exactly(sock, 64)).kind == wire.ANSWER
    with besieged.dial() as sock:  # the same words again, against another nonce
        assert challenged(sock, said)[: wire.NONCE] != nonce
        sock.sendall(good)
        assert refused(sock)
    with besieged.dial() as sock:  # worker/1, which knows its own key, says that it is worker/2
        nonce = challenged(sock, said)[: wire.NONCE]
        sock.sendall(prove(wire.task_key(secret, "worker/1"), said, nonce))
        assert refused(sock)
    with besieged.dial() as sock:  # a task that the plan does not have, with the right key for it
        other = wire.hello("worker/9", 1, bytes(16), bytes(32))
        nonce = challenged(sock, other)[: wire.NONCE]
        sock.sendall(prove(wire.task_key(secret, "worker/9"), other, nonce))
        assert refused(sock)
    besieged.stands()


def test_guessing_is_slow_and_harms_nobody(besieged: Besieged) -> None:
    stop, tries, errors = time.monotonic() + 2.0, [0], []

    def guess() -> None:
        while time.monotonic() < stop:
            try:
                with besieged.dial() as sock:
                    challenged(sock, wire.hello("worker/2", 1, os.urandom(16), os.urandom(32)))
                    sock.sendall(Header(wire.PROOF, data=32).pack() + os.urandom(32))
                    if not refused(sock):
                        errors.append("it let us in")
                    tries[0] += 1
            except OSError:
                pass  # thrown out for others who wait

    threads = [threading.Thread(target=guess) for _ in range(8)]
    for thread in threads:
        thread.start()
    besieged.stands()
    for thread in threads:
        thread.join()
    assert not errors and 0 < tries[0] <= 8 * 2.0 / 0.5 + 8
    besieged.stands()


@pytest.mark.parametrize("descriptors", [2000, 120])
def test_a_thousand_idle_connections_and_slow_ones(besieged: Besieged, descriptors: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    ps = besieged.fleet.processes[0].pid
    resource.prlimit(ps, resource.RLIMIT_NOFILE, (descriptors, descriptors))
    idle: list[socket.socket] = []
    try:
        for _ in range(1000):
            idle.append(besieged.dial())
        besieged.worker.step(rate=0.1)
        assert len(os.listdir(f"/proc/{ps}/fd")) <= min(STRANGERS + 20, descriptors)
        for sock in idle[::50]:
            try:
                sock.send(b"M")  # and never the rest
            except OSError:
                pass  # thrown out already
        besieged.stands()
        time.sleep(0.3)
        besieged.stands()
    finally:
        for sock in idle:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    besieged.stands()


def test_one_who_says_nothing_is_shown_out(besieged: Besieged) -> None:
    with besieged.dial() as sock:
        sock.sendall(hello()[:30])
        sock.settimeout(6)
        assert refused(sock)


def test_a_task_of_ours_cannot_send_what_is_not_due(besieged: Besieged) -> None:
    size = 1 << 31
    bad = {
        "a gradient of 2 GiB": Header(wire.PUSH, layout=1, number=1, rate=0.1, weight=1.0, data=size).pack(),
        "a gradient of another layout": Header(wire.PUSH, layout=7, number=1, data=4 * 7856).pack(),
        "shared memory that is not": Header(wire.PUSH, wire.SHARED, 1, number=1, rate=0.1, weight=1.0).pack(),
        "a slab of 1 TB": wire.message(
            wire.DECLARE,
            {"parameters": [["w", [1 << 38], True, True, "float32"]], "optimizer": {"class_name": "SGD"}, "ps": 1},
            data=1 << 40,
        ),
        "no question": wire.message(wire.ASK, {"ask": "__class__"}),
        "an answer": Header(wire.ANSWER).pack(),
        "no JSON": Header(wire.ASK, meta=4).pack() + b"\x80\x04K\x01",
    }
    for number, (what, raw) in enumerate(bad.items()):
        who = besieged.fleet.client(2, attempt=number + 1)
        sock = who.links[0].stream.sock  # type: ignore[union-attr]
        sock.settimeout(5)
        sock.sendall(raw)
        assert wire.parse(wire.exactly(sock, 64)).kind == wire.REFUSAL, what
    besieged.stands()


def test_a_second_copy_of_a_worker_is_refused(besieged: Besieged) -> None:
    besieged.worker.step(rate=0.1)
    with pytest.raises(RunFailed) as caught:
        besieged.fleet.client(0)
    assert "worker/0 is already connected" in str(caught.value)
    besieged.worker.step(rate=0.1)
    besieged.stands()


def test_only_the_planned_address_is_bound(besieged: Besieged) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", besieged.fleet.ports[0]), timeout=2)


def test_no_port_at_all_where_everybody_is_on_one_host() -> None:
    with Fleet(ps=1, workers=1) as fleet:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", fleet.ports[0]), timeout=2)
        assert os.stat(os.path.dirname(fleet.places()[0].path)).st_mode & 0o777 == 0o700


def test_each_source_is_logged_once_and_the_secret_never(besieged: Besieged) -> None:
    for _ in range(5):
        with besieged.dial() as sock:
            sock.sendall(GARBAGE["http"])
            assert refused(sock)
    process = besieged.fleet.processes[0]
    process.terminate()
    assert process.stderr is not None
    lines = process.stderr.read().decode().splitlines()
    assert lines == ["ps/0 refused a connection from 127.0.0.1: not the muster protocol (an HTTP request)"]
    assert process.wait(5) == 0


@pytest.mark.parametrize("tcp", [True, False])
def test_parameters_that_do_not_fit_are_refused_once_and_with_the_reason(tcp: bool) -> None:
    """The ps hangs up in the midst of them. A broken connection would be made again, and this one for ever."""
    run, secret = f"test-{secrets.token_hex(4)}", secrets.token_bytes(32)
    listener = listen_at("127.0.0.1:0") if tcp else listen_local(run, 0)
    place = Place(0, host="127.0.0.1", port=listener.getsockname()[1]) if tcp else Place(0, socket_path(run, 0))
    server = Server(0, Rule(workers=("worker/0",)), send=lambda peer, *buffers: None, free=lambda: MB)
    loop = Loop(server, [listener], secret, log=lambda line: None)
    threading.Thread(target=loop.run, daemon=True).start()
    who = Identity("worker/0", 1, os.urandom(16), wire.task_key(secret, "worker/0"))
    client = Client([place], who, chief=True, patience=5.0, notice=pytest.fail)
    try:
        with pytest.raises(RunFailed, match="a slab of 19 MiB, where 1 MiB of memory are free"):
            client.declare([Parameter("w", (5_000_000,))], {"name": "sgd"}, [np.zeros(5_000_000, np.float32)])
    finally:
        client.close()
        loop.stop()
        remove_local(run, 0)
