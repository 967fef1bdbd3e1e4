"""A bad link, in user space: delay, jitter, loss and rate over NFQUEUE, for kernels that have no netem.

    delay.py QUEUE [--delay MS] [--jitter MS] [--loss PERCENT] [--rate MBIT]
    iptables -t mangle -A PREROUTING -i eth0 -j NFQUEUE --queue-num QUEUE --queue-bypass

Run it inside the network namespace of the receiver, with the rule on PREROUTING: a packet that is held on its way out
still counts against its sender's socket, and TCP's small-queue limit then throttles everything to a few Mbit/s,
whatever the delay. Only the packet's number and length come up here, never its bytes. The order of packets is kept, so
one verdict "accept all up to this number" releases everything that is due.

Prints "ready" once the kernel has accepted the queue; ends on SIGTERM.
"""

import argparse
import collections
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

NETFILTER, QUEUE_SUBSYSTEM = 12, 3
PACKET, VERDICT, CONFIG, VERDICT_BATCH = 0, 1, 2, 3
ACCEPT, DROP = 1, 0
LONGEST = 200_000  # packets that may wait: 50 ms at line rate
SOL_NETLINK, NO_ENOBUFS, RCVBUF_FORCE = 270, 5, 33


def attribute(kind: int, data: bytes) -> bytes:
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + b"\0" * (-length % 4)


def message(kind: int, queue: int, attributes: bytes, flags: int = 1, family: int = 0) -> bytes:
    body = struct.pack(">BBH", family, 0, queue) + attributes
    return struct.pack("=IHHII", 16 + len(body), (QUEUE_SUBSYSTEM << 8) | kind, flags, 0, 0) + body


def ask(link: socket.socket, request: bytes) -> None:
    """Sends ``request`` with the acknowledge flag and raises OSError when the kernel says no."""
    link.send(request[:6] + struct.pack("=H", 5) + request[8:])
    answer = link.recv(65536)
    if struct.unpack_from("=H", answer, 4)[0] == 2:
        error: int = struct.unpack_from("=i", answer, 16)[0]
        if error:
            raise OSError(-error, os.strerror(-error))


def attach(queue: int) -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
    link.bind((0, 0))
    link.setsockopt(socket.SOL_SOCKET, RCVBUF_FORCE, 64 << 20)
    link.setsockopt(SOL_NETLINK, NO_ENOBUFS, 1)
    ask(link, message(CONFIG, queue, attribute(1, struct.pack(">BBH", 1, 0, socket.AF_INET))))
    ask(link, message(CONFIG, queue, attribute(2, struct.pack(">IB", 0, 1))))  # copy the meta data, not the packet
    ask(link, message(CONFIG, queue, attribute(3, struct.pack(">I", LONGEST))))
    link.setblocking(False)
    return link


def arrivals(data: bytes) -> Iterator[tuple[int, int]]:
    """The number and length of each packet that the kernel tells of in ``data``."""
    at = 0
    while at < len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind == (QUEUE_SUBSYSTEM << 8) | PACKET:
            yield packet(data, at + 20, at + length)
        at += (length + 3) & ~3


def packet(data: bytes, at: int, end: int) -> tuple[int, int]:
    number, size = 0, 1500
    while at < end:
        length, kind = struct.unpack_from("=HH", data, at)
        if kind & 0x3FFF == 1:
            number = struct.unpack_from(">I", data, at + 4)[0]
        elif kind & 0x3FFF == 13:
            size = struct.unpack_from(">I", data, at + 4)[0]
        at += (length + 3) & ~3
    return number, size


class Link:
    def __init__(self, told: argparse.Namespace) -> None:
        self.delay, self.jitter, self.loss = told.delay / 1e3, told.jitter / 1e3, told.loss / 100
        self.bits = told.rate * 1e6
        self.free = self.last = 0.0
        self.packets = self.dropped = 0

    def due(self, now: float, size: int) -> float:
        """When a packet of ``size`` bytes that arrives ``now`` may go on; never before the one ahead of it."""
        due = now + self.delay + random.random() * self.jitter
        if self.bits:
            self.free = max(self.free, now) + size * 8 / self.bits
            due = max(due, self.free + self.delay)
        self.last = max(self.last, due)
        return self.last

    def lost(self) -> bool:
        self.packets += 1
        gone: bool = random.random() < self.loss
        self.dropped += gone
        return gone


def run(link: Link, queue: int) -> None:
    kernel = attach(queue)
    stop = []
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, lambda *_: stop.append(True))
    print("ready", flush=True)
    waiting: collections.deque[tuple[float, int]] = collections.deque()
    poll = select.poll()
    poll.register(kernel, select.POLLIN)
    while not stop:
        release(kernel, queue, waiting)
        if poll.poll(pause(waiting)):
            take(kernel, queue, link, waiting)


def pause(waiting: collections.deque[tuple[float, int]]) -> int:
    """Milliseconds until the next packet is due, rounded up; poll knows nothing finer."""
    if not waiting:
        return 200
    left = (waiting[0][0] - time.monotonic()) * 1000
    return 0 if left < 1 else int(left) + 1


def release(kernel: socket.socket, queue: int, waiting: collections.deque[tuple[float, int]]) -> None:
    now, last = time.monotonic(), None
    while waiting and waiting[0][0] <= now:
        last = waiting.popleft()[1]
    if last is not None:
        kernel.send(message(VERDICT_BATCH, queue, attribute(2, struct.pack(">II", ACCEPT, last))))


def take(kernel: socket.socket, queue: int, link: Link, waiting: collections.deque[tuple[float, int]]) -> None:
    for _ in range(256):
        try:
            data = kernel.recv(262144)
        except BlockingIOError:
            return
        now = time.monotonic()
        for number, size in arrivals(data):
            if link.lost():
                kernel.send(message(VERDICT, queue, attribute(2, struct.pack(">II", DROP, number))))
            else:
                waiting.append((link.due(now, size), number))


def main() -> None:
    parser = argparse.ArgumentParser(description="delay, jitter, loss and rate over NFQUEUE")
    parser.add_argument("queue", type=int)
    for name in ("delay", "jitter", "loss", "rate"):
        parser.add_argument("--" + name, type=float, default=0.0)
    told = parser.parse_args()
    link = Link(told)
    run(link, told.queue)
    print("packets", link.packets, "dropped", link.dropped, file=sys.stderr)


if __name__ == "__main__":
    main()
