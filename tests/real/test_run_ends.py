"""How runs end, with real processes: well, by themselves, by a signal, by a kill; and that nothing is left."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import alive, letter
from standins import FOREVER, ORPHANS, PRELUDE, SERVE, STEPS, slack, until

from muster.cli.attach import SAFE_PATH
from muster.events import Exited, Frozen, Ready, RunStarted, Spawned, Step, Stopping
from muster.journal import Journal
from muster.launch.sweep import processes_of


def test_a_run_ends_well_and_can_be_asked_about_afterwards(muster):
    """SD-01: the ps, which never ends by itself, is ended; exit 0."""
    launch = muster.run(SERVE + STEPS + 'say("hello from", me); muster.report(accuracy=0.5)', "--json")
    assert launch.wait() == 0
    told = launch.result()
    assert told["ok"] and told["steps"] == 10 and told["metrics"] == {"accuracy": 0.5}
    assert {t["task"]: (t["phase"], t["exit"]) for t in told["tasks"]} == {
        "ps/0": ("stopped", "ended"),
        "worker/0": ("done", "exit 0"),
        "worker/1": ("done", "exit 0"),
    }
    assert launch.codes()["ps/0"] == [-15]
    assert "worker/1 | hello from worker/1" in launch.text()
    code, said = muster.ask("status", "--json")
    assert code == 0 and (json.loads(said)["state"], json.loads(said)["ok"]) == ("ended", True)
    assert muster.ask("logs", "worker/1") == (0, "hello from worker/1\n")
    assert muster.ask("stop") == (0, f"run {launch.run().id} was over; nothing of it was alive\n")


def test_the_report_has_no_colours_where_nobody_looks(muster):
    """SL-12: a file gets plain lines with whole-line prefixes."""
    launch = muster.run(SERVE + STEPS)
    assert launch.wait() == 0
    assert "\x1b" not in launch.text() and "succeeded in" in launch.text()


@pytest.mark.parametrize("screen", ["a reader that leaves", "a full disk"])
@pytest.mark.parametrize("ok", [True, False], ids=["well", "badly"])
def test_a_screen_that_cannot_be_written_any_more_changes_nothing(muster, screen, ok):
    script = muster.script(SERVE + STEPS + ("" if ok else "sys.exit(3)\n"))
    ours = [sys.executable, "-m", "muster", "run", "--kind", "v1", "--ps", "1", "--workers", "1", "--retries", "0"]
    full, reader = "> /dev/full", "| true"
    line = f"set -o pipefail; {shlex.join([*ours, script.name])} {reader if 'reader' in screen else full}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=muster.folder, env=muster.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0 if ok else 1, "")
    told = json.loads(muster.ask("status", "--json")[1])
    assert (told["state"], told["ok"], told["steps"]) == ("ended", ok, 10)


# --- signals to the launcher

SAVES = SERVE + (
    "def save(*_):\n    time.sleep(0.3); say('saved', me); sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\n" + FOREVER
)
IGNORES = SERVE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('deaf', me)\n" + FOREVER


@pytest.mark.parametrize(
    ("sig", "code", "cause"),
    [
        (signal.SIGINT, 130, "stopped by Ctrl-C"),
        (signal.SIGTERM, 143, "stopped by a SIGTERM to the launcher"),
        (signal.SIGHUP, 143, "stopped by a SIGTERM to the launcher"),
    ],
)
def test_a_signal_ends_the_run_cleanly(muster, sig, code, cause):
    """P8, P9, SL-08: workers get time to save while the ps still serves; exit 130 or 143."""
    launch = muster.run(SAVES)
    for task in ("worker/0", "worker/1"):
        launch.saw(Step, task=task)
    launch.signal(sig)
    assert launch.wait() == code
    assert cause in launch.text()
    for task in ("worker/0", "worker/1"):
        assert b"saved" in launch.written(task)
    exits = {e.task: e.at for e in launch.events(Exited)}
    assert launch.events(Stopping, task="ps/0")[0].at >= max(exits["worker/0"], exits["worker/1"])
    assert muster.ask("stop")[1].endswith("nothing of it was alive\n")


def test_ctrl_c_twice_ends_the_run_at_once(muster):
    """P8, SL-08: though every worker ignores TERM and has a minute of grace."""
    launch = muster.run(IGNORES, "--grace", "60")
    for task in ("worker/0", "worker/1"):
        launch.said(task, "deaf")
    launch.signal(signal.SIGINT)
    launch.saw(Stopping)
    asked = time.monotonic()
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    assert time.monotonic() - asked < slack(5.0)
    assert {code for codes in launch.codes().values() for code in codes} == {-9}


def test_ctrl_c_twice_does_not_wait_for_a_ps_either(muster):
    """P8: only the ps is left, and ignores TERM."""
    deaf = "if role == 'ps': signal.signal(signal.SIGTERM, signal.SIG_IGN); say('deaf'); serve()\n"
    launch = muster.run(PRELUDE + deaf + "server = listen()\n" + FOREVER, "--grace", "60")
    launch.said("ps/0", "deaf")
    launch.saw(Step, task="worker/1")
    launch.signal(signal.SIGINT)
    launch.saw(Stopping, task="ps/0")
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130 and launch.codes()["ps/0"] == [-9]


def test_a_task_that_swallows_term_is_killed_after_the_grace_time(muster):
    """P22."""
    launch = muster.run(IGNORES, "--grace", "0.5")
    launch.said("worker/0", "deaf"), launch.said("worker/1", "deaf")
    launch.signal(signal.SIGTERM)
    assert launch.wait() == 143
    asked, gone = launch.events(Stopping, task="worker/0")[0].at, launch.events(Exited, task="worker/0")[0].at
    assert launch.codes()["worker/0"] == [-9] and gone - asked >= 0.45


def test_ctrl_c_while_tasks_start_leaves_nothing(muster):
    """SL-08."""
    launch = muster.run("import time; time.sleep(600)")
    launch.saw(RunStarted)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


# --- kill -9 of the launcher


def test_when_the_launcher_is_killed_nobody_is_alive_two_seconds_later(muster):
    """P6, P18, P22: a double-forked grandchild in a session of its own that ignores TERM included."""
    launch = muster.run(SERVE.replace("if role", ORPHANS + "if role") + FOREVER)
    for task in ("worker/0", "worker/1"):
        launch.saw(Step, task=task)
        launch.said(task, "orphan")
    run, agent = launch.run().id, launch.agent()
    assert len(processes_of(run)) == 5 and alive(agent)
    launch.signal(signal.SIGKILL)
    launch.process.wait()
    until(lambda: not launch.orphans(), slack(2.0), "all are gone")
    code, said = muster.ask("status")
    assert code == 0 and f"run {run}: its launcher died" in said
    assert muster.ask("stop")[0] == 0


def test_when_the_launcher_is_killed_tasks_that_ignore_term_are_gone_too(muster):
    """P6, P22."""
    launch = muster.run(IGNORES)
    launch.said("worker/0", "deaf"), launch.said("worker/1", "deaf")
    launch.signal(signal.SIGKILL)
    launch.process.wait()
    until(lambda: not launch.orphans(), slack(2.0), "all are gone")


def test_when_the_agent_is_killed_all_go_and_come_back_under_another(muster):
    """P7."""
    launch = muster.run(SERVE + FOREVER, "--backoff", "0.05")
    launch.saw(Step, task="worker/0"), launch.saw(Step, task="worker/1")
    first = [launch.pid(task) for task in ("ps/0", "worker/0", "worker/1")]
    os.kill(launch.agent(), signal.SIGKILL)
    launch.saw(Step, task="worker/0", attempt=2), launch.saw(Step, task="worker/1", attempt=2)
    assert "the agent on here is gone" in launch.text() and not any(map(alive, first))
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130


def test_a_launcher_that_was_frozen_goes_on(muster):
    """P12: local."""
    launch = muster.run(SERVE + FOREVER.replace('not os.path.exists("enough")', "step < 60"))
    launch.saw(Step, task="worker/0")
    launch.signal(signal.SIGSTOP)
    until(lambda: letter(launch.process.pid) == "T")
    time.sleep(0.5)  # as long as it is frozen: nothing is waited for
    launch.signal(signal.SIGCONT)
    assert launch.wait() == 0 and set(map(tuple, launch.codes().values())) == {(0,), (-15,)}


# --- muster stop, from another terminal


def test_stop_ends_the_run_and_the_second_time_finds_nothing(muster):
    """SL-08."""
    launch = muster.run(SAVES)
    launch.saw(Step, task="worker/0"), launch.saw(Step, task="worker/1")
    assert muster.ask("stop") == (0, f"run {launch.run().id} has ended\n")
    assert launch.wait() == 130 and "stopped by muster stop" in launch.text()
    assert b"saved" in launch.written("worker/0")
    assert muster.ask("stop")[1].endswith("nothing of it was alive\n")


def test_stop_now_does_not_wait(muster):
    launch = muster.run(IGNORES, "--grace", "60")
    launch.said("worker/0", "deaf"), launch.said("worker/1", "deaf")
    assert muster.ask("stop", "--now")[0] == 0
    assert launch.wait() == 130


def test_stop_touches_nothing_that_is_not_of_the_run(muster):
    """SL-09: an unrelated python survives, and so does the process that a dead launcher's pid was given to."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            launch = muster.run(SERVE + STEPS)
            assert launch.wait() == 0
            (launch.run().path / "journal.jsonl").write_text("")
            journal = Journal(muster.launches[0].folder.parent / "runs" / _only_run(muster) / "journal.jsonl")
            journal.append([RunStarted(0.0, "x", 1.0, stranger.pid, 12345.0)])
            code, said = muster.ask("stop")
            assert code == 0 and "nothing of it was alive" in said
            assert stranger.poll() is None
        finally:
            stranger.kill()


