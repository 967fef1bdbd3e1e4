"""Steps per second of 2 ps and 3 workers on the 784x10 softmax, and how soon a ps is up.

``bare``: each worker sends a gradient and takes values back, nothing else. ``softmax``: it also computes a batch of 100
in NumPy. Unix sockets and TCP, async and sync, in turn; every value is kept, medians are printed.

    python bench/ps_exchange.py [--seconds 1.5] [--repeats 3] [--out bench/results/ps_exchange.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from muster.ps.connect import client
from muster.ps.slabs import Parameter

SECRET = "5a" * 32
PS, WORKERS, BATCH = 2, 3, 100
ENV = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def cluster(mode: str, tcp: bool) -> dict[str, Any]:
    ports = []
    for _ in range(PS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    seats = {"ps": [f"127.0.0.1:{port}" for port in ports], "worker": ["127.0.0.1:0"] * WORKERS}
    return {"cluster": seats, "chief": "worker/0", "mode": mode, "local": not tcp}


@contextmanager
def servers(env: dict[str, str]) -> Iterator[float]:
    """The ps, up; yields the seconds that it took until all said so."""
    began, processes, agents = time.perf_counter(), [], []
    for index in range(PS):
        ours, theirs = socket.socketpair()
        task = {"MUSTER_TASK": f"ps/{index}", "MUSTER_FD": str(theirs.fileno())}
        command = [sys.executable, "-m", "muster.ps"]
        processes.append(subprocess.Popen(command, env={**env, **task}, pass_fds=[theirs.fileno()]))
        theirs.close()
        ours.sendall(json.dumps({"kind": "Hello", "secret": SECRET}).encode() + b"\n")
        agents.append(ours)
    for agent in agents:
        agent.recv(4096)
    try:
        yield time.perf_counter() - began
    finally:
        for agent in agents:
            agent.close()
        for process in processes:
            process.wait(10)


def work(seconds: float, compute: bool) -> None:
    """One worker: says how many steps it made."""
    here = client(os.environ, bytes.fromhex(SECRET))
    rows = [Parameter("w", (784, 10)), Parameter("b", (10,))]
    here.declare(rows, {"class_name": "SGD"}, [np.zeros(p.shape, np.float32) for p in rows])
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH, 784)).astype(np.float32)
    y = random.integers(0, 10, BATCH)
    print("ready", flush=True)
    sys.stdin.readline()
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        if compute:
            scores = x @ here.views[0] + here.views[1]
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            chances /= chances.sum(axis=1, keepdims=True)
            chances[np.arange(BATCH), y] -= 1
            np.matmul(x.T, chances / BATCH, out=here.gradients[0])
            chances.mean(axis=0, out=here.gradients[1])
        here.step(rate=0.01)
        count += 1
    here.turn("done")
    print(count, flush=True)


def measure(mode: str, tcp: bool, compute: bool, seconds: float) -> tuple[float, float]:
    """Global steps a second (sync: rounds), and seconds until the ps were up."""
    env = {**ENV, "MUSTER_CLUSTER": json.dumps(cluster(mode, tcp)), "MUSTER_RUN": f"bench-{os.getpid()}"}
    with servers(env) as up:
        command = [sys.executable, __file__, "--worker", str(seconds), *(["--compute"] if compute else [])]
        workers = [
            subprocess.Popen(
                command,
                env={**env, "MUSTER_TASK": f"worker/{i}"},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for i in range(WORKERS)
        ]
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        counts = [int(worker.communicate(timeout=60)[0]) for worker in workers]
    return (sum(counts) if mode == "async" else max(counts)) / seconds, up


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=1.5)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ps_exchange.json")
    options.add_argument("--worker", type=float)
    options.add_argument("--compute", action="store_true")
    args = options.parse_args()
    if args.worker:
        work(args.worker, args.compute)
        return
    values: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for mode, tcp, compute in itertools.product(("async", "sync"), (False, True), (False, True)):
            rate, up = measure(mode, tcp, compute, args.seconds)
            name = f"{mode} {'tcp' if tcp else 'unix'} {'softmax' if compute else 'bare'}"
            values.setdefault(name, []).append(round(rate))
            values.setdefault("seconds until 2 ps are up", []).append(round(up, 3))
    medians = {name: statistics.median(rates) for name, rates in values.items()}
    told = {"what": "2 ps, 3 workers, 784x10: steps/s", "load": os.getloadavg(), "medians": medians, "values": values}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n")
    for name, median in medians.items():
        print(f"{name:28} {median:10,.3f}  ({min(values[name]):,.3f} to {max(values[name]):,.3f})")


if __name__ == "__main__":
    main()
