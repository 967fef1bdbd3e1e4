"""The wire: a fixed header of 64 bytes, then a little JSON where a message needs it, then raw array bytes.

Three rules make it safe to leave a port open for a day:

- *A length is a claim.* It is compared with what this peer may send at this moment before anything is allocated;
  a stranger may send exactly one hello and one proof, both of fixed size.
- *Nothing is unpickled*, and no name that arrives is looked up as code. Array bytes land in arrays that exist.
- *Both sides prove the key of the task* over both sides' nonces, so neither a recording nor a false ps gets through,
  and a task that knows its own key cannot speak for another.

One message is under way per connection and direction: a request, then its answer. That is what lets a ps receive a
gradient into the one buffer that it keeps for this worker.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import ssl
import struct
from typing import Any, NamedTuple

HEADER = struct.Struct("<4sHHIIQQdddQ")
MAGIC = b"MST1"
NAN = float("nan")

# --- kinds of message. A worker asks, a ps answers with ANSWER or REFUSAL.
HELLO, CHALLENGE, PROOF = 1, 2, 3  # who is there: fixed sizes, all that a stranger can send or get
DECLARE, PULL, PUSH, NORMS, ASK = 4, 5, 6, 7, 8
ANSWER, REFUSAL = 9, 10

# --- flags
WITH_VALUES = 1  # PUSH: answer with the parameters (a step in one round trip)
SHARED = 2  # the array bytes are in shared memory, not behind this header
SCALED = 4  # PUSH: factors that clip each piece of the slab (float64) come before the gradient
WITH_SLOTS = 8  # PULL, DECLARE: the optimizer's slots come behind the values
STOP = 16  # ANSWER of ps 0: training is to stop
LATE = 32  # ANSWER: this gradient came after its round was closed, and was dropped. NORMS: the factors are not known
KEPT = 128  # PULL: the values that the chief has had kept, not those in use
SUMS = 64  # ANSWER: not the parameters but the sums of squares of the averaged gradient, for clipping

META_LIMIT = 16 << 20  # JSON of a task that has proved itself; a declaration of 100,000 variables is about 8 MB
NONCE = 32
HELLO_BODY = struct.Struct("<32s16s32s")  # task, life (random, one per client object), nonce
DIGEST = 32
PIECES_PER_CALL = 1000  # under IOV_MAX (1024), above which sendmsg refuses
WOULD_BLOCK = -1


class WireError(Exception):
    """The peer does not keep to the protocol. Its connection is closed; nothing else happens."""


class Header(NamedTuple):
    """What every message begins with. Fields that a kind does not use are 0 or NaN.

    ``number`` is a push's number, an answer's version (updates applied by that ps), a hello's attempt.
    ``round`` is the round (sync) or the worker's own count of steps (bounded) that a push belongs to; in an answer,
    the next one. ``rate`` is the learning rate. ``weight`` is samples in the batch. ``scale`` is kept for later.
    ``meta`` and ``data`` are lengths in bytes.
    """

    kind: int
    flags: int = 0
    layout: int = 0
    meta: int = 0
    number: int = 0
    round: int = 0
    rate: float = NAN
    weight: float = 0.0
    scale: float = 1.0
    data: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, *self)


def parse(raw: bytes | bytearray | memoryview) -> Header:
    """The header in the first 64 bytes of ``raw``. Raises WireError where they are not ours."""
    fields = HEADER.unpack_from(raw)
    if fields[0] != MAGIC:
        raise WireError(f"not the muster protocol ({_guess(bytes(raw[:8]))})")
    header = Header(*fields[1:])
    if not HELLO <= header.kind <= REFUSAL:
        raise WireError(f"no such kind of message: {header.kind}")
    return header


def message(kind: int, meta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A header with its JSON, ready to be sent."""
    text = json.dumps(meta, separators=(",", ":")).encode() if meta is not None else b""
    if len(text) > META_LIMIT:
        raise WireError(f"{len(text)} bytes of JSON in one message; the limit is {META_LIMIT}")
    return Header(kind, meta=len(text), **fields).pack() + text