def _only_run(muster):
    (run,) = [p.name for p in (muster.folder / "runs").iterdir() if p.is_dir()]
    return run


# --- the end that the tasks choose


def test_a_worker_that_never_ends_is_ended_and_the_run_succeeds(muster):
    """SD-02."""
    code = SERVE + STEPS + "if index == '1': say('done'); time.sleep(600)"
    launch = muster.run(code, "--settle", "0.5")
    assert launch.wait() == 0
    assert "succeeded (1 task had to be ended)" in launch.text() and b"done" in launch.written("worker/1")


def test_the_ps_go_while_the_chief_exports(muster):
    """SD-08."""
    code = SERVE + STEPS + "muster.finished()\nif index == '0':\n    while not os.path.exists('go'): time.sleep(0.02)\n"
    launch = muster.run(code)
    assert launch.saw(Exited, task="ps/0").code == -15
    assert alive(launch.pid("worker/0")) and not launch.events(Exited, task="worker/0")
    (launch.folder / "go").touch()
    assert launch.wait() == 0 and launch.codes()["ps/0"] == [-15]


def test_a_worker_that_ends_early_is_no_failure(muster):
    """P17."""
    launch = muster.run(SERVE + "if index == '1': sys.exit(0)\n" + STEPS)
    assert launch.wait() == 0 and launch.codes()["worker/1"] == [0]


