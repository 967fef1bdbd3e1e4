"""What the network does between two hosts: measured on the plan's real ports, with the standard library only (3.8+).

A host listens where its tasks will listen, bound to the plan's address and to nothing else, and answers only those who
know the token of this check. The other host connects, pings, counts losses and fills the link. Three choices need a
word.

*Loss* is counted by the kernel (TCP_INFO): segments that it sent again, less those of which the receiver said that it
had them already (DSACK), over segments sent. Counting UDP datagrams would count what a busy receiver's full buffer
drops, and many firewalls pass no UDP at all. The segments are small and few at a time, since a link that is filled
loses packets by design. Each side reports its own, so each direction has a figure. Eight connections share the work:
one alone would need a round trip for each handful, and stands still for 200 ms when it loses the last one.

*Which direction is cut*: TCP needs both, so a connection fails either way. But the side that still hears the other has
seen its SYN, and its kernel lists the half-open connection (SYN_RECV). That list is read before the listener closes.

*Bandwidth* is timed by the receiver, after a third of the time for the congestion window to open; it says when it has
seen enough, and the sender then drops the connection with its buffers, so that a slow link cannot hold up the check.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from muster.check import probe

if TYPE_CHECKING:  # names for readers and for mypy; Python 3.8 could not make them
    from collections.abc import Callable, Iterator

    Request = dict[str, Any]
    Answer = dict[str, Any]

HELLO, MESSAGE, CHUNK = 96, 64, 1 << 18
LANES, WINDOW, PINGS, SEGMENTS = 8, 8, 200, 1000
QUERY = b"?".ljust(MESSAGE)  # asks an echo for its own TCP_INFO
CONNECT = 3.0  # seconds for a connection: a lost first packet is sent again after 1 s
PATIENCE = 6.0  # seconds that a connection may be idle
GUESTS = 256  # connections at a time: strangers who hold one open cost a thread for a few seconds each
QUICK = 0.15  # seconds of a first look at the bandwidth each way; who finds little looks again
GRACE = 1.0  # seconds that what is under way when time is up may still take
SYN_RECV = "03"

Socket = socket.socket


# --- the listening side


class Listener:
    """Echo, sink and source on the ports of the plan; ``errors`` has the ports that could not be bound, and why."""

    def __init__(self, token: str, ports: list[tuple[str, int]]) -> None:
        self.token = token.encode()
        self.errors: dict[str, str] = {}
        self.ports = {port for _, port in ports}
        self._socks: list[Socket] = []
        self._room = threading.Semaphore(GUESTS)
        for address, port in ports:
            found = probe.resolve(address)
            if isinstance(found, str):
                self.errors[str(port)] = found
                continue
            for sock in [self._open(where, port) for where in found]:
                if sock:
                    threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def _open(self, where: str, port: int) -> Socket | None:
        sock = socket.socket(_family(where), socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((where, port))
            sock.listen(256)
        except OSError as error:
            sock.close()
            self.errors[str(port)] = errno.errorcode.get(error.errno or 0, str(error))
            return None
        self._socks.append(sock)
        return sock

    def _accept(self, sock: Socket) -> None:
        while True:
            try:
                peer, _ = sock.accept()
            except OSError:  # closed: the check is over
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()
            else:
                peer.close()

    def _answer(self, peer: Socket) -> None:
        with self._leaving(), peer:
            peer.settimeout(PATIENCE)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                token, mode, seconds = _exactly(peer, HELLO).split()
                if token != self.token or mode not in MODES:
                    return
                peer.sendall(self.token[::-1])
                MODES[mode](peer, min(float(seconds), 2.0))
            except (OSError, ValueError):  # a stranger, or a peer that has its figure and went away
                return

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._room.release()

    def spare(self, towards: str) -> Answer:
        """One more port, at the address from which this host sends to ``towards``: for a host that is only ever the one
        who dials, so that the other can show whether its packets arrive here."""
        found = probe.resolve(towards)
        if isinstance(found, str):
            return {"error": found}
        with socket.socket(_family(found[0]), socket.SOCK_DGRAM) as route:
            route.connect((found[0], 9))  # sends nothing; it only picks the way
            address = route.getsockname()[0]
        sock = self._open(address, 0)
        if sock is None:
            return {"error": self.errors.pop("0", "")}
        threading.Thread(target=self._accept, args=(sock,), daemon=True).start()
        self.ports.add(sock.getsockname()[1])
        return {"address": address, "port": sock.getsockname()[1]}

    def half_open(self) -> list[str]:
        """Addresses of peers whose SYN came in here and whose answer to ours did not."""
        rows = [row for family in ("tcp", "tcp6") for row in probe.table(family) if row[3] == SYN_RECV]
        return sorted({_address(row[2]) for row in rows if int(row[1].rpartition(":")[2], 16) in self.ports})

    def close(self) -> None:
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept; close alone does not
            except OSError:  # never connected: Linux wakes it all the same
                pass
            sock.close()
        self._socks.clear()


def _echo(peer: Socket, _: float) -> None:
    """Each message goes back by itself: two in one segment would be one chance less to get lost."""
    left = b""
    while True:
        data = peer.recv(CHUNK)
        if not data:
            return
        left += data
        while len(left) >= MESSAGE:
            message, left = left[:MESSAGE], left[MESSAGE:]
            peer.sendall(message if message != QUERY else json.dumps(_counts(peer)).encode().ljust(MESSAGE))


def _sink(peer: Socket, seconds: float) -> None:
    peer.sendall(json.dumps(_receive(peer, seconds)).encode().ljust(MESSAGE))
    while peer.recv(CHUNK):  # the sender ends it: a port left in TIME_WAIT here would be one that a task cannot have
        pass


def _source(peer: Socket, seconds: float) -> None:
    _send(peer, seconds)


MODES: dict[bytes, Callable[[Socket, float], None]] = {b"echo": _echo, b"sink": _sink, b"source": _source}


def _receive(peer: Socket, seconds: float, clock: Callable[[], float] = time.monotonic) -> float:
    """Bits a second that come in over two thirds of ``seconds``, after one third; later, if we were not woken up in
    time, since what comes in a moment says nothing."""
    room, began, got = bytearray(CHUNK), 0.0, 0
    start = clock()
    while True:
        count = peer.recv_into(room)
        now = clock()
        if not began and now - start >= seconds / 3:
            began, got = now, 0
        elif began:
            got += count
        if not count or (began and now - began >= seconds * 2 / 3):
            return got * 8 / (now - began) if began and now > began else 0.0


def _send(peer: Socket, seconds: float) -> None:
    """Sends until the receiver answers or goes away, at most a little longer than it should take."""
    until, block = time.monotonic() + seconds + 2, memoryview(bytes(CHUNK))
    peer.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while time.monotonic() < until:
            events = ready.select(0.1)
            if any(mask & selectors.EVENT_READ for _, mask in events):
                return
            if events:
                peer.send(block)


# --- the asking side


def reach(targets: list[Request], token: str, within: float) -> dict[str, Answer]:
    """Connects to every target (id, address, port) at once; see ``knock`` for what an answer says."""
    work = {target["id"]: _knocking(target, token, within) for target in targets}
    return probe.together(work, within + 2)


def _knocking(target: Request, token: str, within: float) -> Callable[[], Answer]:
    return lambda: knock(target["address"], target["port"], token, within)


def knock(address: str, port: int, token: str, within: float) -> Answer:
    """``outcome`` is ok, or the worst of refused, timeout, no_route, no_name, wrong (somebody else answers) or an
    errno."""
    found = probe.resolve(address)
    if isinstance(found, str):
        return {"outcome": "no_name", "because": found}
    tried: dict[str, str] = {}
    for where in found:
        try:
            dial(where, port, token, "echo", within).close()
            tried[where] = "ok"
        except OSError as error:
            tried[where] = reason(error)
    bad = [outcome for outcome in tried.values() if outcome != "ok"]
    return {"outcome": bad[0] if bad else "ok", "tried": tried}


def dial(where: str, port: int, token: str, mode: str, within: float, seconds: float = 0.0) -> Socket:
    """A connection to a listener that has proved that it is one of this check."""
    sock = socket.socket(_family(where), socket.SOCK_STREAM)
    try:
        sock.settimeout(within)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((where, port))
        sock.sendall(f"{token} {mode} {seconds}".encode().ljust(HELLO))
        if _exactly(sock, len(token)) != token.encode()[::-1]:
            raise WrongAnswer
    except OSError:
        sock.close()
        raise
    return sock


class WrongAnswer(OSError):
    """Something listens there, but it is not the other half of this check."""


def reason(error: OSError) -> str:
    if isinstance(error, WrongAnswer):
        return "wrong"
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "timeout"
    known = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "no_route",
        errno.ENETUNREACH: "no_route",
        errno.ECONNRESET: "wrong",  # it accepted, then hung up: not one of ours
    }
    return known.get(error.errno or 0, errno.errorcode.get(error.errno or 0, str(error)))


def measure(target: Request, token: str, within: float, patient: bool = False) -> Answer:
    """Round trip (``rtt_ms``: min, p50, p99 of at least 200 pings, unless time is up), ``loss`` each way (lost, of
    segments sent) and ``mbit`` each way. Times are cut so that it ends in about ``within`` seconds whatever the link
    does. ``patient``: a second for the bandwidth each way, where a small part of one is enough on idle hosts."""
    found = probe.resolve(target["address"])
    if isinstance(found, str):
        return {"error": found}
    try:
        return _measure(found[0], target["port"], token, time.monotonic() + within, 1.0 if patient else QUICK)
    except OSError as error:
        return {"error": reason(error)}


def _measure(where: str, port: int, token: str, until: float, least: float) -> Answer:
    lanes: list[Socket] = []
    try:
        for _ in range(LANES):
            lanes.append(dial(where, port, token, "echo", min(CONNECT, max(0.2, until - time.monotonic()))))
        live = list(lanes)
        trips = volley(live[:1], 1, PINGS, min(until, time.monotonic() + 0.4))
        trips += volley(live, 1, PINGS - len(trips), min(until, time.monotonic() + 2.0))
        volley(live, WINDOW, SEGMENTS // WINDOW, min(until, time.monotonic() + 2.5))
        forth, back = _sum([_counts(lane) for lane in lanes]), _sum([_ask(lane) for lane in live])
    finally:
        for lane in lanes:
            lane.close()
    trips.sort()
    seconds = min(1.0, max(least, 10 * trips[len(trips) // 2])) if trips else least
    return {
        "rtt_ms": {"min": _ms(trips, 0.0), "p50": _ms(trips, 0.5), "p99": _ms(trips, 0.99), "pings": len(trips)},
        "loss": {"forth": forth, "back": back},
        "mbit": {
            "forth": _fill(where, port, token, "sink", seconds, until),
            "back": _fill(where, port, token, "source", seconds, until),
        },
    }


def _ms(trips: list[float], share: float) -> float | None:
    return round(trips[min(len(trips) - 1, int(share * len(trips)))] * 1000, 3) if trips else None


def volley(lanes: list[Socket], window: int, rounds: int, until: float) -> list[float]:
    """Sends ``window`` messages at a time on each lane, the next when all are back, until there were ``rounds`` in all
    or time is up. Seconds that each round took. A lane that stands still is taken out of ``lanes``: what comes back on
    it later would look like the answer to something else."""
    trips: list[float] = []
    sent: dict[Socket, float] = {}
    back: dict[Socket, int] = {}
    with selectors.DefaultSelector() as ready:
        for lane in lanes[: max(0, rounds)]:
            ready.register(lane, selectors.EVENT_READ, lane)
            _salvo(lane, window, sent, back)
        while sent and time.monotonic() < until + GRACE:
            for key, _ in ready.select(max(0.0, until + GRACE - time.monotonic())):
                lane = key.data
                back[lane] -= len(lane.recv(CHUNK)) or window * MESSAGE
                if back[lane] <= 0:
                    trips.append(time.monotonic() - sent.pop(lane))
                    if len(trips) + len(sent) < rounds and time.monotonic() < until:
                        _salvo(lane, window, sent, back)
    for lane in sent:
        lanes.remove(lane)
    return trips + [
        time.monotonic() - began for began in sent.values()
    ]  # without these, standing still would look fast


def _salvo(lane: Socket, window: int, sent: dict[Socket, float], back: dict[Socket, int]) -> None:
    sent[lane], back[lane] = time.monotonic(), window * MESSAGE
    for _ in range(window):
        lane.sendall(bytes(MESSAGE))


def _ask(lane: Socket) -> dict[str, int]:
    """The far end's own counts."""
    lane.settimeout(1.0)
    try:
        lane.sendall(QUERY)
        return dict(json.loads(_exactly(lane, MESSAGE)))
    except (OSError, ValueError):  # it stands still: its count is unknown, and what we know of the others is still true
        return {"sent": 0, "lost": 0}


