"""Ends what is left of a run on this machine, by the run id in each process's environment: never by name."""

import contextlib
import os
import signal
import time
from pathlib import Path


def processes_of(run: str) -> list[int]:
    """Living processes that carry ``run`` in their environment (zombies and ourselves apart)."""
    mark = b"MUSTER_RUN=" + run.encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and _state(int(name)) != "Z":
                found.append(int(name))
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def sweep_run(run: str, grace: float = 0.0, limit: float = 5.0) -> int:
    """TERM, then KILL after ``grace`` seconds, whatever carries ``run``. Returns how many there were."""
    left = processes_of(run)
    count = len(left)
    if left and grace > 0:
        _signal(left, signal.SIGTERM)
        until = time.monotonic() + grace
        while (left := processes_of(run)) and time.monotonic() < until:
            time.sleep(0.05)
    until = time.monotonic() + limit
    while left and time.monotonic() < until:
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)
        left = processes_of(run)
    return count


def _signal(pids: list[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)
