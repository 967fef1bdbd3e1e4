"""``muster run`` as a process of its own, over stand-in scripts that need no TensorFlow: a task costs 0.1 s.

Every wait here is for a condition, and has a limit. Whatever a test leaves behind is ended by its run id.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from standins import Launched

from muster.events import HostUp
from muster.journal import read
from muster.launch.sweep import processes_of, sweep_run

LIMIT = 40.0


def letter(pid: int) -> str:
    """The state of a process, such as S or T; Z also where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def alive(pid: int) -> bool:
    return letter(pid) != "Z"


class Launch(Launched):
    """One ``muster run`` of this machine."""

    def __init__(self, folder: Path, env: dict[str, str], args: tuple[str, ...]) -> None:
        self.folder, self.runs = folder, Path(env["MUSTER_RUNS"])
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

    def agent(self) -> int:
        return int(self.saw(HostUp).facts["pid"])

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code. Fails unless everything of the run is gone when its launcher is."""
        code = self.ended(limit)
        assert self.orphans() == []
        return code

    def orphans(self) -> list[int]:
        """Living processes of all runs of this launcher, its agent included."""
        left: list[int] = []
        for journal in self.runs.glob("*/journal.jsonl"):
            events = list(read(journal))
            if events and events[0].pid == self.process.pid:  # type: ignore[attr-defined]
                agents = [int(e.facts["pid"]) for e in events if isinstance(e, HostUp)]
                left += processes_of(journal.parent.name) + [pid for pid in agents if alive(pid)]
        return left

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for pid in self.orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for journal in self.runs.glob("*/journal.jsonl"):
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
