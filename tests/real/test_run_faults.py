"""What happens when tasks die, lie, wait or find their port taken: real processes, stand-in scripts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from launching import Launch
from standins import FOREVER, PRELUDE, SERVE, STEPS, slack, until

from muster.events import Exited, Listening, PortTaken, RunEnded, Started, Step, Waiting


def test_a_killed_worker_comes_back_and_the_others_never_stop(muster):
    """P1, SD-07: noticed within 0.3 s on an idle machine."""
    launch = muster.run(SERVE + FOREVER, "--backoff", "0.1")
    launch.saw(Step, task="worker/0"), launch.saw(Step, task="worker/1")
    born = launch.events()[0].wall
    killed = time.time() - born
    os.kill(launch.pid("worker/1"), signal.SIGKILL)
    noticed = launch.saw(Exited, task="worker/1").at
    launch.saw(Step, task="worker/1", attempt=2)
    assert noticed - killed < slack(0.3)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    assert launch.codes() == {"ps/0": [-15], "worker/0": [-15], "worker/1": [-9, -15]}
    assert "worker/1 on here failed (SIGKILL)" in launch.text()


def test_a_killed_ps_takes_everybody_back(muster):
    """P4: everybody out, then everybody in."""
    launch = muster.run(SERVE + FOREVER, "--backoff", "0.1")
    launch.saw(Step, task="worker/0"), launch.saw(Step, task="worker/1")
    os.kill(launch.pid("ps/0"), signal.SIGKILL)
    launch.saw(Step, task="worker/0", attempt=2), launch.saw(Step, task="worker/1", attempt=2)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    out = max(e.at for e in launch.events(Exited, attempt=1))
    assert all(e.at >= out for e in launch.events(Started, attempt=2))
    assert "no checkpoint folder is set" in launch.text()  # FR-02


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("os._exit(3)", "exit 3"),
        ("sys.exit('out of luck')", "exit 1"),
    ],
)
def test_a_crash_is_named_by_its_signal_or_its_code(muster, act, said):
    """P13: task, host, exit, log."""
    launch = muster.run(SERVE + f"if index == '1': say('last words'); {act}\n" + FOREVER, "--retries", "0", "--json")
    assert launch.wait() == 1
    told = launch.result()
    assert told["cause"].startswith("worker/1 on here ended ") and f"({said})" in told["cause"]
    assert {t["task"]: t["exit"] for t in told["tasks"]}["worker/1"] == said
    assert b"last words" in launch.written("worker/1")
    if said.startswith("exit"):
        assert ("out of luck" if "luck" in act else "last words") in told["because"]


BUG = """
def train():
    for step in range(1, 51):
        muster.report(step=step)
    raise ValueError("bad batch")
