"""``muster run`` as a process of its own, over stand-in scripts that need no TensorFlow: a task costs 0.1 s.

Every wait here is for a condition, and has a limit. Whatever a test leaves behind is ended by its run id.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from muster.events import Event, Exited, HostUp, Spawned
from muster.journal import RunFolder, read
from muster.launch.sweep import processes_of, sweep_run

LIMIT = 40.0
PRELUDE = """\
import json, os, signal, socket, sys, time
import muster
me, attempt = os.environ["MUSTER_TASK"], int(os.environ["MUSTER_ATTEMPT"])
role, index = me.split("/")
told = json.loads(os.environ["MUSTER_CLUSTER"])["cluster"]
host, _, port = told[role][int(index)].rpartition(":")
def listen(): return socket.create_server((host, int(port)))
def serve():
    global server
    server = listen()
    while True: time.sleep(600)
def say(*words): print(*words, flush=True)
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
while True:
    step += 1
    muster.report(step=step)
    time.sleep(0.05)
"""

Found = TypeVar("Found")


def until(found: Callable[[], Found], limit: float = LIMIT, what: str = "") -> Found:
    """What ``found`` returns once that is true."""
    end = time.monotonic() + limit
    while not (got := found()):
        assert time.monotonic() < end, f"not within {limit:.0f} s: {what or found}"
        time.sleep(0.02)
    return got


def letter(pid: int) -> str:
    """The state of a process, such as S or T; Z also where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def alive(pid: int) -> bool:
    return letter(pid) != "Z"


def slack(seconds: float) -> float:
    """``seconds`` on an idle machine; longer while others want its processors."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Launch:
    """One ``muster run``."""

    def __init__(self, folder: Path, env: dict[str, str], args: tuple[str, ...]) -> None:
        self.folder, self.env = folder, env
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "muster", "run", "--engine", "tensorflow", *args],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def run(self) -> RunFolder:
        """The folder of the run, once it has begun."""

        def begun() -> list[Path]:
            root = Path(self.env["MUSTER_RUNS"])
            journals = [p for p in root.glob("*/journal.jsonl") if p.stat().st_size]
            mine = [p for p in journals if next(read(p)).pid == self.process.pid]  # type: ignore[attr-defined]
            return sorted(mine, key=lambda p: p.stat().st_mtime_ns)

        until(lambda: begun() or self.process.poll() is not None, what="the run begins")
        assert begun(), self.text()
        return RunFolder(begun()[-1].parent)

    def events(self, kind: type[Event] = Event, **like: Any) -> list[Any]:
        found = [e for e in read(self.run().journal) if isinstance(e, kind)]
        return [e for e in found if all(getattr(e, name) == value for name, value in like.items())]

    def saw(self, kind: type[Event], **like: Any) -> Any:
        """The first such event, as soon as it has come."""
        until(lambda: self.events(kind, **like) or self.process.poll() is not None, what=f"{kind.__name__} {like}")
        assert self.events(kind, **like), self.text()
        return self.events(kind, **like)[0]

    def log(self, task: str) -> bytes:
        path = self.run().logs / f"{task.replace('/', '-')}.log"
        return path.read_bytes() if path.exists() else b""

    def said(self, task: str, words: str) -> bytes:
        """The log of a task, as soon as ``words`` are in it."""
        until(lambda: words.encode() in self.log(task), what=f"{task} says {words!r}")
        return self.log(task)

    def pid(self, task: str, attempt: int = 1) -> int:
        return int(self.saw(Spawned, task=task, attempt=attempt).pid)

    def agent(self) -> int:
        return int(self.saw(HostUp).facts["pid"])

    def signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code. Fails unless everything of the run is gone when its launcher is."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:.0f} s:\n{self.text()}") from None
        assert self.orphans() == []
        return code

    def orphans(self) -> list[int]:
        """Living processes of all runs of this launcher, its agent included."""
        left: list[int] = []
        for journal in Path(self.env["MUSTER_RUNS"]).glob("*/journal.jsonl"):
            events = list(read(journal))
            if events and events[0].pid == self.process.pid:  # type: ignore[attr-defined]
                agents = [int(e.facts["pid"]) for e in events if isinstance(e, HostUp)]
                left += processes_of(journal.parent.name) + [pid for pid in agents if alive(pid)]
        return left

    def text(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def result(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        made: dict[str, Any] = json.loads(self.out.read_text().splitlines()[-1])
        return made

    def codes(self) -> dict[str, list[int]]:
        """The exits of each task, in order."""
        found: dict[str, list[int]] = {}
        for event in self.events(Exited):
            found.setdefault(event.task, []).append(event.code)
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for pid in self.orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for journal in Path(self.env["MUSTER_RUNS"]).glob("*/journal.jsonl"):
            sweep_run(journal.parent.name)


class Muster:
    """The command line in a folder of its own, with a range of ports of its own."""

    def __init__(self, folder: Path, ports: range) -> None:
        self.folder, self.ports = folder, ports
        self.env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.env |= {"MUSTER_RUNS": str(folder / "runs")}
        self.launches: list[Launch] = []

    def script(self, code: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(code)
        return path

    def run(self, code: str, *options: str, args: tuple[str, ...] = (), name: str = "train.py") -> Launch:
        """``muster run OPTIONS train.py ARGS`` with 1 ps and 2 workers, unless ``options`` say otherwise."""
        self.script(code, name)
        here = self.folder / f"launch-{len(self.launches)}"
        here.mkdir()
        base = ["--engine", "tensorflow"]  # whose tasks all run the script, which need not join anything
        if not any(":" in option for option in options):
            base += ["--ps", "1", "--workers", "2", "--ports", f"{self.ports[0]}-{self.ports[-1]}"]
        launch = Launch(here, self.env, (*base, *options, f"../{name}", *args))
        self.launches.append(launch)
        return launch

    def ask(self, *args: str) -> tuple[int, str]:
        """Another verb, to its end: exit code, and all that it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "muster", *args],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            text=True,
        )
        return done.returncode, done.stdout


@contextlib.contextmanager
def muster_in(folder: Path, ports: range) -> Iterator[Muster]:
    made = Muster(folder, ports)
    try:
        yield made
    finally:
        for launch in made.launches:
            launch.end()
