"""One connection at a ps, and how far its current message has come."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from muster.ps import wire
from muster.ps.slabs import Cut, Doubles, Floats
from muster.ps.wire import Header, WireError

Room = Callable[["Peer", Header, bytes], list[memoryview]]


class Peer:
    """A stranger until ``known``. ``take`` reads without blocking; a message is in ``header``, ``meta`` and, where
    ``room`` of the server said, in the arrays that it belongs to."""

    def __init__(self, sock: socket.socket, source: str, local: bool, deadline: float) -> None:
        self.stream = wire.stream(sock)
        self.fd = sock.fileno()
        self.source, self.local, self.deadline = source, local, deadline
        self.known = False
        self.doomed = False  # refused; kept silent until its deadline, so that guessing is slow
        self.shaking = self.stream.tls
        self.writing = False  # its outbox waits for room in the socket
        self.task, self.attempt, self.life = "", 0, b""
        self.said, self.nonce = b"", b""
        self.busy = False  # its request has not been answered
        self.fds: list[int] | None = None  # a list: file descriptors are due with the next message
        self.outbox = wire.Outbox()
        self.small = bytearray(wire.HELLO_BODY.size)
        self.gradient: Floats | None = None  # where its gradient lands
        self.scales: Doubles | None = None
        self.shared: Shared | None = None
        self._raw = bytearray(wire.HEADER.size)
        self._begin()

    def _begin(self) -> None:
        self.header: Header | None = None
        self.meta = bytearray()
        self._todo = [memoryview(self._raw)]
        self._roomed = False

    def take(self, room: Room) -> bool:
        """True once a message is whole. Raises ConnectionError at its end, WireError for what may not be sent."""
        while True:
            while self._todo:
                if not self._todo[0].nbytes:
                    self._todo.pop(0)
                    continue
                got = self._receive(self._todo[0])
                if got == wire.WOULD_BLOCK:
                    return False
                if not got:
                    raise EOFError(f"{self.task or self.source} hung up")
                self._todo[0] = self._todo[0][got:]
            if self.header is None:
                self._read_header()
            elif not self._roomed:
                self._roomed = True
                self._todo = [view.cast("B") for view in room(self, self.header, bytes(self.meta)) if view.nbytes]
                if sum(view.nbytes for view in self._todo) != self.header.data:
                    raise WireError(f"{self.header.data} bytes of data where another number was due")
            else:
                return True

    def _read_header(self) -> None:
        header = wire.parse(self._raw)
        if self.busy:
            raise WireError("a second request before the first was answered")
        if header.meta > (wire.META_LIMIT if self.known else 0):
            raise WireError(f"{header.meta} bytes of JSON")
        self.header, self.meta = header, bytearray(header.meta)
        self._todo = [memoryview(self.meta)]

    def _receive(self, view: memoryview) -> int:
        if self.fds is None:
            return self.stream.receive(view)
        return self._receive_with_fds(view, self.fds)

    def _receive_with_fds(self, view: memoryview, fds: list[int]) -> int:
        room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
        try:
            got, ancillary, _, _ = self.stream.sock.recvmsg_into([view], room)
        except BlockingIOError:
            return wire.WOULD_BLOCK
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", data[: len(data) - len(data) % 4]))
        return got

    def done(self) -> Header:
        """The message has been looked at: be ready for the next one."""
        header = self.header
        assert header is not None, "done() follows take()"
        self._begin()
        return header

    def told(self) -> dict[str, Any]:
        return wire.meta(self.meta)

    def close(self) -> None:
        for fd in self.fds or []:
            os.close(fd)
        self.fds = None
        self.stream.sock.close()


class Shared:
    """Memory of the worker that the ps sees too: its gradient (which it reads) and its values (which it writes).

    The worker made it without a name (memfd) and cannot shrink it, so a ps never faults on it and nothing is left
    behind. Both are written and read only while the worker waits for its answer.
    """

    def __init__(self, gradient_fd: int, values_fd: int, cut: Cut) -> None:
        self.gradient = _mapped(gradient_fd, cut)
        self.values = _mapped(values_fd, cut)


def _mapped(fd: int, cut: Cut) -> Floats:
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError("shared memory that can shrink")
    if os.fstat(fd).st_size < cut.stop * 4:
        raise WireError("shared memory that is too small")
    begin = cut.start * 4 // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    room = mmap.mmap(fd, cut.stop * 4 - begin, offset=begin)
    return np.frombuffer(room, np.float32, cut.size, cut.start * 4 - begin)


def credentials(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
