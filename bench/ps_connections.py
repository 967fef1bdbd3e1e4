"""One parameter server, asked by 1, 8 and 64 connections: an event loop against a thread per connection.

Each connection pushes a gradient of 15.7 KB (half of a 784x10 softmax) and waits for the values, again and again. Both
servers are the same code from the wire to the optimizer; only who waits for the sockets differs. The runs are
interleaved, so that what else the machine does meets both alike; beside the rate stands the processor time of the
server per request, which other work on the machine hardly changes. Writes every value and the medians as JSON.

    python bench/ps_connections.py [--seconds 0.7] [--repeats 5] [--out bench/results/ps_connections.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from muster.ps import wire
from muster.ps.loop import Loop, listen_local, remove_local, socket_path
from muster.ps.peer import Peer
from muster.ps.server import Rule, Server
from muster.ps.slabs import Declaration, Parameter
from muster.ps.wire import Header

FLOATS = 3920
SECRET = b"bench" * 8
RUN = f"bench-{os.getpid()}"


class ThreadedLoop(Loop):
    """The same server with a thread per connection that has proved itself, and a lock around the slab."""

    def _read(self, peer: Peer) -> None:
        super()._read(peer)
        if peer.known and peer.fd in self.peers:  # it has just proved itself: a thread from here on
            self.poll.unregister(peer.fd)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        poll = select.poll()
        poll.register(peer.fd, select.POLLIN)
        try:
            while True:
                while not peer.take(self._room):
                    poll.poll()
                header = peer.header
                assert header is not None
                with LOCK:
                    self.server.handle(peer, header)
                peer.done()
        except (EOFError, OSError):
            self.peers.pop(peer.fd, None)
            with LOCK:
                self.server.parted(peer, 0.0)
            peer.close()

    def _close(self, peer: Peer) -> None:
        if not peer.known:
            super()._close(peer)  # the others belong to their threads

    def _flush(self, peer: Peer) -> None:
        while not peer.outbox.flush(peer.stream):
            select.select([], [peer.fd], [])


LOCK = threading.Lock()


def serve(kind: str, run: str, tcp: int) -> None:
    tasks = tuple(f"worker/{i}" for i in range(64))
    server = Server(0, Rule(workers=tasks), send=lambda peer, *buffers: None)
    listeners = [listen_local(run, 0)]
    if tcp:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(128)
        listeners.append(sock)
        print(sock.getsockname()[1], flush=True)
    else:
        print(0, flush=True)
    (ThreadedLoop if kind == "threads" else Loop)(server, listeners, SECRET, agent=socket.socket(fileno=0)).run()


class Asker:
    """One connection with one request under way."""

    def __init__(self, number: int, family: str, port: int, run: str) -> None:
        task = f"worker/{number}"
        if family == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(socket_path(run, 0))
        else:
            self.sock = socket.create_connection(("127.0.0.1", port))
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(10)
        wire.introduce(self.sock, "ps/0", task, 1, os.urandom(16), wire.task_key(SECRET, task))
        self.gradient = np.zeros(FLOATS, np.float32)
        self.answer = memoryview(bytearray(64 + FLOATS * 4))
        self.left, self.number = self.answer, 0

    def ask(self) -> None:
        self.number += 1
        header = Header(wire.PUSH, wire.WITH_VALUES, 1, number=self.number, rate=0.1, weight=1.0, data=FLOATS * 4)
        self.sock.setblocking(True)
        self.sock.sendmsg([header.pack(), self.gradient.data])
        self.sock.setblocking(False)
        self.left = self.answer

    def hear(self) -> bool:
        try:
            self.left = self.left[self.sock.recv_into(self.left) :]
        except BlockingIOError:
            return False
        return not self.left.nbytes


def declare(run: str) -> None:
    told = Declaration((Parameter("w", (FLOATS,)),), {"class_name": "SGD", "config": {}}, 1)
    first = Asker(63, "unix", 0, run)
    first.sock.setblocking(True)
    values = np.zeros(FLOATS, np.float32)
    first.sock.sendall(wire.message(wire.DECLARE, told.told(), data=values.nbytes) + values.tobytes())
    wire._read(first.sock, wire.ANSWER, 1 << 20)
    first.sock.sendall(wire.message(wire.ASK, {"ask": "commit", "fingerprint": told.fingerprint()}))
    wire._read(first.sock, wire.ANSWER, 1 << 20)
    first.sock.close()


def spent(pid: int) -> int:
    """Nanoseconds that all threads of a process have been on a processor."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def measure(kind: str, family: str, connections: int, seconds: float, number: int) -> tuple[float, float]:
    """Requests answered per second, and microseconds of processor time that the server spent on each."""
    run = f"{RUN}-{number}"
    command = [sys.executable, __file__, "--serve", kind, "--run", run, *(["--tcp"] if family == "tcp" else [])]
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True)
    theirs.close()
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        declare(run)
        askers = {a.sock.fileno(): a for a in (Asker(i, family, port, run) for i in range(connections))}
        return drive(askers, seconds, process.pid)
    finally:
        ours.close()
        process.wait(10)
        remove_local(run, 0)


def drive(askers: dict[int, Asker], seconds: float, pid: int) -> tuple[float, float]:
    poll = select.epoll()
    for fd, asker in askers.items():
        poll.register(fd, select.EPOLLIN)
        asker.ask()
    count, began, before, warm = 0, 0.0, 0, time.perf_counter() + 0.15
    end = warm + seconds
    while (now := time.perf_counter()) < end:
        if not began and now >= warm:
            count, began, before = 0, now, spent(pid)
        for fd, _ in poll.poll(0.1):
            if askers[fd].hear():
                count += 1
                askers[fd].ask()
    rate, cost = count / (time.perf_counter() - began), (spent(pid) - before) / count / 1000
    for asker in askers.values():
        asker.sock.close()
    return rate, cost


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=0.7)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ps_connections.json")
    options.add_argument("--serve", choices=["threads", "loop"])
    options.add_argument("--run", default="")
    options.add_argument("--tcp", action="store_true")
    args = options.parse_args()
    if args.serve:
        serve(args.serve, args.run, args.tcp)
        return
    values: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for repeat in range(args.repeats):
        for family in ("unix", "tcp"):
            for connections in (1, 8, 64):
                for kind in ("threads", "loop")[:: 1 if repeat % 2 else -1]:
                    number = len(values) * 100 + repeat
                    rate, cost = measure(kind, family, connections, args.seconds, number)
                    values.setdefault(f"{family} {connections} {kind}", []).append(round(rate))
                    costs.setdefault(f"{family} {connections} {kind}", []).append(round(cost, 1))
    medians = {name: statistics.median(rates) for name, rates in values.items()}
    spare = {name: statistics.median(times) for name, times in costs.items()}
    told = {
        "what": "requests/s of one ps, 15.7 KB each way, one request under way per connection",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
        "load": os.getloadavg(),
        "seconds": args.seconds,
        "requests_per_second": {"medians": medians, "values": values},
        "server_us_per_request": {"medians": spare, "values": costs},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{'':12}{'threads/s':>10}{'loop/s':>10}{'ratio':>8}{'threads us':>12}{'loop us':>9}")
    for name in dict.fromkeys(key.rsplit(" ", 1)[0] for key in values):
        threads, loop = medians[f"{name} threads"], medians[f"{name} loop"]
        cost = f"{spare[f'{name} threads']:12.1f}{spare[f'{name} loop']:9.1f}"
        print(f"{name:12}{threads:10,.0f}{loop:10,.0f}{loop / threads:8.2f}{cost}")


if __name__ == "__main__":
    main()
