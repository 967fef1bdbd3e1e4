"""Machines and networks that fail under a run: what is noticed, said, brought back, and left: nothing.

A task of these runs is alone on its machine, so that a host, its agent and its task are lost together.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from standins import FOREVER, ORPHANS, PRELUDE, SERVE, slack, until

from muster.events import Exited, HostLost, Released, Spawned, Started, Step, StopAsked, Warned

from .lab import SEED
from .remote import PS0, PS1, WORKER1, WORKER2, Launch, Site

TASKS = dict(zip(("ps/0", "ps/1", "worker/0", "worker/1", "worker/2"), SEED, strict=True))
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def training(site: Site, *options: str, code: str = SERVE + FOREVER) -> Launch:
    """A run whose three workers make steps."""
    launch = site.run(code, *options)
    for task in ("worker/0", "worker/1", "worker/2"):
        launch.saw(Step, task=task)
    return launch


def stepping(launch: Launch, task: str, attempt: int) -> None:
    """``task`` makes steps in ``attempt``, and they grow."""
    step = launch.saw(Step, task=task, attempt=attempt).step
    until(lambda: launch.events(Step, task=task, attempt=attempt)[-1].step > step, what=f"{task} goes on")


def finish(site: Site, launch: Launch) -> None:
    site.everywhere("enough", "")
    assert launch.wait() == 0, launch.text()


def ends_within(seconds: float, launch: Launch) -> int:
    began = time.monotonic()
    code = launch.wait()
    assert time.monotonic() - began < slack(seconds), launch.text()
    return code


@contextmanager
def watched(site: Site, host: str, task: str) -> Iterator[list[int]]:
    """The most copies of ``task`` that were alive on ``host`` at one moment meanwhile."""
    most, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            most[0] = max(most[0], len(site.copies(host, task)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


# --- the launcher


def test_when_the_launcher_is_killed_nothing_is_alive_anywhere_ten_seconds_later(site: Site):
    """P6, P18, P22, SL-08: tasks that ignore TERM, and a grandchild in a session of its own, included."""
    launch = training(site, code=SERVE.replace("if role", ORPHANS + "if role") + DEAF + FOREVER)
    for task in ("worker/0", "worker/2"):
        launch.said(task, "orphan")
    launch.kill()
    site.clean(10.0)
    code, said = site.ask("status")
    assert code == 0 and "its launcher died" in said
    assert site.ask("stop")[0] == 0


def test_when_the_launcher_is_killed_while_hosts_connect_nothing_is_left(site: Site):
    """P6."""
    launch = site.run(SERVE + FOREVER)
    until(lambda: site.left(PS0) or site.left(WORKER2), what="an agent comes up")
    launch.kill()
    site.clean(10.0)


@pytest.mark.slow
def test_a_launcher_frozen_for_longer_than_the_lease_ends_its_run_and_says_so(site: Site):
    """P12."""
    launch = training(site)
    launch.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    until(lambda: not any(site.left(host) for host in SEED), slack(13.0), "the lease ends the tasks")
    assert time.monotonic() - frozen > 9.0
    launch.signal(signal.SIGCONT)
    assert launch.wait() == 1
    assert "stopped by its hosts, which had heard nothing from the launcher" in launch.text()
    assert launch.events(StopAsked)[0].how == "lease" and set(launch.attempts().values()) == {1}


@pytest.mark.slow
def test_a_launcher_frozen_for_less_than_the_lease_goes_on(site: Site):
    """P12: hosts that it did not hear meanwhile are not blamed, talkative or silent."""
    launch = training(site)
    launch.signal(signal.SIGSTOP)
    time.sleep(7.0)
    launch.signal(signal.SIGCONT)
    stepping(launch, "worker/1", 1)
    finish(site, launch)
    assert not launch.events(HostLost) and set(launch.attempts().values()) == {1}


# --- an agent, a machine


def test_when_an_agent_is_killed_its_host_is_named_and_its_task_comes_back(site: Site):
    """P7: noticed within 5 s; the worker's own orphan does not stay either."""
    launch = training(site, code=SERVE.replace("if role", ORPHANS + "if role") + FOREVER)
    before = set(site.left(WORKER1))
    (agent,) = [pid for pid, said in site.left(WORKER1).items() if "b64decode" in said]
    began = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    lost = launch.saw(HostLost, host="worker1")
    assert time.monotonic() - began < slack(5.0)
    stepping(launch, "worker/1", 2)
    assert not before & set(site.left(WORKER1))
    finish(site, launch)
    assert launch.attempts() == {**dict.fromkeys(TASKS, 1), "worker/1": 2}
    assert "the agent on worker1 is gone" in launch.text() and lost.why


