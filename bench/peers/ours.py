"""A worker of ours with a loop of its own: ``muster.connect`` with a TensorFlow step over aliased tensors.

    python -m bench.peers.ours W1            with BENCH_SIDES, BENCH_WORKER and MUSTER_FD

One process trains over several exchanges in turn (Unix sockets, shared memory, TCP, TLS, ZeroMQ, gRPC), each with ps of
its own: what differs between two of them is then the exchange alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.measure.workloads import BATCH, WORKLOADS, Workload
from bench.peers.loop import Side, serve
from bench.peers.model import Fresh, gradients_of, one_thread
from muster.ps import client as clients
from muster.train.direct import direct

import tensorflow as tf  # isort: skip


class Connected:
    """``exchange``: a Session of ``muster.connect``, or what ``bench.peers.exchange`` has in its place."""

    stride = 1

    def __init__(self, work: Workload, client: Any, send: Any, batch: Fresh) -> None:
        self.work, self.client, self.send, self.batch = work, client, send, batch
        self.phases = {"batch": 0.0, "compute": 0.0, "exchange": 0.0}
        self.inputs = [tf.experimental.dlpack.from_dlpack(view.__dlpack__()) for view in client.views]
        self.function = compiled(work, batch)

    def reset(self, first: bool) -> int:
        if first:
            self.client.store(self.work.start())
        self.client.pull()
        return int(self.client.step_now)

    def step(self) -> tuple[int, float]:
        began = time.perf_counter()
        self.batch.next()
        ready = time.perf_counter()
        loss, *gradients = self.function(*self.inputs, self.batch.x, self.batch.y)
        loss = float(loss)
        computed = time.perf_counter()
        done = self.send([memoryview(gradient) for gradient in gradients], loss)
        phases = self.phases
        phases["batch"] += ready - began
        phases["compute"] += computed - ready
        phases["exchange"] += time.perf_counter() - computed
        return int(done.step), loss


USUAL = clients.SHARE_FROM  # bytes of a slab from which Muster itself shares memory
_compiled: list[Any] = []


def compiled(work: Workload, batch: Fresh) -> Any:
    """The step as one function, called as `fit` calls it, shared by all exchanges of this process."""
    if not _compiled:
        count = len(work.shapes)
        specs = [tf.TensorSpec(shape, tf.float32) for shape in work.shapes]
        specs += [tf.TensorSpec(batch.x.shape, tf.float32), tf.TensorSpec(batch.y.shape, tf.int64)]

        def step(*args: Any) -> Any:
            loss, gradients = gradients_of(list(args[:count]), *args[count:])
            return [loss, *gradients]

        jit = True if "--jit" in sys.argv else None
        traced = tf.function(step, autograph=False, jit_compile=jit).get_concrete_function(*specs)
        _compiled.append(direct(traced, tf))
    return _compiled[0]


def over_muster(work: Workload, side: dict[str, Any], batch: Fresh) -> Connected:
    """What ``muster.connect`` does, with the environment of this side in place of the process' own."""
    from muster.ps.connect import Session, introduced
    from muster.train.report import channel

    clients.SHARE_FROM = {True: 0, False: 1 << 62, None: USUAL}[side["share"]]
    session = Session(introduced(side["env"], side["hello"]), channel())
    start = {f"v{i}": value for i, value in enumerate(work.start())}
    session.declare(start, "sgd", work.rate)
    return Connected(work, session.client, lambda found, loss: session.step(found, BATCH, loss), batch)


def over(work: Workload, side: dict[str, Any], batch: Fresh) -> Connected:
    from bench.peers.exchange import OverGrpc, OverZmq

    kind = OverZmq if side["kind"] == "zmq" else OverGrpc
    client = kind(work, side["addresses"])
    return Connected(work, client, lambda found, loss: client.step(found, BATCH, work.rate), batch)


def main() -> None:
    if "--default-threads" not in sys.argv:
        one_thread()
    work = WORKLOADS[sys.argv[1]]
    batch = Fresh(int(os.environ["BENCH_WORKER"]))
    sides: dict[str, Side] = {}
    for side in json.loads(os.environ["BENCH_SIDES"]):
        sides[side["name"]] = over_muster(work, side, batch) if side["kind"] == "muster" else over(work, side, batch)
    serve(sides)


if __name__ == "__main__":
    main()
