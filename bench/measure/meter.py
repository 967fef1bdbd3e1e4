"""What a set of processes has used: processor seconds from /proc, bytes over their TCP sockets from ``ss``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PID = re.compile(r"pid=(\d+)")
ACKED = re.compile(r"bytes_acked:(\d+)")


def cpu(pids: Collection[int]) -> float:
    """User and system seconds of all threads of ``pids`` so far; of those that are gone, nothing."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def all_work() -> float:
    """User and system seconds of everything on this machine so far, all cores together."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(None, 8)[1:8])
    return (user + nice + system + irq + softirq) / TICK


def sent(pids: Collection[int]) -> int | None:
    """Bytes that TCP sockets of ``pids`` have sent and seen acknowledged; None where ``ss`` is not installed."""
    if shutil.which("ss") is None:
        return None
    told = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, timeout=20, check=False).stdout
    return count(told, pids)


def count(lines: str, pids: Collection[int]) -> int:
    """The same from the output of ``ss -tinpOH``: one line a socket."""
    total = 0
    for line in lines.splitlines():
        owners = {int(pid) for pid in PID.findall(line)}
        acked = ACKED.search(line)
        if acked and owners & set(pids):
            total += int(acked[1])
    return total
