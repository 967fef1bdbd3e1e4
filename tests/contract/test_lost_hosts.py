"""What the launcher makes of agents that fall silent, of sshd that are busy, and of its own absence."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec
from test_launchers import SLEEP, Tried, alive

from muster.cluster import Host
from muster.events import Exited, HostLost, HostUp, Spawned, StopAsked, Warned
from muster.launch import agent, local
from muster.launch.jumps import AT_ONE_SSHD, room
from muster.launch.pipe import LOST, SILENCE, AgentLauncher, Connection


class Leased(Tried):
    """An agent on this machine that wants heartbeats, and answers them."""

    def __init__(self, lease: float = 60.0, run: str = "lost") -> None:
        super().__init__("local")
        self.launcher.close()
        self.launcher = AgentLauncher([Host("here")], local.connect, run=run, one_for_all=True, lease=lease)
        self.until(lambda: self.of(HostUp))
        self.agent = self.of(HostUp)[0].facts["pid"]

    def sleeper(self, attempt: int = 1) -> int:
        self.does["worker/0", attempt] = "sleeps"
        self.start_marked(attempt)
        self.until(lambda: [s for s in self.of(Spawned) if s.attempt == attempt])
        return int(self.of(Spawned)[-1].pid)

    def start_marked(self, attempt: int) -> None:
        argv = (sys.executable, "-SIc", SLEEP)
        task = msgspec.structs.replace(self.tasks["worker/0"], argv=argv, port=0, env={"MUSTER_TASK": "worker/0"})
        self.launcher.start(task, attempt)


def test_an_agent_that_answers_no_heartbeat_is_a_lost_host():
    """N1: spoken of after 5 s, given up after 8; and one that says nothing else but answers is not."""
    leased = Leased()
    try:
        leased.sleeper()
        quiet = leased.launcher.now() + SILENCE + 1.5
        while leased.launcher.now() < quiet:
            leased.news += leased.launcher.wait(leased.launcher.now() + 0.5)
        assert not leased.of(HostLost) and not leased.of(Warned)
        os.kill(leased.agent, signal.SIGSTOP)
        began = time.monotonic()
        leased.until(lambda: leased.of(Exited))
        assert LOST <= time.monotonic() - began < LOST + 3 and leased.of(Warned)[0].at < leased.of(HostLost)[0].at - 2
        assert "not answered" in leased.of(HostLost)[0].why and "is gone" in leased.of(Exited)[0].error
    finally:
        leased.launcher.close()


def test_a_launcher_that_was_away_for_longer_than_the_lease_is_told_that_its_run_is_over():
    """P12."""
    leased = Leased(lease=1.0)
    try:
        pid = leased.sleeper()
        time.sleep(2.5)
        assert not alive(pid)
        leased.until(lambda: leased.of(Exited))
        assert [stop.how for stop in leased.of(StopAsked)] == ["lease"]
        assert leased.news.index(leased.of(StopAsked)[0]) < leased.news.index(leased.of(Exited)[0])
    finally:
        leased.launcher.close()


def test_a_task_that_is_started_again_by_another_agent_is_never_there_twice():
    """N3: the first agent was cut off, and does not know yet."""
    first, second = Leased(), Leased()
    try:
        old = first.sleeper()
        new = second.sleeper(attempt=2)
        assert not alive(old) and alive(new)
    finally:
        first.launcher.close()
        second.launcher.close()


BUSY = """
import fcntl, os, sys, time
for slot in range(3):
    held = os.open(os.path.join(sys.argv[1], str(slot)), os.O_CREAT | os.O_RDWR)
    try: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: continue
    time.sleep(0.2)
    os.close(held)
    os.execv(sys.executable, [sys.executable, "-I", sys.argv[2]])
sys.exit("kex_exchange_identification: Connection closed by remote host")
"""


COUNTED = """
import fcntl, os, sys, time
folder = sys.argv[1]
def count(change):
    with open(folder + "/now", "a+") as now:
        fcntl.flock(now, fcntl.LOCK_EX)
        now.seek(0)
        number = int(now.read() or 0) + change
        now.truncate(0)
        now.write(str(number))
        if change > 0:
            with open(folder + "/seen", "a") as seen: seen.write("%d\\n" % number)
count(1)
time.sleep(0.3)
count(-1)
os.execv(sys.executable, [sys.executable, "-I", sys.argv[2]])
"""


def dial(program: str, folder: Path):
    def connect(host: Host) -> Connection:
        said = tempfile.TemporaryFile()  # noqa: SIM115
        argv = [sys.executable, "-SIc", program, str(folder), agent.__file__]
        return Connection(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True),
            b"",
            said,
        )

    return connect


def test_a_jump_host_sees_a_few_logins_at_one_moment(tmp_path):
    """SL-14: by its own limit, and not by being refused."""
    hosts = [Host(f"h{n}") for n in range(12)]
    ways = {host.name: ["gate", "inner"] for host in hosts}
    launcher = AgentLauncher(hosts, dial(COUNTED, tmp_path), run="jump", remote=True, may_dial=partial(room, ways))
    try:
        assert len({event.host for event in launcher.open() if isinstance(event, HostUp)}) == 12
    finally:
        launcher.close()
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(seen) == 12 and max(seen) == AT_ONE_SSHD


def test_twenty_hosts_behind_an_sshd_that_takes_three_logins_at_once(tmp_path):
    """SL-14."""
    launcher = AgentLauncher([Host(f"h{n}") for n in range(20)], dial(BUSY, tmp_path), run="busy", remote=True)
    try:
        assert len({event.host for event in launcher.open() if isinstance(event, HostUp)}) == 20
    finally:
        launcher.close()
