"""What the agent promises beyond the verbs of a launcher: environment, pipe, ports, strays, and its own end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from test_launchers import SLEEP, Tried, alive

from muster.cluster import Host
from muster.events import (
    Event,
    Exited,
    Frozen,
    HostLost,
    HostUp,
    Listening,
    PortTaken,
    Ready,
    Said,
    Spawned,
    Step,
    StopAsked,
    Thawed,
)
from muster.launch import Output, agent, local
from muster.launch.agent import last_traceback, port_holder, who_is
from muster.launch.bundle import bundle
from muster.launch.pipe import AgentLauncher, Connection, HostsUnreached

TALK = """
import json, os, socket
pipe = socket.socket(fileno=int(os.environ["MUSTER_FD"]))
def say(**told): pipe.sendall(json.dumps(told).encode() + b"\\n")
"""
ORPHAN = f"""
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("orphan", os.getpid(), flush=True)
    os.close(1), os.close(2)
    {SLEEP}
"""


class Here(Tried):
    """Programs on this machine."""

    def __init__(self, **more: object) -> None:
        super().__init__("local")
        self.launcher.close()
        self.launcher = AgentLauncher([Host("here")], local.connect, run="contract", one_for_all=True, **more)  # type: ignore[arg-type]

    def program(self, code: str, *args: str, name: str = "worker/0", attempt: int = 1, port: int = 0, **env: str):
        argv = (sys.executable, "-SIc", code, *args)
        task = msgspec.structs.replace(self.tasks[name], argv=argv, port=port, env=env)
        self.launcher.start(task, attempt)
        return task

    def lines(self, name: str = "worker/0") -> list[str]:
        return self.printed(name).decode().splitlines()


@pytest.fixture
def make() -> Iterator[Callable[..., Here]]:
    with contextlib.ExitStack() as stack:

        def made(**more: object) -> Here:
            here = Here(**more)
            stack.callback(here.launcher.close)
            return here

        yield made


@pytest.fixture
def here(make: Callable[..., Here]) -> Here:
    return make()


def gone(pid: int, within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


# --- what a task is given


def test_the_code_that_comes_down_the_pipe_is_importable_and_leaves_no_file(make, monkeypatch, tmp_path):
    """P7: though the agent is killed; also in a program that a task starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    here = make(code=bundle())
    here.until(lambda: here.of(HostUp))
    agent_pid = here.of(HostUp)[0].facts["pid"]
    inner = "import muster.ps.scratch; print(muster.ps.scratch.__file__, flush=True)"
    outer = f"import muster.events, subprocess, sys; subprocess.run([sys.executable, '-Sc', {inner!r}]); {SLEEP}"
    argv = (sys.executable, "-Sc", outer)
    here.launcher.start(msgspec.structs.replace(here.tasks["worker/0"], argv=argv, port=0, env={}), 1)
    here.until(here.lines)
    assert here.lines()[0].startswith(f"/proc/{agent_pid}/fd/") and list(tmp_path.iterdir()) == []
    os.kill(agent_pid, signal.SIGKILL)
    assert here.exit_of("worker/0").code == -signal.SIGHUP and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arg", ["", " ", "'", '"', "$HOME", "\\", "a\nb", "*", "-x", "--", "é", "训练", "\udcff", "`id`"]
)
def test_arguments_are_byte_equal_at_the_task(here, arg):
    """B4."""
    here.program("import os, sys; print([os.fsencode(a) for a in sys.argv[1:]])", arg, "end")
    here.exit_of("worker/0")
    assert here.lines() == [str([os.fsencode(arg), b"end"])]


def test_a_task_gets_its_own_environment_and_not_ours(make):
    os.environ["TF_CONFIG"] = "of the shell"
    try:
        here = make(drop=["TF_CONFIG"], path="/code.zip")
    finally:
        del os.environ["TF_CONFIG"]
    here.program("import os; print(sorted(os.environ.items()))", MUSTER_TASK="worker/0", X="a b")
    here.exit_of("worker/0")
    told = dict(eval(here.lines()[0]))
    assert (told["X"], told["MUSTER_RUN"], told["MUSTER_ATTEMPT"]) == ("a b", "contract", "1")
    assert told["PYTHONPATH"].split(":")[0] == "/code.zip" and "TF_CONFIG" not in told and "PATH" in told


