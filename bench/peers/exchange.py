"""The same exchange over ZeroMQ and over gRPC: slabs, optimizer and worker are ours, only what carries bytes differs.

    python -m bench.peers.exchange zmq W1 0 2 ipc:///tmp/...       ps 0 of 2
    python -m bench.peers.exchange grpc W1 0 2 unix:/tmp/...

A push takes the gradient of a slab and is answered with its values, all ps at once, as in ``muster.ps``. No keys, no
modes, no recovery: whoever wins against this has not paid for those.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.measure.workloads import WORKLOADS, Workload
from muster.ps.optimizers import BLOCK, parse
from muster.ps.slabs import Declaration, Layout, Parameter, aligned

HEAD = struct.Struct("<Qd")  # what is asked (or the count of updates), the learning rate
PUSH, PULL, STORE = 1, 2, 3
METHOD = "/muster.Exchange/Ask"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def layout(work: Workload, ps: int) -> Layout:
    rows = [Parameter(f"v{i}", shape) for i, shape in enumerate(work.shapes)]
    return Declaration(tuple(rows), {"class_name": "SGD", "config": {}}, ps).layout()


class Done(NamedTuple):
    step: int


class Slab:
    """One ps: a few lines, since it only has to do SGD. A gradient comes as one buffer or as one per piece."""

    def __init__(self, work: Workload, index: int, ps: int) -> None:
        whole = layout(work, ps)
        self.cut = whole.cuts[index]
        self.values = aligned(self.cut.size)
        self.optimizer = parse({"class_name": "SGD", "config": {}})
        self.room = [aligned(BLOCK) for _ in range(2)]
        self.updates = 0

    def take(self, asked: int, rate: float, buffers: Sequence[Any]) -> int:
        if asked == STORE:
            self.values[...] = np.frombuffer(buffers[0], np.float32)
        elif asked == PUSH:
            for piece, buffer in zip(self.cut.pieces, buffers, strict=True):
                self._descend(self.values[piece.start : piece.stop], np.frombuffer(buffer, np.float32), rate)
            self.updates += 1
        return self.updates

    def _descend(self, values: Any, gradient: Any, rate: float) -> None:
        for low in range(0, len(values), BLOCK):
            part = values[low : low + BLOCK]
            room = [array[: len(part)] for array in self.room]
            self.optimizer.update(part, gradient[low : low + BLOCK], [], rate, self.updates + 1, room)

    def split(self, data: memoryview) -> list[memoryview]:
        """One gradient in a single buffer, by piece."""
        ends = np.cumsum([(piece.stop - piece.start) * 4 for piece in self.cut.pieces])
        return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class Exchange:
    """The worker's side: what it has in common with ``muster.ps.client.Client`` is what the benchmark needs."""

    def __init__(self, work: Workload, ps: int) -> None:
        self.layout = layout(work, ps)
        self.values = aligned(self.layout.size)
        self.views = self.layout.views(self.values)
        self.step_now = 0

    def store(self, values: Sequence[Any]) -> None:
        flat = aligned(self.layout.size)
        for view, value in zip(self.layout.views(flat), values, strict=True):
            view[...] = value
        self._ask(STORE, 0.0, [[flat[cut.start : cut.stop].data] for cut in self.layout.cuts])

    def pull(self) -> Done:
        return self._ask(PULL, 0.0, [[] for _ in self.layout.cuts])

    def step(self, gradients: Sequence[Any], samples: float, rate: float) -> Done:
        flat = [memoryview(g).cast("B") for g in gradients]
        parts = []
        for cut in self.layout.cuts:
            edges = [(p.parameter, p.first * 4, (p.first + p.stop - p.start) * 4) for p in cut.pieces]
            parts.append([flat[at][low:high] for at, low, high in edges])
        return self._ask(PUSH, rate, parts)

    def _ask(self, asked: int, rate: float, parts: list[list[Any]]) -> Done:
        raise NotImplementedError

    def _landed(self, index: int, values: Any) -> None:
        cut = self.layout.cuts[index]
        np.copyto(self.values[cut.start : cut.stop], np.frombuffer(values, np.float32))


class OverZmq(Exchange):
    """One DEALER a ps; pieces go out from where they lie (``copy=False`` above 64 KiB, as pyzmq has it)."""

    def __init__(self, work: Workload, addresses: Sequence[str]) -> None:
        import zmq

        super().__init__(work, len(addresses))
        context = zmq.Context.instance()
        self.sockets = [context.socket(zmq.DEALER) for _ in addresses]
        for sock, address in zip(self.sockets, addresses, strict=True):
            sock.connect(address)

    def _ask(self, asked: int, rate: float, parts: list[list[Any]]) -> Done:
        head = HEAD.pack(asked, rate)
        for sock, part in zip(self.sockets, parts, strict=True):
            sock.send_multipart([head, *part], copy=False)
        for index, sock in enumerate(self.sockets):
            told, values = sock.recv_multipart(copy=False)
            self._landed(index, values.buffer)
            if not index:
                self.step_now = HEAD.unpack(told.buffer)[0]
        return Done(self.step_now)


class OverGrpc(Exchange):
    """One unary call a ps, all in flight; messages are bytes, so each is put together by one copy."""

    def __init__(self, work: Workload, addresses: Sequence[str]) -> None:
        import grpc

        super().__init__(work, len(addresses))
        channels = [grpc.insecure_channel(address, UNLIMITED) for address in addresses]
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        self.calls = [channel.unary_unary(METHOD) for channel in channels]

    def _ask(self, asked: int, rate: float, parts: list[list[Any]]) -> Done:
        head = HEAD.pack(asked, rate)
        answers = [call.future(b"".join([head, *part])) for call, part in zip(self.calls, parts, strict=True)]
        for index, answer in enumerate(answers):
            told = answer.result()
            self._landed(index, memoryview(told)[HEAD.size :])
            if not index:
                self.step_now = HEAD.unpack_from(told)[0]
        return Done(self.step_now)


def serve_zmq(slab: Slab, address: str) -> None:
    import zmq

    sock = zmq.Context.instance().socket(zmq.ROUTER)
    sock.bind(address)
    print("ready", flush=True)
    while True:
        who, head, *buffers = sock.recv_multipart(copy=False)
        updates = slab.take(*HEAD.unpack(head.buffer), [frame.buffer for frame in buffers])
        # A copy, since ZeroMQ sends from a thread of its own while the next gradient changes the values.
        sock.send_multipart([who.bytes, HEAD.pack(updates, 0.0), slab.values.tobytes()], copy=False)


def serve_grpc(slab: Slab, address: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def ask(request: bytes, context: Any) -> bytes:
        asked, rate = HEAD.unpack_from(request)
        data = memoryview(request)[HEAD.size :]
        buffers = slab.split(data) if asked == PUSH else [data]
        return b"".join([HEAD.pack(slab.take(asked, rate, buffers), 0.0), slab.values.data])

    # One thread, like the loop of muster.ps: two would only wait for the interpreter, and for each other's update.
    server = grpc.server(ThreadPoolExecutor(1), options=UNLIMITED)
    service, _, method = METHOD[1:].partition("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(ask)})
    server.add_generic_rpc_handlers([handler])
    server.add_insecure_port(address)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def main() -> None:
    kind, workload, index, ps, address = sys.argv[1:6]
    slab = Slab(WORKLOADS[workload], int(index), int(ps))
    (serve_zmq if kind == "zmq" else serve_grpc)(slab, address)


if __name__ == "__main__":
    main()