def test_a_late_starter_still_does_its_work(muster):
    """NW-02: the others are through when it comes."""
    code = SERVE + "if index == '1':\n    while not os.path.exists('go'): time.sleep(0.02)\n" + STEPS + "say('through')"
    launch = muster.run(code, "--done", "all-workers", "--barrier", "0.2")
    launch.saw(Exited, task="worker/0", code=0)
    assert not launch.events(Ready, task="worker/1")
    (launch.folder / "go").touch()
    assert launch.wait() == 0 and b"through" in launch.written("worker/1")


def test_a_frozen_task_is_in_the_journal_and_does_not_keep_the_run_from_ending(muster):
    """P10, P11."""
    launch = muster.run(SERVE + FOREVER, "--grace", "60")
    launch.saw(Step, task="worker/0"), launch.saw(Step, task="worker/1")
    os.kill(launch.pid("worker/1"), signal.SIGSTOP)
    launch.saw(Frozen, task="worker/1")
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130 and launch.codes()["worker/1"] == [-15]
    assert launch.events(Spawned, task="worker/1")[-1].attempt == 1


# --- in the background


def test_a_detached_run_starts_in_any_folder_and_keeps_its_screen(muster):
    """Temporary files on another disk than the runs, and a file of the user's that is called like a library of ours."""
    muster.script(SERVE + FOREVER)
    elsewhere = Path("/dev/shm")
    muster.env |= {"TMPDIR": str(elsewhere)} if elsewhere.is_dir() else {}
    ours = [sys.executable, *SAFE_PATH, "-m", "muster", "run", "--detach", "--engine", "tensorflow", "--ps", "1"]
    if SAFE_PATH:
        (muster.folder / "click.py").write_text("raise SystemExit('the click of the user')\n")
    done = subprocess.run(
        [*ours, "--workers", "1", "--ports", f"{muster.ports[0]}-{muster.ports[-1]}", "train.py"],
        cwd=muster.folder, env=muster.env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    (muster.folder / "click.py").unlink(missing_ok=True)
    stopped = muster.ask("stop")
    assert done.returncode == 0 and "goes on in the background" in done.stdout, done.stdout + done.stderr
    (folder,) = (muster.folder / "runs").glob("train-*")
    assert stopped == (0, f"run {folder.name} has ended\n")
    assert "stopped by muster stop" in (folder / "screen.log").read_text()


def test_ctrl_c_before_a_detached_run_has_begun_ends_it(muster):
    """Another run holds the lock of planning."""
    muster.script(SERVE + FOREVER)
    runs = muster.folder / "runs"
    runs.mkdir()
    with (runs / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "run", "--detach", "train.py"], cwd=muster.folder, env=muster.env
        )
        until(lambda: list(runs.glob(".screen-*")))
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
    assert not list(runs.glob(".screen-*")) and not list(runs.glob("train-*"))