def test_a_task_runs_in_a_session_of_its_own_with_signals_as_usual_and_no_input(here):
    here.program(
        "import os, signal, sys; print(os.getsid(0) == os.getpid(), [signal.getsignal(s) for s in (2, 15)][1] == 0, "
        "len(sys.stdin.read()))"
    )
    here.exit_of("worker/0")
    assert here.lines() == ["True True 0"]


def test_a_task_holds_nothing_of_another(here):
    """The pipe of one task is not open in the next: else its end would not be seen."""
    here.program(SLEEP)
    here.program("import os; print(len(os.listdir('/proc/self/fd')))", name="worker/1")
    here.exit_of("worker/1")
    assert int(here.lines("worker/1")[0]) <= 5  # 0, 1, 2, the report pipe, and the listing itself


@pytest.mark.parametrize("argv", [("/nonexistent/python",), ("/etc/passwd",), ("/",)])
def test_a_program_that_cannot_be_started_is_a_failure_that_is_named(here, argv):
    """B5."""
    here.launcher.start(msgspec.structs.replace(here.tasks["worker/0"], argv=argv, port=0), 1)
    exit = here.exit_of("worker/0")
    assert exit.code == 127 and argv[0] in exit.error


def test_a_folder_that_is_gone_is_a_failure_that_is_named(here):
    task = msgspec.structs.replace(here.tasks["worker/0"], argv=("/bin/true",), port=0, cwd="/nonexistent/folder")
    here.launcher.start(task, 1)
    assert "/nonexistent/folder" in here.exit_of("worker/0").error


# --- reports


def test_a_task_hears_the_secret_first_and_go_when_it_is_released(make):
    here = make(hello=lambda task: {"secret": "s3cret"})
    task = here.program(
        TALK + "file = pipe.makefile(); print(file.readline()); say(kind='Ready'); print(file.readline())"
    )
    here.until(lambda: here.of(Ready))
    here.launcher.release(task)
    here.exit_of("worker/0")
    assert [line for line in here.lines() if line] == ['{"kind": "Hello", "secret": "s3cret"}', '{"kind": "Go"}']


def test_a_task_hears_of_the_end_of_the_training_and_at_which_step(here):
    """SD-03."""
    task = here.program(TALK + "file = pipe.makefile(); file.readline(); say(kind='Ready'); print(file.readline())")
    here.until(lambda: here.of(Ready))
    here.launcher.conclude(task, 300)
    here.exit_of("worker/0")
    assert json.loads(here.lines("worker/0")[0]) == {"kind": "Over", "step": 300}


def test_reports_come_with_the_name_and_attempt_of_their_task(here):
    code = "say(kind='Step', step=3, local=1, loss=0.5); say(kind='Said', text='x', task='ps/0', attempt=9, at=-5)"
    here.program(TALK + code, attempt=4)
    here.exit_of("worker/0", 4)
    (step,), (said,) = here.of(Step), here.of(Said)
    assert (step.task, step.attempt, step.step, step.loss) == ("worker/0", 4, 3, 0.5)
    assert (said.task, said.attempt, said.text) == ("worker/0", 4, "x") and said.at >= 0


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b'{"kind": null}',
        b'{"kind": ["Step"]}',
        b'{"kind": "Nope"}',
        b'{"kind": "Step"}',
        b'{"kind": "Step", "step": "three", "local": 1}',
        b'{"kind": "Metrics", "values": {"a": "b"}}',
        b'{"kind": "Total", "steps": null}',
        b'{"kind": "Exited", "code": 0}',
        b'{"kind": "Stopping"}',
        b'{"kind": "HostUp", "facts": {}, "host": "x"}',
        b'{"kind": "HostUp"}',
        b'{"kind": "Closing", "why": "x", "lapsed": true}',
        b'{"kind": "Closing"}',
        b'{"kind": "RunEnded", "ok": true}',
        b'{"kind": "HostLost", "host": "x", "why": "y"}',
    ],
)
def test_what_is_no_report_is_dropped(here, line):
    """X13: a task cannot say that it, or the run, has ended."""
    here.program(TALK + f"pipe.sendall({line!r} + b'\\n'); say(kind='Said', text='after')")
    exit = here.exit_of("worker/0")
    assert exit.code == 0 and [s.text for s in here.of(Said)] == ["after"]
    assert not [n for n in here.news if not isinstance(n, HostUp | Spawned | Said | Exited | Output)]
    assert len(here.of(HostUp)) == 1


