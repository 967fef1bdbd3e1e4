"""One epoll loop per ps: who may connect, whole messages in, views out.

One thread, because a ps has one slab and applies one gradient at a time; measured, it also answers more requests from
8 connections on (docs/decisions/0002). A stranger costs a few hundred bytes and no thread: at most ``STRANGERS`` are
heard at a time, the one that has waited longest goes first, and each has ``HEARING`` seconds to prove who it is. A task
of ours needs a few milliseconds for that, so it gets in however many idle connections there are. A false proof is
answered with silence for ``PENALTY`` seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.errors import Refused, RunFailed
from muster.ps import wire
from muster.ps.peer import Peer, credentials
from muster.ps.scratch import folder, socket_path
from muster.ps.server import Server
from muster.ps.wire import Header, WireError

STRANGERS = 200
HEARING = 3.0  # seconds
PENALTY = 0.5
GRACE = 1.0  # seconds for a worker to come back after a network broke its connection
SOURCES = 500  # of refusals that are logged, one line each
READ, WRITE = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT

UNIX_BUFFER = 1 << 20  # bytes; the kernel gives what it allows


class Loop:
    """Serves ``server`` on ``listeners`` until ``stop`` or until ``agent`` (the pipe to our agent) ends.

    ``secret`` None: no key is known, which only a Unix socket may have (its folder is the user's own).
    """

    def __init__(
        self,
        server: Server,
        listeners: list[socket.socket],
        secret: bytes | None,
        agent: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server, self.secret, self.agent, self.tls, self.log, self.clock = server, secret, agent, tls, log, clock
        self.listeners = {listener.fileno(): listener for listener in listeners}
        self.peers: dict[int, Peer] = {}
        self.strangers: dict[int, Peer] = {}  # in the order of their arrival
        self.lending: dict[int, Peer] = {}  # those to whom arrays of the slab are still being sent
        self.refused: set[tuple[str, str]] = set()
        self.over = False
        self.poll = select.epoll()
        for listener in listeners:
            listener.setblocking(False)
            self.poll.register(listener.fileno(), READ)
        if agent is not None:
            agent.setblocking(False)
            self.poll.register(agent.fileno(), READ)
        server.send, server.changing = self.send, self.settle

    def run(self) -> None:
        due = 0.0
        try:
            while not self.over:
                for fd, events in self.poll.poll(self._patience()):
                    self._turn(fd, events)
                now = self.server.now = self.clock()
                if now >= due:
                    due = now + 0.25
                    self._expire(now)
                    self.server.tick()
        finally:
            for peer in [*self.peers.values()]:
                self._close(peer)
            for listener in self.listeners.values():
                listener.close()
            self.poll.close()

    def stop(self) -> None:
        self.over = True

    def _patience(self) -> float:
        return 0.1 if self.strangers else 0.5

    def _turn(self, fd: int, events: int) -> None:
        peer = self.peers.get(fd)
        if peer is not None:
            if events & select.EPOLLOUT:
                self._flush(peer)
            if events & ~select.EPOLLOUT and fd in self.peers:
                self._read(peer)
        elif fd in self.listeners:
            self._accept(self.listeners[fd])
        elif self.agent is not None and fd == self.agent.fileno():
            self._hear_agent(self.agent)

    def _hear_agent(self, agent: socket.socket) -> None:
        """Its end of file means that the run is over for this machine: a ps that outlived it would be nobody's."""
        try:
            gone = agent.recv(4096) == b""
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            self.over = True

    # --- strangers

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors left, or it hung up at once: those who have waited longest make room
                self._evict(STRANGERS // 2)
                return
            self._welcome(sock, address)

    def _welcome(self, sock: socket.socket, address: object) -> None:
        local = sock.family == socket.AF_UNIX
        source = "the local socket" if local else str(address[0] if isinstance(address, tuple) else address)
        if local and credentials(sock) not in (os.getuid(), 0):
            sock.close()
            self._note(source, "it belongs to another user")
            return
        try:
            peer = self._made(sock, source, local)
        except OSError:  # it hung up before we looked
            sock.close()
            return
        self.peers[peer.fd] = self.strangers[peer.fd] = peer
        self.poll.register(peer.fd, READ)
        self._evict(STRANGERS)

    def _made(self, sock: socket.socket, source: str, local: bool) -> Peer:
        if local:
            widen(sock)
        else:
            tune(sock)
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return Peer(sock, source, local, self.clock() + HEARING)

    def _evict(self, limit: int) -> None:
        while len(self.strangers) > limit:
            peer = next(iter(self.strangers.values()))
            if not peer.doomed:
                self._note(peer.source, "it said nothing while many others were waiting")
            self._close(peer)

    def _expire(self, now: float) -> None:
        for peer in [peer for peer in self.strangers.values() if peer.deadline <= now]:
            if not peer.doomed:
                self._note(peer.source, f"it did not prove who it is within {HEARING:.0f} s")
            self._close(peer)

    def _doom(self, peer: Peer, why: str) -> None:
        self._note(peer.source, why)
        peer.doomed = True
        peer.deadline = self.clock() + PENALTY
        self.poll.modify(peer.fd, 0)

    def _note(self, source: str, why: str) -> None:
        if len(self.refused) < SOURCES and (source, why) not in self.refused:
            self.refused.add((source, why))
            self.log(f"ps/{self.server.index} refused a connection from {source}: {why}")

    def _greet(self, peer: Peer, header: Header) -> None:
        """A hello or a proof, the only things that a stranger may say."""
        said = bytes(peer.small[: header.data])
        if header.kind == wire.HELLO and not peer.said:
            peer.said = header.pack() + said
            peer.task, peer.attempt, peer.life = wire.read_hello(peer.said)
            peer.nonce = os.urandom(wire.NONCE)
            shown = self._proof(peer, "ps")
            answer = Header(wire.CHALLENGE, data=wire.NONCE + wire.DIGEST).pack()
            self.send(peer, answer, peer.nonce + shown)
        elif header.kind == wire.PROOF and peer.said:
            proved = wire.same(said, self._proof(peer, "worker"))
            if not proved or peer.task not in self.server.rule.workers or not self._certified(peer):
                raise WireError(f"it could not prove that it is {peer.task}" if not proved else f"no task {peer.task}")
            self._enter(peer)
        else:
            raise WireError("it did not begin with a hello")

    def _proof(self, peer: Peer, side: str) -> bytes:
        key = wire.task_key(self.secret or b"", peer.task)
        return wire.proof(key, side, peer.said, peer.nonce, f"ps/{self.server.index}")

    def _certified(self, peer: Peer) -> bool:
        """Under TLS the certificate must name the task that it claims to be."""
        if not isinstance(peer.stream.sock, ssl.SSLSocket):
            return True
        named: Any = (peer.stream.sock.getpeercert() or {}).get("subject", ())
        return any(pair == ("commonName", peer.task) for row in named for pair in row)

    def _enter(self, peer: Peer) -> None:
        before = self.server.peers.get(peer.task)
        try:
            told = self.server.enter(peer)
        except Refused as error:
            self.send(peer, wire.message(wire.REFUSAL, {"why": error.what, "because": error.because}))
            self._doom(peer, error.what)
            return
        del self.strangers[peer.fd]
        peer.known = True
        if before is not None and before is not peer:
            self._close(before)
        self.send(peer, wire.message(wire.ANSWER, told))

    def _room(self, peer: Peer, header: Header, meta: bytes) -> list[memoryview]:
        if peer.known:
            return self.server.room(peer, header, meta)
        due = {wire.HELLO: wire.HELLO_BODY.size, wire.PROOF: wire.DIGEST}.get(header.kind)
        if due is None or header.data != due:
            raise WireError("it did not begin with a hello")
        return [memoryview(peer.small)[:due]]

    # --- bytes

    def _read(self, peer: Peer) -> None:
        if peer.doomed:  # only its end is of interest now
            self._close(peer)
            return
        try:
            if peer.shaking and not self._shaken(peer):
                return
            while peer.take(self._room):
                header = peer.header
                assert header is not None
                (self.server.handle if peer.known else self._greet)(peer, header)
                peer.done()
                if not (peer.stream.pending() and peer.fd in self.peers):
                    return
        except (EOFError, OSError) as error:
            self._part(peer, 0.0 if isinstance(error, EOFError) or peer.local else GRACE)
        except WireError as error:
            if peer.known:
                self.log(f"ps/{self.server.index} ended the connection of {peer.task}: {error}")
                self.send(peer, wire.message(wire.REFUSAL, {"why": str(error)}))
                self._part(peer, 0.0)
            else:
                self._doom(peer, str(error))

    def _shaken(self, peer: Peer) -> bool:
        assert isinstance(peer.stream.sock, ssl.SSLSocket)
        try:
            peer.stream.sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:  # its few kilobytes fit into an empty send buffer; if not, the hearing ends
            return False
        except ssl.SSLError as error:
            raise WireError(f"TLS: {error.reason or error}") from None
        peer.shaking = False
        return True

    def send(self, peer: Peer, *buffers: object) -> None:
        if peer.fd in self.peers:
            peer.outbox.add(*buffers)
            self._flush(peer)

    def settle(self) -> None:
        """The slab is about to change: what is still to be sent of it is copied, and nobody waits for a slow reader."""
        for peer in self.lending.values():
            peer.outbox.own()
        self.lending.clear()

    def _flush(self, peer: Peer) -> None:
        try:
            empty = peer.outbox.flush(peer.stream)
        except OSError:
            self._part(peer, 0.0 if peer.local else GRACE)
            return
        if empty:
            self.lending.pop(peer.fd, None)
        elif not peer.writing:  # once is enough: what was copied does not change any more
            self.lending[peer.fd] = peer
        if empty is peer.writing:
            peer.writing = not empty
            self.poll.modify(peer.fd, READ if empty else WRITE)

    def _part(self, peer: Peer, grace: float) -> None:
        known = peer.known
        self._close(peer)
        if known:
            self.server.parted(peer, grace)

    def _close(self, peer: Peer) -> None:
        if self.peers.pop(peer.fd, None) is None:
            return
        self.strangers.pop(peer.fd, None)
        self.lending.pop(peer.fd, None)
        self.poll.unregister(peer.fd)
        peer.close()


# --- where a ps can be reached


def tune(sock: socket.socket) -> None:
    """No waiting for more to send; a peer whose machine is gone is noticed within about 5 s.

    Within one machine there is no congestion to control: what the system has for real networks (BBR) would send by a
    clock there, and pay for its ticks.
    """
    if sock.getpeername()[0] == sock.getsockname()[0]:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def widen(sock: socket.socket) -> None:
    """A Unix socket holds 208 KB unless told otherwise, and a slab of megabytes goes through it in that many turns."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER)


def listen_local(run: str, index: int) -> socket.socket:
    """A Unix socket in a folder that only this user can enter. Raises RunFailed where the folder is not ours alone."""
    place = folder(run)
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunFailed(
            "The folder for the sockets of this run is not ours alone", at=str(place),
            because="it is a link, belongs to somebody else or can be entered by others", try_=f"rm -r {place}",
        )  # fmt: skip
    path = socket_path(run, index)
    Path(path + ".new").unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path + ".new")
    sock.listen(128)
    os.rename(path + ".new", path)  # over what a killed one left; whoever finds it, finds somebody listening
    return sock


def listen_at(address: str) -> socket.socket:
    """A TCP socket bound to ``host:port`` and nothing else. Raises RunFailed where it cannot be."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, at = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(at)
        sock.listen(128)
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"A parameter server cannot listen at {address}", at=address, because=str(error),
            try_="another process may have the port, or the address may not be one of this machine's",
        ) from error  # fmt: skip
    return sock


def remove_local(run: str, index: int) -> None:
    """Leave nothing behind: our socket, those of ps that were killed, and the folder with the last of them."""
    try:
        os.unlink(socket_path(run, index))
        for other in folder(run).glob("ps-*.sock"):
            if _deserted(str(other)):
                other.unlink()
        folder(run).rmdir()
    except OSError:
        pass  # another ps still has its socket there, or is just doing the same


def _deserted(path: str) -> bool:
    """Whether nobody listens at a socket any more."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
