"""A worker's connection to one ps: dial, send a request, receive its answer, dial again."""

from __future__ import annotations

import array
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.errors import RunFailed
from muster.ps import wire
from muster.ps.loop import tune, widen
from muster.ps.scratch import socket_path
from muster.ps.tls import server_name
from muster.ps.wire import Header, WireError


@dataclass(frozen=True)
class Place:
    """Where ps ``index`` is: a Unix socket on this host, or an address (host, port)."""

    index: int
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def name(self) -> str:
        return f"ps/{self.index}"

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Identity:
    """Who we are towards a ps."""

    task: str
    attempt: int
    life: bytes
    key: bytes
    tls: ssl.SSLContext | None = None


@dataclass
class Reply:
    """``meta`` is there where the answer has any; array bytes have landed where they were to land."""

    header: Header
    meta: dict[str, Any] = field(default_factory=dict)
    sums: bytes = b""


class Link:
    """``begin`` a request, then ``turn`` whenever the socket is ready until it returns True; then ``reply`` is set."""

    def __init__(self, place: Place, who: Identity) -> None:
        self.place, self.who = place, who
        self.stream: wire.Stream | None = None
        self.welcome: dict[str, Any] = {}
        self.request: list[Any] = []
        self.landing: list[memoryview] = []
        self.reply = Reply(Header(0))
        self.outbox = wire.Outbox()
        self._raw = bytearray(wire.HEADER.size)
        self._todo: list[memoryview] = []
        self._header: Header | None = None
        self._meta = bytearray()

    @property
    def local(self) -> bool:
        return bool(self.place.path)

    def fileno(self) -> int:
        assert self.stream is not None
        return self.stream.sock.fileno()

    # --- connecting

    def dial(self, until: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect and introduce ourselves, again and again until it works or ``until`` has come.

        Raises RunFailed then, or at once where the ps refuses us by name.
        """
        self.close()
        pause = 0.01
        while True:
            try:
                self._dial_once()
                return
            except (WireError, ssl.SSLCertVerificationError) as error:
                raise self._failed(f"{self.place.name} refused {self.who.task}", str(error)) from None
            except OSError as error:
                if clock() >= until:
                    raise self._failed(f"{self.place.name} cannot be reached by {self.who.task}", str(error)) from error
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _dial_once(self) -> None:
        sock = self._connected()
        try:
            sock.settimeout(10)
            who = self.who
            self.welcome = wire.introduce(sock, self.place.name, who.task, who.attempt, who.life, who.key)
        except BaseException:  # whatever ended it: the socket is not left open
            sock.close()
            raise
        self.stream = wire.stream(sock)
        self.outbox = wire.Outbox()

    def _connected(self) -> socket.socket:
        if self.local:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(10)
                widen(sock)
                sock.connect(self.place.path)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.place.host, self.place.port), timeout=10)
        tune(sock)
        if self.who.tls is not None:
            return self.who.tls.wrap_socket(sock, server_hostname=server_name(self.place.name))
        return sock

    def _failed(self, what: str, because: str) -> RunFailed:
        return RunFailed(
            what, at=f"{self.place.name} at {self.place}", because=because, try_="see the log of that task"
        )

    def close(self) -> None:
        if self.stream is not None:
            self.stream.sock.close()
            self.stream = None

    # --- one request

    def ask(self, request: Sequence[Any], landing: Sequence[memoryview] = ()) -> None:
        """Set the next request: buffers to send, and where the array bytes of its answer go."""
        self.request, self.landing = list(request), list(landing)

    def begin(self) -> None:
        """Send as much of the request as the socket takes. Raises OSError where the connection is broken."""
        if self.stream is None:
            raise ConnectionError("the connection is closed")
        self._header, self._todo = None, [memoryview(self._raw)]
        self.outbox.views = []
        self.outbox.add(*self.request)
        self.outbox.flush(self.stream)

    def turn(self) -> bool:
        """Send and receive what can be. True once the answer is whole. Raises OSError at a broken connection."""
        assert self.stream is not None
        if self.outbox.views and not self.outbox.flush(self.stream) and not self.stream.tls:
            return False
        while True:
            while self._todo:
                got = self.stream.receive(self._todo[0])
                if got == wire.WOULD_BLOCK:
                    return False
                if not got:
                    raise ConnectionError(f"{self.place.name} hung up")
                rest = self._todo[0][got:]
                if rest.nbytes:
                    self._todo[0] = rest
                else:
                    self._todo.pop(0)
            if self._header is not None:
                self._finish(self._header)
                return True
            self._read_header()

    def refused(self) -> bool:
        """After an OSError: whether the ps has said why it hung up, as it does where it will not take what we send."""
        if self.stream is None:
            return False
        self.outbox.views = []
        try:
            return self.turn() and self.reply.header.kind == wire.REFUSAL
        except (OSError, WireError):
            return False

    def _read_header(self) -> None:
        header = self._header = wire.parse(self._raw)
        self._meta = bytearray(header.meta if header.meta <= wire.META_LIMIT else 0)
        self._sums = bytearray()
        landing: list[memoryview] = []
        if header.flags & wire.SUMS and header.data <= wire.META_LIMIT:
            self._sums = bytearray(header.data)
            landing = [memoryview(self._sums)]
        elif header.data:
            landing = [view.cast("B") for view in self.landing]
            if sum(view.nbytes for view in landing) != header.data:
                raise WireError(f"{self.place.name} sent {header.data} bytes where another number was due")
        self._todo = [view for view in (memoryview(self._meta), *landing) if view.nbytes]

    def _finish(self, header: Header) -> None:
        told = wire.meta(self._meta) if header.meta else {}
        self.reply = Reply(header, told, bytes(self._sums))

    def send_fds(self, buffers: Sequence[bytes], fds: Sequence[int]) -> None:
        """Send one small message with file descriptors, over a Unix socket."""
        assert self.stream is not None
        sock = self.stream.sock
        sock.setblocking(True)
        try:
            sock.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        finally:
            sock.setblocking(False)


def places(cluster: Mapping[str, Any], run: str, task: str) -> list[Place]:
    """Where each ps is for ``task``: its local socket where the plan has both on one host, else its address.

    ``cluster`` is MUSTER_CLUSTER; ``"local": false`` in it forces addresses, and ``"near"`` lists the ps on our host
    where the addresses do not tell.
    """
    seats = cluster["cluster"]
    role, _, index = task.partition("/")
    own = seats[role][int(index)].rpartition(":")[0]
    found = []
    for number, address in enumerate(seats["ps"]):
        host, _, port = address.rpartition(":")
        near = number in cluster["near"] if "near" in cluster else host == own
        if near and cluster.get("local") is not False:
            found.append(Place(number, socket_path(run, number)))
        else:
            found.append(Place(number, host=host.strip("[]"), port=int(port)))
    return found
