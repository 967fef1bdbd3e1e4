"""What every launcher promises, the one in memory included: the supervisor is tested over that one alone."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.cluster import Cluster, Host, Run
from muster.events import Event, Exited, HostUp, Spawned
from muster.launch import Launcher, Output, agent, local, ssh
from muster.launch.fake import FakeLauncher
from muster.launch.pipe import AgentLauncher, Connection
from muster.plan import Script, Task, make_plan

LIMIT = 10.0
SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"

# what a task does: for the launcher in memory, and as a program
BEHAVIOURS: dict[str, tuple[list[tuple[float, Any]], str]] = {
    "ends well": ([(0.05, 0)], "pass"),
    "exits with 3": ([(0.05, 3)], "import os; os._exit(3)"),
    "exits with 255": ([(0.05, 255)], "raise SystemExit(255)"),
    "aborts": ([(0.05, -6)], "import os; os.abort()"),
    "segfaults": ([(0.05, -11)], "import os; os.kill(os.getpid(), 11)"),
    "is killed": ([(0.05, -9)], "import os; os.kill(os.getpid(), 9)"),
    "sleeps": ([], SLEEP),
    "ignores TERM": ([(0.05, b"up\n")], STUBBORN),
    "prints": (
        [(0.05, b"\x00\xff" * 50_000), (0.06, b"no newline"), (0.07, 0)],
        r"import sys; o = sys.stdout.buffer; o.write(b'\x00\xff' * 50_000); o.write(b'no newline')",
    ),
}
CODES = {
    "ends well": 0,
    "exits with 3": 3,
    "exits with 255": 255,
    "aborts": -6,
    "segfaults": -11,
    "is killed": -9,
}


def far_end(host: Host) -> Connection:
    """What sshd starts when ``launch.ssh`` has reached a host: the same command, the same bytes down the pipe."""
    command = ssh.argv(Cluster(), host, ssh.boot(sys.executable))[-1]
    source = Path(agent.__file__).read_bytes()
    process = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Connection(process, b"%d\n%s" % (len(source), source))


class Tried:
    """A launcher with tasks that behave, and all that it has told so far."""

    def __init__(self, kind: str, stubborn: bool = False) -> None:
        self.kind = kind
        self.does: dict[tuple[str, int], str] = {}
        self.tasks = make_plan(Cluster(run=Run(engine="tensorflow", ps=1, workers=2)), Script("x"), "/").tasks
        self.news: list[Event | Output] = []
        self.launcher: Launcher
        if kind == "fake":
            self.launcher = FakeLauncher(
                lambda task, attempt: BEHAVIOURS[self.does[task.id, attempt]][0], 1e6 if stubborn else 0.02
            )
        else:
            connect = local.connect if kind == "local" else far_end
            self.launcher = AgentLauncher([Host("here")], connect, run="contract", one_for_all=True)

    def start(self, name: str, does: str, attempt: int = 1) -> Task:
        self.does[name, attempt] = does
        argv = (sys.executable, "-SIc", BEHAVIOURS[does][1])
        task = msgspec.structs.replace(self.tasks[name], argv=argv, port=0)
        self.launcher.start(task, attempt)
        return task

    def until(self, found: Callable[[], Any], limit: float = LIMIT) -> None:
        """Waits for news until ``found`` is true; by the launcher's clock, so the one that jumps costs nothing."""
        end = self.launcher.now() + limit
        while not found():
            assert self.launcher.now() < end, f"not within {limit} s; so far: {self.news}"
            self.news += self.launcher.wait(min(end, self.launcher.now() + 0.5))

    def of(self, kind: Any, name: str = "") -> list[Any]:
        return [n for n in self.news if isinstance(n, kind) and name in ("", getattr(n, "task", ""))]

    def exit_of(self, name: str, attempt: int = 1) -> Exited:
        def found() -> list[Exited]:
            return [e for e in self.of(Exited, name) if e.attempt == attempt]

        self.until(found)
        (exit,) = found()
        return exit

    def printed(self, name: str) -> bytes:
        return b"".join(o.data for o in self.of(Output, name))


@pytest.fixture(params=["fake", "local", "ssh"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Tried]]:
    with contextlib.ExitStack() as stack:

        def made(**more: Any) -> Tried:
            tried = Tried(kind, **more)
            stack.callback(tried.launcher.close)
            return tried

        yield made


@pytest.fixture
def tried(make: Callable[..., Tried]) -> Tried:
    return make()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_host_is_up_first(tried):
    tried.until(lambda: tried.news)
    assert isinstance(tried.news[0], HostUp)


@pytest.mark.parametrize("does", CODES)
def test_an_end_has_its_exit_code_or_its_signal(tried, does):
    """P13."""
    tried.start("worker/0", does)
    assert tried.exit_of("worker/0").code == CODES[does]
    assert [type(n) for n in tried.of((Spawned, Exited))] == [Spawned, Exited]


def test_events_are_stamped_by_one_clock_that_does_not_run_backwards(tried):
    tried.start("worker/0", "ends well")
    tried.start("worker/1", "exits with 3")
    tried.exit_of("worker/0"), tried.exit_of("worker/1")
    stamps = [n.at for n in tried.news if isinstance(n, Event)]
    assert stamps == sorted(stamps) and stamps[0] >= 0.0 and stamps[-1] <= tried.launcher.now()


