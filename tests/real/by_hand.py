"""A run without Muster's launcher: the tasks as plain processes, each with a pipe, and the start barrier.

What ``muster run`` does beyond this (agents, placement, supervision) is tested elsewhere; this is for the task side.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Task:
    name: str
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    log: Path
    unread: bytes = b""
    reports: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["kind"] == kind]

    def read(self) -> bool:
        try:
            data = self.pipe.recv(65536)
        except ConnectionResetError:  # it ended with something of ours unread; what it wrote before is still there
            return True
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.reports += [json.loads(line) for line in lines]
        return bool(data)


@dataclass
class Outcome:
    tasks: dict[str, Task]
    codes: dict[str, int | None]  # None: still ran when the chief was done and the grace time over, and was ended
    seconds: float

    def text(self, task: str) -> str:
        return self.tasks[task].log.read_text()


def run(
    script: Path | str,
    folder: Path,
    *args: str,
    roles: dict[str, int],
    kind: str = "v1",
    tf1: bool = False,
    role_flags: bool = False,
    chief: str = "worker/0",
    limit: float = 90.0,
    grace: float = 10.0,
    env: dict[str, str] | None = None,
) -> Outcome:
    """Start every task of ``roles``, open the barrier when all workers are ready; after the chief, end the others."""
    places = addresses(roles)
    began = time.monotonic()
    tasks: dict[str, Task] = {}
    try:
        for role, size in roles.items():
            for index in range(size):
                argv = ["--tf1"] if tf1 else []
                argv += [str(script), *([f"--job_name={role}", f"--task_index={index}"] if role_flags else []), *args]
                tasks[f"{role}/{index}"] = _start(f"{role}/{index}", argv, places, kind, chief, folder, env or {})
        codes = _follow(tasks, chief, began + limit, grace)
    finally:
        for task in tasks.values():
            if task.process.poll() is None:
                task.process.send_signal(signal.SIGKILL)
            task.process.wait()
            task.pipe.close()
    return Outcome(tasks, codes, time.monotonic() - began)


def addresses(roles: dict[str, int]) -> dict[str, list[str]]:
    held = {role: [socket.create_server(("127.0.0.1", 0)) for _ in range(size)] for role, size in roles.items()}
    found = {role: [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets] for role, sockets in held.items()}
    for sockets in held.values():
        for each in sockets:
            each.close()
    return found


def _start(
    name: str,
    argv: list[str],
    places: dict[str, list[str]],
    kind: str,
    chief: str,
    folder: Path,
    extra: dict[str, str],
) -> Task:
    ours, theirs = socket.socketpair()
    role, index = name.split("/")
    cluster = {"cluster": places, "chief": chief, "engine": "tensorflow", "kind": kind, "mode": "async", "spare": 0}
    env = {
        **os.environ,
        "MUSTER_RUN": "by-hand",
        "MUSTER_TASK": name,
        "MUSTER_ATTEMPT": "1",
        "MUSTER_CLUSTER": json.dumps({**cluster, "max_staleness": None, "checkpoints": ""}),
        "MUSTER_FD": str(theirs.fileno()),
        "TF_CONFIG": json.dumps({"cluster": places, "task": {"type": role, "index": int(index)}}),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        **extra,
    }
    log = folder / f"{role}-{index}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "muster.train.start", *argv]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, pass_fds=[theirs.fileno()], cwd=folder)
    theirs.close()
    ours.sendall(b'{"kind":"Hello","secret":null}\n')
    return Task(name, process, ours, log)


def _follow(tasks: dict[str, Task], chief: str, limit: float, grace: float) -> dict[str, int | None]:
    workers = [task for name, task in tasks.items() if not name.startswith("ps/")]
    opened, end = False, limit
    while time.monotonic() < end:
        _read(list(tasks.values()))
        if not opened and all(task.of("Ready") for task in workers):
            opened = True
            for task in workers:
                task.pipe.sendall(b'{"kind":"Go"}\n')
        codes = {name: task.process.poll() for name, task in tasks.items()}
        if any(code not in (0, None) for code in codes.values()):
            end = min(end, time.monotonic() + 2)
        if all(task.process.poll() is not None for task in workers):
            break
        if codes[chief] is not None:
            end = min(end, time.monotonic() + grace)
    _read(list(tasks.values()))
    return {name: task.process.poll() for name, task in tasks.items()}


def _read(tasks: list[Task]) -> None:
    ready, _, _ = select.select([task.pipe for task in tasks], [], [], 0.05)
    for task in tasks:
        if task.pipe in ready and not task.read():
            time.sleep(0.02)  # ended: its exit is seen by poll