def meta(raw: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises WireError for anything else."""
    try:
        told = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(told, dict):
        raise WireError("not a JSON object")
    return told


def _guess(start: bytes) -> str:
    if start[:2] == b"\x16\x03":
        return "a TLS hello"
    if start.split(b" ")[0] in (b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT"):
        return "an HTTP request"
    return "it begins with " + start.hex(" ")


# --- keys and proofs


def task_key(secret: bytes, task: str) -> bytes:
    """The key of one task: HMAC-SHA256 of its name. A ps derives it from the run's secret; a worker needs only its own.

    The secret is hashed first, since HMAC takes a key and the same key with zeros behind it for one.
    """
    return hmac.new(hashlib.sha256(secret).digest(), b"muster task " + task.encode(), hashlib.sha256).digest()


def hello(task: str, attempt: int, life: bytes, nonce: bytes) -> bytes:
    name = task.encode()
    if len(name) > 32:
        raise WireError(f"the name of a task has at most 32 bytes: {task}")
    return Header(HELLO, number=attempt, data=HELLO_BODY.size).pack() + HELLO_BODY.pack(name, life, nonce)


def read_hello(raw: bytes) -> tuple[str, int, bytes]:
    """Task, attempt and life that a hello (header and body) claims."""
    name, life, _ = HELLO_BODY.unpack_from(raw, HEADER.size)
    try:
        return name.rstrip(b"\0").decode("ascii"), parse(raw).number, life
    except UnicodeDecodeError:
        raise WireError("the name of a task is ASCII") from None


def proof(key: bytes, side: str, said: bytes, nonce: bytes, ps: str) -> bytes:
    """What ``side`` ("worker" or "ps") must show: HMAC-SHA256 over the whole hello, the ps' nonce and its name."""
    return hmac.new(key, b"\0".join([b"muster", side.encode(), ps.encode(), nonce, said]), hashlib.sha256).digest()


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)  # takes the same time wherever they differ


def introduce(sock: socket.socket, ps: str, task: str, attempt: int, life: bytes, key: bytes) -> dict[str, Any]:
    """Prove to a ps, on a blocking socket with a time limit, that we are ``task``, and let it prove itself.

    Returns what it tells about its state. Raises WireError where either side is not who it should be, ConnectionError
    where it hangs up, TimeoutError where it does not answer.
    """
    said = hello(task, attempt, life, os.urandom(NONCE))
    sock.sendall(said)
    _, told = _read(sock, CHALLENGE, NONCE + DIGEST)
    nonce, shown = told[:NONCE], told[NONCE:]
    if not same(shown, proof(key, "ps", said, nonce, ps)):
        raise WireError(f"it does not know the key of {task}, so it is not our {ps}")
    sock.sendall(Header(PROOF, data=DIGEST).pack() + proof(key, "worker", said, nonce, ps))
    header, told = _read(sock, ANSWER, META_LIMIT)
    return meta(told[: header.meta])


def _read(sock: socket.socket, kind: int, limit: int) -> tuple[Header, bytes]:
    header = parse(exactly(sock, HEADER.size))
    if header.kind not in (kind, REFUSAL) or header.meta + header.data > limit:
        raise WireError(f"an answer of kind {header.kind} and {header.meta + header.data} bytes where {kind} was due")
    told = exactly(sock, header.meta + header.data)
    if header.kind == REFUSAL:
        raise WireError(str(meta(told).get("why", "refused")))
    return header, told


def exactly(sock: socket.socket, count: int) -> bytes:
    """``count`` bytes from a blocking socket."""
    raw = bytearray(count)
    view = memoryview(raw)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("it hung up")
        view = view[got:]
    return bytes(raw)


# --- moving bytes without copying them


class Stream:
    """A non-blocking socket. ``receive`` fills a view and tells how far, 0 at the end, WOULD_BLOCK for "not now"."""

    tls = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    def receive(self, view: memoryview) -> int:
        try:
            return self.sock.recv_into(view)
        except BlockingIOError:
            return WOULD_BLOCK

    def send(self, views: list[memoryview]) -> int:
        try:
            return self.sock.sendmsg(views if len(views) <= PIECES_PER_CALL else views[:PIECES_PER_CALL])
        except BlockingIOError:
            return 0

    def pending(self) -> bool:
        """Whether bytes lie in our own process, where poll does not see them."""
        return False


class TlsStream(Stream):
    """The same under TLS, which has no scatter-gather in Python. Only ever used by one thread."""

    tls = True
    sock: ssl.SSLSocket

    def receive(self, view: memoryview) -> int:
        try:
            return self.sock.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return WOULD_BLOCK
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    def send(self, views: list[memoryview]) -> int:
        try:
            return self.sock.send(views[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def pending(self) -> bool:
        return self.sock.pending() > 0


def stream(sock: socket.socket) -> Stream:
    return TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else Stream(sock)


class Outbox:
    """Views that are still to be sent, in order. They are sent from where they lie."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []

    def add(self, *buffers: Any) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self.views.append(view)

    def flush(self, to: Stream) -> bool:
        """Send what the socket takes. True once everything is gone."""
        while self.views:
            sent = to.send(self.views)
            if not sent:
                return False
            self._drop(sent)
        return True

    def own(self) -> None:
        """Copy what is left, since the arrays that it lies in are about to change."""
        self.views = [memoryview(b"".join(self.views))] if self.views else []

    def _drop(self, sent: int) -> None:
        for at, view in enumerate(self.views):
            if sent < view.nbytes:
                self.views[:at] = []
                self.views[0] = view.cast("B")[sent:]
                return
            sent -= view.nbytes
        self.views = []