if index == "1": train()
"""


def test_a_python_error_ends_the_run_with_the_traceback_of_the_user(muster):
    """P14: theirs and not ours, after at most three tries."""
    launch = muster.run(SERVE + BUG + FOREVER, "--backoff", "0.05", "--retries", "9")
    assert launch.wait() == 1
    text = launch.text()
    trace = text[text.rindex("Traceback (most recent call last)") :]
    assert "train.py" in trace and "in train" in trace and "ValueError: bad batch" in trace
    assert "muster/train" not in trace and "runpy" not in trace
    assert "the same error twice" in text and len(launch.codes()["worker/1"]) <= 3


def test_a_crash_loop_at_import_stops_within_its_budget(muster):
    """P15: with a back-off that grows."""
    launch = muster.run("import no_such_module\n", "--backoff", "0.1", "--retries", "2", "--json")
    assert launch.wait() == 1
    told = launch.result()
    assert "No module named 'no_such_module'" in told["because"] and "install it for" in told["try"]
    assert max(map(len, launch.codes().values())) <= 3


def test_a_crash_loop_with_other_words_each_time_stops_too(muster):
    """P15."""
    code = SERVE + "if index == '1': sys.exit('attempt %d' % attempt)\n" + FOREVER
    launch = muster.run(code, "--backoff", "0.1", "--retries", "2")
    assert launch.wait() == 1 and "too many restarts" in launch.text()
    starts = [e.at for e in launch.events(Started, task="worker/1")]
    ends = [e.at for e in launch.events(Exited, task="worker/1")]
    pauses = [start - end for start, end in zip(starts[1:], ends, strict=False)]
    assert len(pauses) == 2 and pauses[0] >= 0.09 and pauses[1] >= 0.19


def test_restarts_that_bring_no_progress_have_their_own_exit_code(muster):
    """P16: three cycles, exit 3."""
    code = SERVE + "muster.report(step=7); time.sleep(0.3)\nif index == '1': os._exit(attempt)\ntime.sleep(600)"
    launch = muster.run(code, "--backoff", "0.05", "--retries", "9")
    assert launch.wait() == 3 and "restarts bring no progress" in launch.text()
    assert launch.codes()["worker/1"] == [1, 2, 3]


def test_one_that_fails_at_once_brings_the_others_home(muster):
    """SL-11: within the grace time, and its last lines on top."""
    code = PRELUDE + "server = listen()\nif index == '2': time.sleep(0.2); raise SystemExit('rank 2 is lost')\n"
    options = ["--kind", "mwms", "--ps", "0", "--workers", "3", "--retries", "0", "--grace", "2"]
    launch = muster.run(code + "time.sleep(120)", *options, "--json")
    assert launch.wait() == 1
    assert "worker/2 on here ended" in launch.result()["cause"] and "rank 2 is lost" in launch.result()["because"]
    failed, ended = launch.events(Exited, task="worker/2")[0].at, launch.events(RunEnded)[0].at
    assert ended - failed < slack(2.0)


def test_who_waits_for_whom_is_said_in_plain_lines(muster):
    """SL-13, NW-01: the ps never listens; the tasks print nothing."""
    launch = muster.run(PRELUDE + "if role == 'ps': time.sleep(600)\nserver = listen(); time.sleep(600)")
    launch.saw(Waiting, whom="ps/0")
    until(lambda: "wait for ps/0 (here, 127.0.0.1:" in launch.text(), what="the screen says it")
    assert "not listening yet" in launch.text()
    assert "wait for ps/0 (here, 127.0.0.1:" in muster.ask("status")[1].replace("\n", " ")
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


# --- ports


def exact(ports, *at):
    """--ps and --workers with exact seats."""
    seats = [f"127.0.0.1:{ports[n]}" for n in at]
    return ["--ps", seats[0], "--workers", ",".join(seats[1:])]


def test_an_exact_port_that_a_stranger_holds_is_named_with_its_holder(muster, ports):
    """N8, NW-09: pid, command and user."""
    with socket.create_server(("127.0.0.1", ports[1])):
        launch = muster.run(SERVE + STEPS, *exact(ports, 0, 1, 2), "--json")
        assert launch.wait() == 1
    told = launch.result()
    assert told["cause"] == f"port {ports[1]} of worker/0 on 127.0.0.1 is taken"
    assert f"pid {os.getpid()} (" in told["because"] and "user " in told["because"]


def test_an_exact_port_that_an_older_run_holds_names_that_run(muster, ports):
    """N12, NW-09, CD-03: the same identity twice; the first is not disturbed."""
    first = muster.run(SERVE + FOREVER, *exact(ports, 0, 1, 2))
    first.saw(Listening, task="worker/1")
    second = muster.run(SERVE + FOREVER, *exact(ports, 0, 1, 2), "--json")
    assert second.wait() == 1
    run = first.run().id
    assert f"of run {run}: muster stop {run}" in second.result()["because"]
    assert not first.events(Exited)
    first.signal(signal.SIGINT)
    assert first.wait() == 130


def test_a_task_started_by_hand_does_not_become_a_second_one(muster):
    """N12: with the environment that ``plan`` prints; the run goes on."""
    launch = muster.run(SERVE + FOREVER)
    launch.saw(Listening, task="worker/1"), launch.saw(Step, task="worker/1")
    task = launch.run().plan().tasks["worker/1"]
    by_hand = subprocess.run(
        [sys.executable, str(muster.folder / "train.py")],
        env={**os.environ, **task.env, "MUSTER_ATTEMPT": "1"},
        capture_output=True,
        timeout=30,
    )
    assert by_hand.returncode == 1 and b"Address already in use" in by_hand.stderr
    assert not launch.events(Exited)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


THIEF = """
mark = sys.argv[1]
if role == "worker" and index == "0" and not os.path.exists(mark):
    open(mark, "w").close()
    stolen = socket.create_server((host, int(told["worker"][1].rpartition(":")[2])))
    time.sleep(600)
if role == "worker" and index == "1":
    while not os.path.exists(mark): time.sleep(0.02)
"""


def test_a_port_that_is_lost_between_check_and_start_is_replaced(muster, tmp_path):
    """N8, NW-10: the plan had chosen it, so it chooses another."""
    code = PRELUDE + THIEF + "if role == 'ps': serve()\nserver = listen()\n" + STEPS
    launch = muster.run(code, "--grace", "1", args=(str(tmp_path / "mark"),))
    assert launch.wait() == 0
    runs = sorted((p for p in (tmp_path / "runs").iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime_ns)
    plans = [json.loads((p / "plan.json").read_text())["tasks"] for p in runs]
    assert len(plans) == 2
    lost = {t["port"] for t in plans[0].values()} - {t["port"] for t in plans[1].values()}
    assert plans[0]["worker/1"]["port"] in lost


def test_a_port_in_use_before_the_start_is_passed_over(muster, ports):
    """N8."""
    with socket.create_server(("127.0.0.1", ports[0])):
        launch = muster.run(SERVE + STEPS)
        assert launch.wait() == 0
    assert ports[0] not in {t.port for t in launch.run().plan().tasks.values()}
    assert not launch.events(PortTaken)


def test_many_launches_at_once_do_not_meet(muster, ports):
    """NW-10: six of three tasks each from one range of twenty ports."""
    code = SERVE + (
        "muster.ready()\nfor peer in told['ps']:\n    h, _, p = peer.rpartition(':')\n"
        "    socket.create_connection((h, int(p)), 10).close()\nsay('met', told['ps'])\n" + STEPS + "time.sleep(0.5)"
    )
    launches: list[Launch] = [muster.run(code) for _ in range(6)]
    for launch in launches:
        assert launch.wait() == 0
    runs = {launch.run().id for launch in launches}
    assert len(runs) == 6
    lives = []
    for launch in launches:
        begun = launch.events()[0].wall
        ended = begun + launch.events(RunEnded)[0].at
        lives.append((begun, ended, {t.port for t in launch.run().plan().tasks.values()}))
        assert not launch.events(PortTaken)
    for n, (begun, ended, mine) in enumerate(lives):
        for other_begun, other_ended, theirs in lives[:n]:
            assert begun > other_ended or other_begun > ended or not mine & theirs