@pytest.mark.slow
def test_a_worker_whose_machine_has_no_power_is_noticed_and_comes_back_with_it(site: Site):
    """N1: silent, so only the unanswered heartbeats tell."""
    launch = training(site, "--retries", "8", "--backoff", "0.5")
    site.lab.power_off(WORKER2)
    began = time.monotonic()
    launch.saw(Warned, text="worker2 has not answered for 5 s")
    assert time.monotonic() - began < slack(6.5)
    assert "not answered for 8 s" in launch.saw(HostLost, host="worker2").why
    site.lab.power_on(WORKER2)
    until(lambda: launch.attempts()["worker/2"] > 1, what="it comes back")
    stepping(launch, "worker/2", launch.attempts()["worker/2"])
    stepping(launch, "worker/0", 1)
    site.write(WORKER2, "train.py", SERVE + FOREVER)
    finish(site, launch)
    assert {task: n for task, n in launch.attempts().items() if task != "worker/2"} == dict.fromkeys(list(TASKS)[:4], 1)


@pytest.mark.slow
def test_a_machine_that_stays_away_ends_the_run_with_its_name(site: Site):
    """N1: and nothing of the run is left on the others."""
    launch = training(site, "--retries", "1")
    site.lab.power_off(WORKER2)
    site.broken.add(WORKER2)
    assert ends_within(45.0, launch) == 1
    assert "worker/2 on worker2" in launch.text() and "the agent on worker2 is gone" in launch.text()


@pytest.mark.slow
def test_a_ps_whose_machine_is_lost_sends_everyone_back(site: Site):
    """N1: the tensorflow engine, where the ps holds what all need."""
    launch = training(site, "--retries", "8")
    site.lab.unplug(PS1)
    launch.saw(HostLost, host="ps1")
    until(lambda: launch.events(Started, task="ps/1", attempt=2), what="ps/1 is started again")
    site.lab.plug(PS1)
    until(lambda: launch.attempts().get("worker/0", 0) > 1, what="all come back")
    stepping(launch, "worker/0", launch.attempts()["worker/0"])
    finish(site, launch)
    assert "ps/1 failed: everyone goes back" in launch.text()


# --- a cable


@pytest.mark.slow
def test_when_a_cable_is_pulled_the_far_side_ends_its_task_by_itself(site: Site):
    """The lease of the design: 10 s, seen on the machine that nobody can reach."""
    launch = training(site, "--retries", "8")
    site.lab.unplug(WORKER1)
    pulled = time.monotonic()
    launch.saw(HostLost, host="worker1")
    until(lambda: not site.left(WORKER1), slack(14.0), "the lease is over")
    assert time.monotonic() - pulled > 8.0
    site.lab.plug(WORKER1)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


def test_a_cut_of_three_seconds_is_ridden_through(site: Site):
    """N3."""
    launch = training(site)
    with watched(site, WORKER1, "worker/1") as most:
        site.lab.unplug(WORKER1)
        time.sleep(3.0)
        site.lab.plug(WORKER1)
        healed = len(launch.events(Step, task="worker/1"))
        until(lambda: len(launch.events(Step, task="worker/1")) > healed + 3, what="worker/1 is heard again")
    finish(site, launch)
    assert most == [1] and set(launch.attempts().values()) == {1} and not launch.events(HostLost)


@pytest.mark.slow
def test_a_cut_of_nine_seconds_gives_one_restart_and_never_two_copies(site: Site):
    """N3: the launcher has given the host up, the agent there has not given up its task, and both meet again."""
    launch = training(site, "--backoff", "0.1", "--retries", "8")
    with watched(site, WORKER1, "worker/1") as most:
        site.lab.unplug(WORKER1)
        launch.saw(HostLost, host="worker1")
        site.lab.plug(WORKER1)
        until(lambda: launch.attempts()["worker/1"] > 1, what="it comes back")
        stepping(launch, "worker/1", launch.attempts()["worker/1"])
    finish(site, launch)
    assert most == [1] and "is taken" not in launch.text()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_host_that_one_direction_is_cut_to_is_lost_like_any_other(site: Site, way: str):
    """N4: between the launcher and one host."""
    launch = training(site, "--retries", "8")
    sender, receiver = ("ctl", WORKER1) if way == "there" else (WORKER1, "ctl")
    site.lab.cut(sender, receiver)
    began = time.monotonic()
    launch.saw(HostLost, host="worker1")
    assert time.monotonic() - began < slack(11.0)
    site.lab.mend(sender, receiver)
    launch.signal(signal.SIGINT)
    assert launch.process.wait(30) == 130
    site.clean(12.0)  # what its ssh said at the end may be on its way for long; then the lease


def test_delay_and_loss_cost_no_restart(site: Site):
    """N2: 200 ms and 1 % everywhere, the launcher's own connections included."""
    launch = training(site)
    for host in SEED:
        site.lab.delay(host, 200, loss=1)
    time.sleep(6.0)
    stepping(launch, "worker/2", 1)
    finish(site, launch)
    assert not launch.events(HostLost) and set(launch.attempts().values()) == {1}


def test_a_flood_of_output_over_a_slow_cable_is_no_silence(site: Site):
    """N6: 5 Mbit/s."""
    site.lab.rate(WORKER1, 5)
    flood = "if index == '1':\n    for n in range(60): os.write(1, b'x' * 65535 + b'\\n')\n"
    launch = site.run(SERVE + flood + FOREVER)
    launch.saw(Step, task="worker/1")
    site.lab.rate(WORKER1, None)
    finish(site, launch)
    assert not launch.events(HostLost) and launch.log("worker/1").count("x") == 60 * 65535