def test_a_task_that_says_it_has_ended_is_still_lost_with_its_agent(here):
    """X13: it would be waited for for ever."""
    here.program(TALK + f"say(kind='Exited', code=0); say(kind='Ready'); {SLEEP}")
    here.until(lambda: here.of(Ready))
    os.kill(here.of(HostUp)[0].facts["pid"], signal.SIGKILL)
    assert "is gone" in here.exit_of("worker/0").error


def test_a_report_that_never_ends_does_not_fill_memory(here):
    here.program(TALK + "\nfor _ in range(64): pipe.sendall(b'x' * 65536)\npipe.sendall(b'\\n'); say(kind='Ready')")
    assert here.exit_of("worker/0").code == 0 and here.of(Ready)


# --- its end


def test_the_last_words_are_kept_though_the_launcher_is_slow(here):
    """S14, SL-13: a task that has flooded the pipe and dies."""
    code = "import os\nfor _ in range(400): os.write(1, b'x' * 65536)\nos.write(1, b'\\nTHE END'); os._exit(3)"
    here.program(code)
    here.until(lambda: here.of(Spawned))
    time.sleep(0.5)  # it is not read from now: that it floods is the point, how far it gets is not
    here.exit_of("worker/0")
    assert len(here.printed("worker/0")) == 400 * 65536 + 8 and here.printed("worker/0").endswith(b"\nTHE END")


def test_the_end_comes_with_the_last_traceback_and_the_last_lines(here):
    """P14."""
    here.program("print('hello', flush=True)\ndef f(): raise ValueError('bad\\nthing')\nf()")
    exit = here.exit_of("worker/0")
    assert (exit.code, exit.error) == (1, "ValueError: bad") and exit.trace.startswith("Traceback")
    assert exit.tail.startswith("hello\nTraceback")


def test_a_traceback_of_many_lines_comes_whole(here):
    """P14: TensorFlow's own take more than 8 KB; the same one twice has to be known again."""
    here.program('exec(\'def f(n):\\n    raise ValueError("x" * 30000 + " end")\\nf(0)\')')
    exit = here.exit_of("worker/0")
    assert exit.trace.startswith("Traceback") and exit.error.endswith("x end") and len(exit.trace) > 30_000


def test_what_a_task_leaves_behind_is_ended_with_it(here):
    """P18: a grandchild in a session of its own that ignores TERM."""
    here.program(ORPHAN + "\nsys.stdin.read(); time.sleep(0.3)", MUSTER_TASK="worker/0")
    exit = here.exit_of("worker/0")
    pid = int(here.lines()[0].split()[1])
    assert exit.swept == 1 and exit.code == 0 and gone(pid)


def test_the_children_of_one_task_are_not_taken_for_strays_of_another(here):
    here.program(ORPHAN + "\n" + SLEEP, name="worker/1", MUSTER_TASK="worker/1")
    here.until(lambda: here.lines("worker/1"))
    here.program("pass", MUSTER_TASK="worker/0")
    here.exit_of("worker/0")
    pid = int(here.lines("worker/1")[0].split()[1])
    assert alive(pid)
    here.launcher.close()
    assert not alive(pid)


def test_a_stray_that_has_cleared_its_environment_is_ended_at_the_latest_with_the_run(here):
    """P18."""
    code = ORPHAN.replace(SLEEP, "os.execve('/bin/sleep', ['sleep', '600'], {})")
    here.program(code + "\nsys.stdin.read(); time.sleep(0.3)", MUSTER_TASK="worker/0")
    here.exit_of("worker/0")
    pid = int(here.lines()[0].split()[1])
    here.launcher.close()
    assert not alive(pid)


