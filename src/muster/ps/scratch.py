"""Where the local sockets of a run are. Apart from the loop, since the launcher asks too and needs no NumPy."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def folder(run: str) -> Path:
    """The folder of a run's local sockets; both sides come to the same one.

    Not under XDG_RUNTIME_DIR, which is emptied when its user logs out. A socket's path has at most 107 bytes.
    """
    name = run if len(run) <= 60 else run[:40] + hashlib.sha256(run.encode()).hexdigest()[:16]
    return Path("/tmp") / f"muster-{os.getuid()}-{name or 'alone'}"


def socket_path(run: str, index: int) -> str:
    return str(folder(run) / f"ps-{index}.sock")
