"""Stand-in scripts that need no TensorFlow (a task costs 0.1 s), and ``muster run`` as a process of its own.

Every wait here is for a condition, and has a limit.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from muster.events import Event, Exited, Spawned
from muster.journal import RunFolder, read

LIMIT = 60.0
PRELUDE = """\
import json, os, signal, socket, sys, time
import muster
me, attempt = os.environ["MUSTER_TASK"], int(os.environ["MUSTER_ATTEMPT"])
role, index = me.split("/")
told = json.loads(os.environ["MUSTER_CLUSTER"])["cluster"]
host, _, port = told[role][int(index)].rpartition(":")
def say(*words): print(*words, flush=True)
def listen(): return socket.create_server((host, int(port)))
def serve():
    global server
    server = listen()
    while True: time.sleep(600)
"""
SERVE = PRELUDE + 'if role == "ps": serve()\nserver = listen()\n'
STEPS = """
muster.ready()
for step in range(1, 11):
    muster.report(step=step, loss=1 / step)
    time.sleep(0.02)
"""
FOREVER = """
muster.ready()
step = 0
while not os.path.exists("enough"):
    step += 1
    muster.report(step=step)
    time.sleep(0.05)
"""
# Before the "if role" of SERVE: a grandchild in a session of its own that ignores TERM.
ORPHANS = """
if role == "worker":
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("orphan", os.getpid())
        while True: time.sleep(600)
    os.wait()
"""
# What a shell on the way would make something else of.
WORDS = [
    "",
    " ",
    "'",
    '"',
    "$HOME",
    "\\",
    "\\n",
    "a\nb",
    "*",
    "~",
    "--workers",
    "9",
    "--",
    "-h",
    "é",
    "训练",
    "`id`",
    ";",
]

Found = TypeVar("Found")


def until(found: Callable[[], Found], limit: float = LIMIT, what: str = "") -> Found:
    """What ``found`` returns once that is true."""
    end = time.monotonic() + limit
    while not (got := found()):
        assert time.monotonic() < end, f"not within {limit:.0f} s: {what or found}"
        time.sleep(0.02)
    return got


def slack(seconds: float) -> float:
    """``seconds`` on an idle machine; longer while others want its processors."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Launched:
    """One ``muster run``. ``process`` is muster itself, ``runs`` the folder in which its run is."""

    process: "subprocess.Popen[bytes]"
    runs: Path
    out: Path
    err: Path

    def run(self) -> RunFolder:
        """The folder of the run, once it has begun."""

        def begun() -> list[Path]:
            journals = [p for p in self.runs.glob("*/journal.jsonl") if p.stat().st_size]
            mine = [p for p in journals if next(read(p)).pid == self.process.pid]  # type: ignore[attr-defined]
            return sorted(mine, key=lambda p: p.stat().st_mtime_ns)

        until(lambda: begun() or self.process.poll() is not None, what=f"the run begins\n{self.text()}")
        assert begun(), self.text()
        return RunFolder(begun()[-1].parent)

    def events(self, kind: type[Event] = Event, **like: Any) -> list[Any]:
        found = [e for e in read(self.run().journal) if isinstance(e, kind)]
        return [e for e in found if all(getattr(e, name) == value for name, value in like.items())]

    def saw(self, kind: type[Event], limit: float = LIMIT, **like: Any) -> Any:
        """The first such event, as soon as it has come."""
        what = f"{kind.__name__} {like}"
        with contextlib.suppress(AssertionError):
            until(lambda: self.events(kind, **like) or self.process.poll() is not None, limit, what)
        assert self.events(kind, **like), f"no {what}\n{self.text()}"
        return self.events(kind, **like)[0]

    def written(self, task: str) -> bytes:
        """The log of a task so far."""
        path = self.run().logs / f"{task.replace('/', '-')}.log"
        return path.read_bytes() if path.exists() else b""

    def log(self, task: str) -> str:
        return self.written(task).decode(errors="surrogateescape")

    def said(self, task: str, words: str) -> str:
        """The log of a task, as soon as ``words`` are in it."""
        until(lambda: words in self.log(task), what=f"{task} says {words!r}\n{self.text()}")
        return self.log(task)

    def pid(self, task: str, attempt: int = 1) -> int:
        return int(self.saw(Spawned, task=task, attempt=attempt).pid)

    def codes(self) -> dict[str, list[int]]:
        """The exits of each task, in order."""
        found: dict[str, list[int]] = {}
        for event in self.events(Exited):
            found.setdefault(event.task, []).append(event.code)
        return found

    def attempts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for event in self.events(Spawned):
            found[event.task] = max(found.get(event.task, 0), event.attempt)
        return found

    def signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def ended(self, limit: float) -> int:
        """The exit code, once there is one."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:.0f} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def result(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        made: dict[str, Any] = json.loads(self.out.read_text().splitlines()[-1])
        return made