def test_a_task_that_does_not_die_is_given_up_though_its_end_is_asked_for_again_and_again():
    """Ctrl-C twice: the supervisor asks at every turn."""
    ours, stuck = agent.Agent(-1, -1), agent.Task({"task": "worker/0", "attempt": 1})
    stuck.code = 0  # no process to signal
    ours._stop(stuck, 0.0)
    since = stuck.killed_at
    ours._stop(stuck, 0.0)
    assert since is not None and stuck.killed_at == since


def test_a_frozen_task_is_seen_and_can_be_ended(here):
    """P10, P11."""
    task = here.program(SLEEP)
    here.until(lambda: here.of(Spawned))
    pid = here.of(Spawned)[0].pid
    os.kill(pid, signal.SIGSTOP)
    here.until(lambda: here.of(Frozen))
    os.kill(pid, signal.SIGCONT)
    here.until(lambda: here.of(Thawed))
    os.kill(pid, signal.SIGSTOP)
    here.until(lambda: len(here.of(Frozen)) == 2)
    here.launcher.stop(task, 5.0)
    assert here.exit_of("worker/0").code == -signal.SIGTERM


def test_when_the_agent_is_killed_its_tasks_are_gone_and_said_to_be(here):
    """P7: an Exited follows in any case, and a task can be started again."""
    here.program(SLEEP)
    here.until(lambda: here.of(Spawned))
    pid = here.of(Spawned)[0].pid
    os.kill(here.of(HostUp)[0].facts["pid"], signal.SIGKILL)
    exit = here.exit_of("worker/0")
    assert exit.code != 0 and "the agent on here is gone" in exit.error
    assert [h.host for h in here.of(HostLost)] == ["here"] and gone(pid)
    here.program("pass", attempt=2)  # by another agent
    assert here.exit_of("worker/0", 2).code == 0


def through(*argv: str) -> Callable[[Host], Connection]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return lambda host: Connection(subprocess.Popen(argv, start_new_session=True, **pipes))


def test_an_agent_that_never_comes_up_is_a_host_out_of_reach_with_its_last_words():
    """SL-05: what a login shell says instead."""
    shell = through("sh", "-c", "echo welcome; echo no such account; exit 3")
    with pytest.raises(HostsUnreached) as lost:
        AgentLauncher([Host("far")], shell, run="contract")
    assert lost.value.failures == {"far": ("welcome\nno such account", 3)}


def test_a_host_that_never_answers_is_not_waited_for_at_the_end():
    """SL-08: ssh may wait for a dead machine for long, and needs no goodbye."""
    began = time.monotonic()
    with pytest.raises(HostsUnreached):
        AgentLauncher([Host("far")], through("sleep", "600"), run="contract", remote=True).open(within=0.2)
    assert time.monotonic() - began < 5.0


def test_what_a_login_shell_prints_before_the_agent_does_not_matter():
    agent_here = [sys.executable, "-I", agent.__file__]
    shell = through("sh", "-c", 'echo "Welcome to $0"; exec "$@"', "far", *agent_here)
    launcher = AgentLauncher([Host("far")], shell, run="contract")
    (up,) = launcher.wait(launcher.now() + 10)
    launcher.close()
    assert isinstance(up, HostUp) and up.host == "far"


def test_a_ctrl_c_while_connecting_is_not_lost():
    """P8, SL-08."""
    bell, ring = socket.socketpair()

    class Bell:
        def fileno(self) -> int:
            return bell.fileno()

        def take(self, now: float) -> list[Event]:
            return [StopAsked(now, "ctrl-c")] if bell.recv(10) else []

    ring.send(b"!")
    launcher = AgentLauncher([Host("here")], local.connect, run="contract", doorbells=[Bell()])
    news = launcher.wait(launcher.now())
    launcher.close()
    bell.close(), ring.close()
    assert StopAsked in {type(n) for n in news}


