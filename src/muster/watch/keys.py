"""Key strokes of this terminal for the one task that has it (``muster run --only``), as a debugger needs them."""

import os
import shutil
import termios
import tty
from typing import Any, TextIO

from muster.events import Event
from muster.plan import Task


class Keys:
    """A Doorbell. The terminal is raw while it is attached, so Ctrl-C reaches the task and not the launcher."""

    def __init__(self, terminal: TextIO) -> None:
        self._fd = terminal.fileno()
        self._before = termios.tcgetattr(self._fd)
        self._launcher: Any = None
        self._task: Task | None = None

    def fileno(self) -> int:
        return self._fd

    def attach(self, launcher: Any, task: Task) -> None:
        self._launcher, self._task = launcher, task
        tty.setraw(self._fd, termios.TCSANOW)
        mode = termios.tcgetattr(self._fd)
        mode[1] |= termios.OPOST  # our own lines still want carriage returns
        termios.tcsetattr(self._fd, termios.TCSANOW, mode)

    def take(self, now: float) -> list[Event]:
        got = os.read(self._fd, 4096)
        if self._launcher and self._task and got:
            columns, rows = shutil.get_terminal_size()
            self._launcher.resize(self._task, rows, columns)
            self._launcher.type(self._task, got)
        return []

    def close(self) -> None:
        termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
