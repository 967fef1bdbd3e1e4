"""Bytes of many tasks to whole lines of text, so that no two lines mix on the screen."""

import re

MOST_SHOWN = 2000  # characters of a line on the screen; the log file has all of it
MOST_HELD = 1 << 20
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


class Lines:
    """Cuts one task's output into lines. A progress bar redrawn by carriage returns counts as its last state."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._held = (self._held + data).split(b"\n")
        if len(self._held) > MOST_HELD:
            whole.append(self._held)
            self._held = b""
        return [show(line) for line in whole]

    def rest(self) -> list[str]:
        held, self._held = self._held, b""
        return [show(held)] if held.strip(b"\r") else []


def show(line: bytes) -> str:
    """A line as it may stand on a terminal: its last redrawing, without control characters, cut to a sane length."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    cut = len(line) > MOST_SHOWN * 4
    text = CONTROL.sub("", line[: MOST_SHOWN * 4].decode("utf-8", "replace").expandtabs())
    if cut or len(text) > MOST_SHOWN:
        return f"{text[:MOST_SHOWN]} ... ({len(line):,} bytes; the log has all)"
    return text


class Budget:
    """Lets so many lines a second through; counts the others, so that one task cannot drown the rest."""

    def __init__(self, rate: float = 200.0, burst: float = 2000.0) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, 0.0
        self.hidden = 0

    def allow(self, now: float) -> bool:
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            self.hidden += 1
            return False
        self._left -= 1
        return True

    def take_hidden(self) -> int:
        if self._left < self._burst / 10:
            return 0
        hidden, self.hidden = self.hidden, 0
        return hidden