def test_without_a_heartbeat_the_lease_ends_and_everything_with_it(make):
    """P12, section 3 of the design."""
    here = make(lease=0.4)
    here.program(SLEEP)
    here.until(lambda: here.of(Spawned))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # heartbeats go out while somebody waits
        here.news += here.launcher.wait(here.launcher.now() + 0.05)
    pid = here.of(Spawned)[0].pid
    assert alive(pid) and not here.of(Exited)
    assert gone(pid, within=10.0)  # and now nobody does


# --- ports

LISTEN = "import socket, sys, time; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); time.sleep(600)"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_task_that_listens_is_seen(here, address):
    port = free_port()
    here.program(LISTEN, address, str(port), port=port)
    here.until(lambda: here.of(Listening))
    assert here.of(Listening)[0].port == port


def test_a_child_of_the_task_that_listens_counts(here):
    port = free_port()
    here.program(
        f"import subprocess, sys; subprocess.run([sys.executable, '-SIc', {LISTEN!r}, '127.0.0.1', '{port}'])",
        port=port,
    )
    here.until(lambda: here.of(Listening))


def test_a_port_that_is_taken_names_the_holder_and_nothing_is_started(here):
    """N8, NW-09: a stranger's process."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        here.program(SLEEP, port=port)
        exit = here.exit_of("worker/0")
        (taken,) = here.of(PortTaken)
        assert (taken.port, taken.pid, exit.code) == (port, os.getpid(), 98)
        assert f"pid {os.getpid()}" in taken.holder and "user" in taken.holder
        assert not here.of(Spawned)


def test_a_port_that_is_taken_after_the_start_is_named_too(here):
    """NW-10."""
    port = free_port()
    here.program(SLEEP, port=port)
    here.until(lambda: here.of(Spawned))
    with socket.create_server(("127.0.0.1", port)):
        here.until(lambda: here.of(PortTaken))
    assert here.of(PortTaken)[0].pid == os.getpid()


def test_a_task_that_ends_at_once_since_its_port_is_taken_is_told_of_the_holder(here):
    """NW-10: however fast, and before the end is told."""
    port = free_port()
    with socket.socket() as held:
        held.bind(("127.0.0.1", port))  # not listening yet when the agent looks
        task = here.program(TALK + "file = pipe.makefile(); file.readline(), file.readline(); os._exit(1)", port=port)
        here.until(lambda: here.of(Spawned))
        held.listen()
        here.launcher.release(task)
        assert here.exit_of("worker/0").code == 1
    assert [type(n) for n in here.of((Spawned, PortTaken, Exited))] == [Spawned, PortTaken, Exited]
    assert here.of(PortTaken)[0].pid == os.getpid()


def test_a_port_held_by_a_task_of_a_run_says_which(here):
    """N12, NW-09: our own old job."""
    port = free_port()
    here.program(LISTEN, "127.0.0.1", str(port), name="worker/1", port=port, MUSTER_TASK="worker/1")
    here.until(lambda: here.of(Listening))
    here.program(SLEEP, port=port)
    here.exit_of("worker/0")
    assert "which is worker/1 of run contract: muster stop contract" in here.of(PortTaken)[0].holder


def test_nobody_holds_a_free_port():
    assert port_holder(free_port()) is None
    assert who_is(os.getpid()).startswith(f"pid {os.getpid()} (") and who_is(2**22 + 1) == f"pid {2**22 + 1}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("no traceback", ""),
        ("Traceback (most recent call last):\n  File x\nValueError: bad\nafter\n", "ValueError: bad"),
        (
            "Traceback (most recent call last):\n  a\nE: 1\n\nDuring\n\nTraceback (most recent call last):\n  b\nF: 2",
            "F: 2",
        ),
        ("Traceback (most recent call last):", ""),
    ],
)
def test_the_last_traceback_of_a_text(text, error):
    trace, found = last_traceback(text)
    assert found == error and trace == text[text.rfind("Traceback") :][: len(trace)] if error else not found


def test_the_agent_is_one_file_that_the_standard_library_runs():
    done = subprocess.run(
        [sys.executable, "-SIc", Path(agent.__file__).read_text().replace('__name__ == "__main__"', "True")],
        input=b"",
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0 and done.stdout.startswith(agent.MARK) and not done.stderr
