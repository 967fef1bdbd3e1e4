"""What a task's log has gained since the last look, though it was rotated in between."""

import os
from pathlib import Path


class Tail:
    """Reads the log at ``path`` from its oldest part on. No file is held open: a run may have a thousand."""

    def __init__(self, path: Path) -> None:
        self._path, self._old = path, path.with_suffix(".log.1")
        self._inode, self._at = 0, 0  # of the part that was read last, and how far

    def more(self) -> bytes:
        """The bytes that came since the last call; nothing where there is no log yet."""
        before, inode = self._inode, _inode(self._path)
        if inode and inode == before:
            return self._read(self._path)
        # Rotated, or seen for the first time. The old part is the one that we were reading; if not, it is new to us.
        got = self._read(self._old) if _inode(self._old) != inode else b""
        return got + self._read(self._path)

    def _read(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._at = inode, 0
                file.seek(self._at)
                got = file.read()
        except FileNotFoundError:  # before its first line, or between a rotation and the next one
            return b""
        self._at += len(got)
        return got


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
