"""`muster run` to its first step, against starting the five scripts by hand at the same time: a ratio, interleaved.

    python -m bench.launch

Both sides run the same script, 2 ps and 3 workers on this machine. A worker's first step is when its first training
step has come back; the time of a side is that of its last worker. By hand means what a careful person would do: five
processes at once, each with its TF_CONFIG, and the ps killed afterwards.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import Record

PAIRS = 5
WORKERS = 3
MUSTER = Path(sys.executable).with_name("muster")
SCRIPT = """
import functools, json, os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
from tensorflow.python.training import session_manager
# Else a worker that comes just before the chief's initial values sleeps for 30 s, on both sides, by luck.
session_manager.SessionManager = functools.partial(session_manager.SessionManager, recovery_wait_secs=1)
told = json.loads(os.environ["TF_CONFIG"])
job, index = told["task"]["type"], told["task"]["index"]
cluster = tf.train.ClusterSpec(told["cluster"])
config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
server = tf.train.Server(cluster, job_name=job, task_index=index, config=None if job == "ps" else config)
if job == "ps":
    server.join()
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{index}", cluster=cluster)):
    x = tf.placeholder(tf.float32, [None, 784])
    w = tf.get_variable("w", [784, 10], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0))
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
batch = np.ones([100, 784], "f")
with tf.train.MonitoredTrainingSession(server.target, is_chief=index == 0, config=config) as session:
    session.run(train, {x: batch})
    with open(sys.argv[1] + f"/{index}", "w") as file:
        file.write(str(time.time()))
"""


def first_steps(folder: Path) -> float | None:
    """When the last worker made its first step, or None while somebody has not."""
    try:
        return max(float((folder / str(n)).read_text()) for n in range(WORKERS))
    except (FileNotFoundError, ValueError):
        return None


def with_muster(script: Path, folder: Path) -> float:
    began = time.time()
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("muster")),
            "run",
            "--kind",
            "v1",
            "--done",
            "all-workers",
            str(script),
            str(folder),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    assert run.returncode == 0
    ended = first_steps(folder)
    assert ended is not None
    return ended - began


def by_hand(script: Path, folder: Path) -> float:
    ports = free_ports(2 + WORKERS)
    cluster = {"ps": [f"127.0.0.1:{p}" for p in ports[:2]], "worker": [f"127.0.0.1:{p}" for p in ports[2:]]}
    seats = [("ps", 0), ("ps", 1), *(("worker", n) for n in range(WORKERS))]
    began = time.time()
    tasks = []
    for job, index in seats:
        env = os.environ | {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
            "CUDA_VISIBLE_DEVICES": "",
        }
        tasks.append(
            subprocess.Popen(
                [sys.executable, str(script), str(folder)],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        while (ended := first_steps(folder)) is None:
            if time.time() - began > 120:
                raise TimeoutError("a worker made no step within 120 s")
            time.sleep(0.02)
    finally:
        for task in tasks:
            task.send_signal(signal.SIGKILL)
            task.wait()
    return ended - began


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for sock in held:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def main() -> None:
    record = Record("launch", "muster run to first step, over starting the five scripts by hand together")
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "first_step.py"
        script.write_text(SCRIPT)
        for pair in range(PAIRS):
            seconds = {}
            for side in (with_muster, by_hand) if pair % 2 == 0 else (by_hand, with_muster):
                folder = Path(place) / f"{side.__name__}-{pair}"
                folder.mkdir()
                seconds[side.__name__] = side(script, folder)
            record.add(
                {
                    "muster_s": seconds["with_muster"],
                    "by_hand_s": seconds["by_hand"],
                    "ratio": seconds["with_muster"] / seconds["by_hand"],
                }
            )
    record.write("ratio", "muster_s", "by_hand_s")


if __name__ == "__main__":
    main()
