"""The usual TensorFlow v1 script with ps and workers, as a careful person writes it.

    python -m bench.peers.plain W1 worker 0 '{"ps": [...], "worker": [...]}' [--sync LOG]

Device filters, so that a worker does not wait for other workers; a second between looks for the chief, so that all
take part; a placeholder for each batch; loss and global step fetched with each step. With ``--sync`` it is the same
script under SyncReplicasOptimizer: it runs for ever, writes rows of (time, global step, loss) to LOG, and is stopped
and continued by signals, since a worker that pauses between two rounds cannot know whether another waits for it.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any

import tensorflow.compat.v1 as tf

from bench.measure.workloads import BATCH, WORKLOADS, Workload, digits, rows
from bench.peers.loop import serve

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)


def config(index: int | None = None, default_threads: bool = False) -> tf.ConfigProto:
    threads = 0 if default_threads else 1
    made = tf.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)
    if index is not None:
        made.device_filters.extend(["/job:ps", f"/job:worker/task:{index}"])
    return made


class Graph:
    def __init__(self, work: Workload, workers: int, sync: bool) -> None:
        self.x = tf.placeholder(tf.float32, [BATCH, work.sizes[0]])
        self.y = tf.placeholder(tf.int64, [BATCH])
        zeros = tf.zeros_initializer()
        self.variables = [tf.get_variable(f"v{i}", shape, initializer=zeros) for i, shape in enumerate(work.shapes)]
        hidden: Any = self.x
        for at in range(0, len(self.variables), 2):
            hidden = tf.matmul(hidden, self.variables[at]) + self.variables[at + 1]
            if at + 2 < len(self.variables):
                hidden = tf.nn.relu(hidden)
        self.loss = tf.losses.sparse_softmax_cross_entropy(self.y, hidden)
        self.optimizer = tf.train.GradientDescentOptimizer(work.rate)
        if sync:
            self.optimizer = tf.train.SyncReplicasOptimizer(self.optimizer, workers, workers)
        self.step = tf.train.get_or_create_global_step()
        self.train = self.optimizer.minimize(self.loss, global_step=self.step)
        self.given = [tf.placeholder(tf.float32, shape) for shape in work.shapes]
        self.set = [tf.assign(v, value) for v, value in zip(self.variables, self.given, strict=True)]


class Plain:
    stride = 1

    def __init__(self, work: Workload, graph: Graph, session: Any, seed: int) -> None:
        self.work, self.graph, self.session = work, graph, session
        self.phases: dict[str, float] = {}
        self.data, self.rows = digits(), rows(seed)

    def reset(self, first: bool) -> int:
        graph = self.graph
        if first:
            for assign, given, value in zip(graph.set, graph.given, self.work.start(), strict=True):
                self.session.run(assign.op, {given: value})
        return int(self.session.run(graph.step))

    def step(self) -> tuple[int, float]:
        graph, chosen = self.graph, next(self.rows)
        feed = {graph.x: self.data[0][chosen], graph.y: self.data[1][chosen]}
        _, loss, step = self.session.run([graph.train, graph.loss, graph.step], feed)
        return int(step), float(loss)


def wait_for_chief(target: str, settings: tf.ConfigProto) -> None:
    ready = tf.report_uninitialized_variables(tf.global_variables())
    manager = tf.train.SessionManager(ready_op=ready, graph=tf.get_default_graph(), recovery_wait_secs=1)
    manager.wait_for_session(target, config=settings).close()


def for_ever(side: Plain, path: str) -> None:
    """Train until killed; a row a step, written at once."""
    os.write(1, b'{"ready": ["sync"]}\n')
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        step, loss = side.step()
        os.write(log, struct.pack("<3d", time.monotonic(), step, loss))


def main() -> None:
    work, role, index = WORKLOADS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    seats = json.loads(sys.argv[4])
    log = sys.argv[sys.argv.index("--sync") + 1] if "--sync" in sys.argv else ""
    default_threads = "--default-threads" in sys.argv
    if not seats:
        graph = Graph(work, 1, False)
        with tf.train.MonitoredTrainingSession(config=config()) as session:
            serve({"t0 v1": Plain(work, graph, session, 0)})
        return
    cluster = tf.train.ClusterSpec(seats)
    own = config(None, default_threads)
    server = tf.train.Server(cluster, role, index, config=own)
    if role == "ps":
        server.join()
    workers = len(seats["worker"])
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        graph = Graph(work, workers, bool(log))
    hooks = [graph.optimizer.make_session_run_hook(index == 0, num_tokens=0)] if log else []
    settings = config(index, default_threads)
    if index:
        wait_for_chief(server.target, settings)
    with tf.train.MonitoredTrainingSession(
        server.target, is_chief=index == 0, config=settings, hooks=hooks, stop_grace_period_secs=1
    ) as session:
        side = Plain(work, graph, session, index)
        if not log:
            serve({"plain threads" if default_threads else "plain": side})
        else:
            for_ever(side, log)


if __name__ == "__main__":
    main()