def test_start_and_stop_return_at_once(tried):
    before = time.monotonic()
    task = tried.start("worker/0", "ignores TERM")
    tried.launcher.stop(task, 30.0)
    tried.launcher.release(task)
    assert time.monotonic() - before < 1.0
    tried.launcher.stop(task, 0.0)
    assert tried.exit_of("worker/0").code < 0


def test_a_stop_ends_a_task_by_term(tried):
    task = tried.start("worker/0", "sleeps")
    tried.until(lambda: tried.of(Spawned))
    tried.launcher.stop(task, 5.0)
    assert tried.exit_of("worker/0").code == -signal.SIGTERM


def test_a_task_that_ignores_term_is_killed_after_the_grace_time(make):
    """P22."""
    tried = make(stubborn=True)
    task = tried.start("worker/0", "ignores TERM")
    tried.until(lambda: tried.printed("worker/0"))
    asked = tried.launcher.now()
    tried.launcher.stop(task, 0.4)
    exit = tried.exit_of("worker/0")
    assert exit.code == -signal.SIGKILL and exit.at >= asked + 0.4 - 0.01


@pytest.mark.parametrize(("first", "second"), [(60.0, 0.0), (60.0, 0.2), (0.2, 60.0)])
def test_of_two_stops_the_sooner_counts(make, first, second):
    """P8."""
    tried = make(stubborn=True)
    task = tried.start("worker/0", "ignores TERM")
    tried.until(lambda: tried.printed("worker/0"))
    tried.launcher.stop(task, first)
    tried.launcher.stop(task, second)
    assert tried.exit_of("worker/0").code == -signal.SIGKILL


def test_what_is_asked_of_a_task_too_late_does_nothing(tried):
    never = tried.tasks["worker/1"]
    tried.launcher.stop(never, 0.1)
    tried.launcher.release(never)
    tried.launcher.conclude(never, 300)
    task = tried.start("worker/0", "exits with 3")
    tried.exit_of("worker/0")
    tried.launcher.stop(task, 0.1)
    tried.launcher.release(task)
    tried.launcher.conclude(task, 300)
    tried.news += tried.launcher.wait(tried.launcher.now() + 0.3)
    assert [e.code for e in tried.of(Exited)] == [3]


def test_a_task_can_be_started_again_and_its_news_name_the_attempt(tried):
    tried.start("worker/0", "exits with 3")
    tried.exit_of("worker/0")
    tried.start("worker/0", "prints", attempt=2)
    assert tried.exit_of("worker/0", 2).code == 0
    assert [(type(n), n.attempt) for n in tried.of((Spawned, Exited), "worker/0")] == [
        (Spawned, 1),
        (Exited, 1),
        (Spawned, 2),
        (Exited, 2),
    ]
    assert {o.attempt for o in tried.of(Output)} == {2}


def test_a_stop_of_the_last_attempt_does_not_reach_the_next(tried):
    """N7."""
    tried.start("worker/0", "exits with 3")
    tried.exit_of("worker/0")
    task = tried.start("worker/0", "sleeps", attempt=2)
    tried.until(lambda: [s for s in tried.of(Spawned) if s.attempt == 2])
    tried.launcher.stop(task, 5.0)
    assert tried.exit_of("worker/0", 2).code == -signal.SIGTERM
    assert len(tried.of(Exited)) == 2


def test_output_is_exact_and_comes_before_the_end(tried):
    """SL-12."""
    tried.start("worker/0", "prints")
    tried.exit_of("worker/0")
    assert tried.printed("worker/0") == b"\x00\xff" * 50_000 + b"no newline"
    kinds = [type(n) for n in tried.news if not isinstance(n, HostUp)]
    assert kinds[0] is Spawned and kinds[-1] is Exited


def test_tasks_do_not_disturb_one_another(tried):
    tried.start("worker/0", "is killed")
    other = tried.start("worker/1", "sleeps")
    tried.exit_of("worker/0")
    tried.news += tried.launcher.wait(tried.launcher.now() + 0.3)
    assert not tried.of(Exited, "worker/1")
    tried.launcher.stop(other, 5.0)
    assert tried.exit_of("worker/1").code == -signal.SIGTERM


def test_waiting_for_nothing_ends_when_it_said(tried):
    tried.until(lambda: tried.of(HostUp))
    until = tried.launcher.now() + 0.2
    before = time.monotonic()
    assert tried.launcher.wait(until) == []
    assert tried.launcher.now() >= until and time.monotonic() - before < 2.0
    assert tried.launcher.wait(until - 5.0) == []  # in the past: at once


def test_nothing_is_alive_after_close(make, kind):
    tried = make(stubborn=True)
    for name in ("ps/0", "worker/0", "worker/1"):
        tried.start(name, "ignores TERM")
    tried.until(lambda: len(tried.of(Output)) == 3)
    tried.launcher.close()
    if kind != "fake":
        assert not [s.pid for s in tried.of(Spawned) if alive(s.pid)]
    else:
        assert not tried.launcher.alive


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a;touch x", "$(touch x)"])
def test_the_name_of_a_host_is_never_an_option_or_a_command_of_ssh(name):
    """B2: one word, behind two dashes; what runs there is quoted word by word."""
    words = ssh.argv(Cluster(), Host("a", "10.0.0.1", ssh=name), ["a b", "$HOME", "'", ""])
    assert words[0] == "ssh" and words[-3:] == ["--", name, """exec 'a b' '$HOME' ''"'"'' ''"""]
    assert "BatchMode=yes" in words  # SL-05: no prompt may hide
