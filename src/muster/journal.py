"""A run is a folder, and the folder is the only truth about it: plan, journal, a log for each task.

``status`` works on it after everything has died. The journal is one event a line, written and synced before what it
announces is done. A torn last line is a write that never happened.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

import msgspec

from muster.errors import Refused, RunFailed
from muster.events import Event, RunStarted, parse
from muster.plan import Plan
from muster.state import State, blank


class Journal:
    """Appends batches of events, one fsync each."""

    def __init__(self, path: Path, sync: Callable[[int], None] = os.fsync) -> None:
        self.path, self._sync = path, sync
        self._file = path.open("ab", buffering=0)

    def append(self, events: Iterable[Event]) -> None:
        """Raises RunFailed where they cannot be kept: what nobody can read again must not be done."""
        left = "".join(event.line() + "\n" for event in events).encode()
        if not left:
            return
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
            self._sync(self._file.fileno())
        except OSError as error:
            raise RunFailed(
                "the journal of the run cannot be written, so it is ended", at=str(self.path), because=str(error),
                try_="df -h; MUSTER_RUNS=/a/folder/with/room",
            ) from None  # fmt: skip

    def replay(self) -> Iterator[Event]:
        yield from read(self.path)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Event]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield parse(line)


class Logs:
    """A file for each task with exactly the bytes that it printed; rotated once it is ``log_mb`` long."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._limit = plan.run.log_mb << 20
        self._paths = {task.id: folder / task.log for task in plan.tasks.values()}
        self._files: dict[str, BinaryIO] = {}
        self._attempts: dict[str, int] = {}
        self.trouble = ""

    def write(self, task: str, attempt: int, data: bytes) -> None:
        """Never ends a run: a full disk loses lines and says so once, in ``trouble``."""
        try:
            file = self._file(task)
            if self._attempts.setdefault(task, attempt) != attempt:
                self._attempts[task] = attempt
                file.write(b"--- %s, attempt %d\n" % (task.encode(), attempt))
            file.write(data)
            file.flush()
            if file.tell() > self._limit:
                self._rotate(task)
        except OSError as error:
            self.trouble = f"the log of {task} loses lines: {error}"

    def _file(self, task: str) -> BinaryIO:
        if task not in self._files:
            self._files[task] = self._paths[task].open("ab")
        return self._files[task]

    def _rotate(self, task: str) -> None:
        self._files.pop(task).close()
        path = self._paths[task]
        path.replace(path.with_suffix(".log.1"))

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


class RunFolder:
    """A run on disk. ``path`` holds plan.json, journal.jsonl and logs/."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    def write_plan(self, plan: Plan) -> None:
        temporary = self.path / "plan.json.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        temporary.replace(self.path / "plan.json")

    def plan(self) -> Plan:
        try:
            return msgspec.json.decode((self.path / "plan.json").read_bytes(), type=Plan)
        except (OSError, msgspec.DecodeError) as error:
            raise Refused(
                f"run {self.id} has no plan that can be read", at=str(self.path), because=str(error)
            ) from None

    def state(self, plan: Plan) -> State:
        """What the journal says, folded."""
        state = blank(plan.tasks)
        if self.journal.exists():
            for event in read(self.journal):
                state.apply(event)
        return state

    def launcher(self) -> int:
        """The pid of the launcher if it is alive, else 0."""
        if not self.journal.exists():
            return 0
        first = next((e for e in read(self.journal) if isinstance(e, RunStarted)), None)
        return first.pid if first and born(first.pid) == first.born else 0


def born(pid: int) -> float:
    """Start time of a process in clock ticks since boot; 0 if there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] == b"Z" else float(fields[19])


def runs_root() -> Path:
    """Where run folders live: $MUSTER_RUNS, else ~/.muster/runs."""
    return Path(os.environ.get("MUSTER_RUNS") or Path.home() / ".muster" / "runs")


def safe_root() -> Path:
    """The folder of runs, made where it is missing. Raises Refused where it cannot be, or where others could write."""
    root = runs_root()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = root.stat()
    except OSError as error:
        raise Refused(
            "the folder of runs cannot be made", at=str(root), because=str(error), try_="MUSTER_RUNS=/a/folder/of/yours"
        ) from None
    if found.st_uid != os.getuid():
        raise Refused(
            "the folder of runs belongs to somebody else",
            at=str(root),
            because=f"its owner is uid {found.st_uid}",
            try_="MUSTER_RUNS=/a/folder/of/yours",
        )
    if stat.S_IMODE(found.st_mode) & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise Refused("anybody may write into the folder of runs", at=str(root), try_=f"chmod o-w {root}")
    return root


@contextlib.contextmanager
def planning_lock(tell: Callable[[str], None] = lambda text: None, patience: float = 5.0) -> Iterator[Path]:
    """Held while ports are chosen and the plan is written, so that two runs never choose the same. ``tell``: what takes
    longer than ``patience``."""
    root = safe_root()
    try:
        file = (root / ".lock").open("w")
    except OSError as error:
        raise Refused(
            "the folder of runs cannot be written", at=str(root), because=str(error),
            try_="MUSTER_RUNS=/a/folder/of/yours",
        ) from None  # fmt: skip
    with file as lock:
        until = time.monotonic() + patience
        while not _locked(lock):
            if time.monotonic() >= until:
                tell(f"waits for another run that is being planned: it holds {file.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
                break
            time.sleep(0.02)
        yield root


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create(root: Path, plan: Plan) -> RunFolder:
    """A new run folder, 0700, holding ``plan``."""
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", plan.name).strip("-.") or "run"
    stem = f"{stem[:40]}-{time.strftime('%m%d-%H%M%S')}"
    for n in range(1000):
        path = root / (f"{stem}-{n + 1}" if n else stem)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        folder = RunFolder(path)
        folder.logs.mkdir(mode=0o700)
        folder.write_plan(plan)
        return folder
    raise Refused("no free name for a run folder", at=str(root))


def runs(root: Path | None = None) -> list[RunFolder]:
    """All runs, the newest first."""
    root = root or runs_root()
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if (p / "plan.json").exists()]
    return [RunFolder(p) for p in sorted(found, key=lambda p: (p / "plan.json").stat().st_mtime_ns, reverse=True)]


def find(name: str = "") -> RunFolder:
    """The run called ``name`` (a unique beginning will do, and a path), or the newest one. Raises Refused."""
    if name and os.path.exists(Path(name) / "plan.json"):  # false, where Path.exists would raise, for a name too long
        return RunFolder(Path(name).resolve())  # its name is the run's: "." is none
    known = runs()
    if not known:
        raise Refused("there is no run yet", at=str(runs_root()), try_="muster run script.py")
    if not name:
        return known[0]
    exact = [run for run in known if run.id == name]
    begun = exact or [run for run in known if run.id.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    raise Refused(
        f"{'several runs begin' if begun else 'no run begins'} with {name!r}",
        at=str(runs_root()),
        try_="one of: " + ", ".join(run.id for run in (begun or known)[:8]),
    )


def ports_in_use(root: Path) -> set[int]:
    """Ports that living runs have been given, whether or not they listen yet."""
    taken: set[int] = set()
    for folder in runs(root)[:200]:
        age = time.time() - (folder.path / "plan.json").stat().st_mtime
        begun = folder.journal.exists() and folder.journal.stat().st_size > 0
        if folder.launcher() or (not begun and age < 30):
            taken |= {task.bound.port for task in folder.plan().tasks.values()}
    return taken