def test_a_connection_that_is_reset_gives_one_restart(site: Site):
    """N5: the ssh connection itself."""
    launch = training(site)
    site.lab.cut("ctl", WORKER1, reset=True)
    launch.saw(HostLost, host="worker1")
    site.lab.mend("ctl", WORKER1, reset=True)
    stepping(launch, "worker/1", 2)
    finish(site, launch)
    assert launch.attempts()["worker/1"] == 2


# --- who is not there at the start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "check"),
    [("no power", False), ("firewall", False), ("firewall", True), ("refused", False), ("hangs", False)],
)
def test_a_host_out_of_reach_at_launch_is_named_and_nothing_is_left_on_the_others(site: Site, how: str, check: bool):
    """N10, SL-05: within 10 s (a sshd that takes the connection and never speaks: no more than its time limits)."""
    site.broken.add(WORKER1)
    if how == "no power":
        site.lab.power_off(WORKER1)
    elif how == "firewall":
        site.lab.cut("ctl", WORKER1)
    elif how == "refused":
        site.lab.crash(WORKER1)
    else:
        site.lab.freeze(WORKER1)
    launch = site.run(SERVE + FOREVER, check=check)
    assert launch.wait() == 1
    assert "worker1" in launch.text() and "worker0 " not in launch.text()
    said = {"no power": ("No route", "imed out"), "firewall": ("imed out",), "refused": ("efused",)}
    assert any(word in launch.text() for word in said.get(how, ("imed out", "answer"))), launch.text()
    assert launch.seconds < slack(12.0 if how != "hangs" else 25.0), launch.seconds
    for folder in site.runs.glob("*/journal.jsonl"):
        if f'"pid":{launch.process.pid},' in folder.read_text():
            code, told = site.ask("status", folder.parent.name)
            assert code == 0 and "ended" in told and "Spawned" not in folder.read_text()


def test_who_waits_for_whom_is_said(site: Site):
    """NW-01: a ps that does not come up, in the journal and in status."""
    launch = site.run(PRELUDE + "if me == 'ps/1': time.sleep(600)\n" + SERVE.removeprefix(PRELUDE) + FOREVER)
    until(lambda: "wait" in launch.text() and "ps/1 (ps1, ps1.example.com:2222)" in launch.text(), what="it is said")
    code, said = site.ask("status")
    assert code == 0 and "ps/1 (ps1, ps1.example.com:2222)" in said
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


def test_a_port_that_a_stranger_holds_is_named_with_its_holder(site: Site):
    """NW-09, N8: on the host, before anything starts."""
    code = "import socket; s = socket.create_server(('', 2222)); print(flush=True); s.accept()"
    stranger = site.lab.popen_in(WORKER1, ["/usr/bin/python3", "-c", code])
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"\n"
        launch = site.run(SERVE + FOREVER, check=True)
        assert launch.process.wait(60) == 1
        assert "port 2222 of worker/1 is taken" in launch.text() and "import socket" in launch.text()
        launch = site.run(SERVE + FOREVER)
        assert launch.process.wait(60) == 1
        assert "port 2222 of worker/1 on worker1 is taken" in launch.text() and "import socket" in launch.text()
    finally:
        stranger.kill()
        stranger.communicate()
    site.clean(slack(2.0))


def test_ends_that_are_asked_for_reach_every_machine(site: Site):
    """P8, SL-08, SL-09: Ctrl-C; and a stranger's python on a host lives on."""
    stranger = site.lab.popen_in(WORKER1, ["/usr/bin/python3", "-c", "import time; time.sleep(600)"])
    try:
        launch = training(site)
        launch.signal(signal.SIGINT)
        assert launch.process.wait(30) == 130
        assert site.ask("stop")[0] == 0 and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()
    site.clean(slack(2.0))
    assert {code for codes in launch.codes().values() for code in codes} == {-15}


def test_a_worker_that_fails_leads_the_report_with_its_own_words(site: Site):
    """SL-11, SL-13: its traceback, its host, its restart."""
    code = SERVE + "if index == '1' and attempt == 1: raise RuntimeError('no such feature')\n" + FOREVER
    launch = training(site, code=code)
    assert launch.events(Exited, task="worker/1")[0].error == "RuntimeError: no such feature"
    assert launch.events(Released, task="worker/1")
    finish(site, launch)
    assert launch.attempts()["worker/1"] == 2


def test_a_second_run_on_the_same_ports_is_refused_and_harms_nobody(site: Site):
    """N12, NW-09: our own old job, named with its run."""
    launch = training(site)
    other = site.run(SERVE + FOREVER)
    assert other.process.wait(60) == 1
    assert f"of run {launch.run().id}: muster stop {launch.run().id}" in other.text()
    stepping(launch, "worker/0", 1)
    finish(site, launch)
    assert set(launch.attempts().values()) == {1} and len(launch.events(Spawned)) == 5