def _fill(where: str, port: int, token: str, mode: str, seconds: float, until: float) -> float | None:
    """Mbit/s to (sink) or from (source) the far end; None if time is up."""
    if time.monotonic() + seconds > until:
        return None
    try:
        with dial(where, port, token, mode, min(CONNECT, max(0.2, until - time.monotonic())), seconds) as sock:
            # Closing drops what is buffered (RST), so neither end waits for a slow link to drain, nor keeps TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if mode == "source":
                bits = _receive(sock, seconds)
            else:
                _send(sock, seconds)
                sock.settimeout(1.0)
                bits = float(json.loads(_exactly(sock, MESSAGE)))
    except (OSError, ValueError):
        return None
    return round(bits / 1e6, 2)


# --- the kernel's numbers


def _counts(sock: Socket) -> dict[str, int]:
    """Data segments ``sent`` on this connection, and ``lost``: sent again, less those that proved needless."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    again = struct.unpack_from("=I", info, 100)[0]
    sent = struct.unpack_from("=I", info, 156)[0] if len(info) >= 160 else 0
    needless = struct.unpack_from("=I", info, 216)[0] if len(info) >= 220 else 0
    return {"sent": sent, "lost": max(0, again - needless)}


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(count[key] for count in counts) for key in ("sent", "lost")}


def _address(told: str) -> str:
    """The address in a row of /proc/net/tcp or tcp6: 32-bit words in the byte order of the machine."""
    raw = bytes.fromhex(told.partition(":")[0])
    words = b"".join(struct.pack("!I", *struct.unpack("=I", raw[i : i + 4])) for i in range(0, len(raw), 4))
    if len(words) == 16 and words.startswith(bytes(10) + b"\xff\xff"):
        words = words[12:]
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def _family(where: str) -> int:
    return socket.AF_INET6 if ":" in where else socket.AF_INET


def _exactly(sock: Socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        data += part
    return data
