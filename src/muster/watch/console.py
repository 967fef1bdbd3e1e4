"""The console that all verbs print to: text as it is, and a reader that leaves changes nothing.

Names of hosts, files and errors hold brackets and colons, which are no markup and no emoji. And a run goes on where its
screen cannot be written any more: ``tee`` has ended, the disk is full. The journal and the logs have all of it.
"""

import contextlib
import io
import os
import sys
from typing import TextIO

from rich.console import Console


class Lasting(io.TextIOBase):
    """A stream to the outside that never fails: once it cannot be written, what comes is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        if not self._lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def _lose(self) -> None:
        """What is still in the buffer goes nowhere: Python would try again as it ends, and change the exit code."""
        self._lost = True
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def console(stderr: bool = False) -> Console:
    """On stdout, or on stderr."""
    stream = Lasting(sys.stderr if stderr else sys.stdout)
    return Console(file=stream, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
