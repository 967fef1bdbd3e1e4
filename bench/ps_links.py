"""One worker and one ps over Unix sockets, shared memory, TCP and TLS: round trip, throughput, time to connect.

    python -m bench ps_links [--seconds 1.0] [--repeats 5]

A step sends a gradient and takes values back through the client that training uses; the ps applies it. Three sizes: 16
floats (a round trip), half of W1 (15.7 KB), and half of W4 (20 MB each way). Repeats are interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.measure.crews import Run
from bench.record import Record
from muster.ps import client as clients
from muster.ps.client import Client
from muster.ps.connect import introduced
from muster.ps.slabs import Parameter

SIZES = {"16 floats": 16, "15.7 KB": 3920, "20 MB": 5_063_000}
WAYS = ("unix", "shm", "tcp", "tls")


def connect(run: Run) -> tuple[Client, float]:
    """A client that has proved itself, and the milliseconds that this took."""
    began = time.perf_counter()
    made = introduced({**os.environ, **run.env("worker/0")}, run.hello("worker/0"))
    return made, 1000 * (time.perf_counter() - began)


def measure(way: str, floats: int, seconds: float, folder: Path) -> dict[str, float]:
    run = Run(way, 1, 1)
    servers = run.servers(1, folder)
    clients.SHARE_FROM = 0 if way == "shm" else 1 << 62
    try:
        client, connecting = connect(run)
        client.declare([Parameter("w", (floats,))], {"class_name": "SGD"}, [np.zeros(floats, np.float32)])
        gradient = np.ones(floats, np.float32)
        for _ in range(3):
            client.step([gradient], rate=0.0)
        times = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            client.step([gradient], rate=0.0)
            times.append(time.perf_counter() - began)
        client.close()
    finally:
        for server in servers:
            server.end()
    middle = statistics.median(times)
    return {"round_trip_us": 1e6 * middle, "gb_per_s": 8 * floats / middle / 1e9, "connect_ms": connecting}


def main() -> None:
    options = argparse.ArgumentParser(prog="bench ps_links")
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    record = Record("ps_links", "a step of one worker with one ps, by what carries it")
    for repeat in range(args.repeats):
        for size, floats in SIZES.items():
            for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
                with tempfile.TemporaryDirectory() as folder:
                    told = measure(way, floats, args.seconds, Path(folder))
                record.add({"size": size, "way": way, "load": os.getloadavg()[0], **told})
    record.write("round_trip_us", "gb_per_s")


if __name__ == "__main__":
    main()
