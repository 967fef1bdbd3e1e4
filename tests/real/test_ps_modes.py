"""Spare workers and bounded staleness under ``muster run``: processes that step through ``muster.connect``, in NumPy.

The workers meet at a file, not at a clock: who is slow waits until the others have done what it is slow for.
"""

import json
import os
import signal

import pytest
from standins import until

SCRIPT = """\
import json, os, pathlib, sys, time
import numpy as np
import muster
me, attempt, there = muster.task(), int(os.environ["MUSTER_ATTEMPT"]), pathlib.Path(sys.argv[1])
ps = muster.connect()
ps.declare({"w": np.zeros(100, np.float32)}, "sgd", learning_rate=1.0)
ones = {"w": np.ones(100, np.float32)}
def wait(name):
    end = time.monotonic() + 30
    while not (there / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
"""


@pytest.fixture
def start(muster):
    def begin(code, *options, workers=3):
        here = muster.folder
        options = ("--engine", "muster", "--ps", "2", "--workers", str(workers), "--backoff", "0.05", *options)
        return muster.run(SCRIPT + code, *options, args=(str(here),))

    return begin


SPARE = """
STEPS = 40
if me == "worker/2":
    dropped = int(ps.step(ones).late)  # the first round has all three, or two
    wait("others-done")
    for _ in range(3):
        before = ps.step_now
        done = ps.step(ones)
        dropped += done.late
    (there / "slow").write_text(f"{dropped} {before} {done.step}")
    ps.finish()
else:
    while ps.step_now < STEPS:
        ps.step(ones)
    (there / me.replace("/", "-")).touch()
    if me == "worker/0":
        wait("worker-1")
        (there / "others-done").touch()
    ps.finish()
    wait("slow")
    ps.pull()
    if me == "worker/0":
        (there / "w").write_text(repr(sorted(set(ps.client.views[0].tolist()))))
"""


def test_rounds_close_without_the_spare_worker_and_what_it_sends_late_is_dropped_and_counted(start, muster):
    """Two of three close a round; 40 rounds later the third one's gradient belongs to a round that is long over."""
    launch = start(SPARE, "--mode", "sync", "--spare", "1", "--json")
    assert launch.wait() == 0, launch.text()
    dropped, before, after = map(int, (muster.folder / "slow").read_text().split())
    assert dropped >= 1 and before >= 40 and after == before + 1, "alone, it closes rounds by itself"
    told = {t["task"]: t for t in launch.result()["tasks"]}
    assert told["worker/2"]["dropped"] == dropped
    assert told["worker/0"]["steps"] >= 39 and told["worker/2"]["steps"] == 4
    # each round moves every weight by 1, whoever was in it: nothing was applied twice, and nothing of a late gradient
    assert json.loads((muster.folder / "w").read_text()) == [-float(after)]


BOUND = 3
BOUNDED = f"""
BOUND = {BOUND}
OTHERS = ["worker/0", "worker/1"]
if me == "worker/2":
    if attempt == 1:
        ps.step(ones)
        while not all(told["waiting"] == OTHERS for told in ps.client.stats()):
            time.sleep(0.01)
        (there / "held").write_text(json.dumps([os.getpid(), ps.client.stats()[0]["workers"]]))
        wait("never")  # it is killed here
    wait("worker-0"), wait("worker-1")
    for _ in range(20):
        ps.step(ones)
    (there / "back").write_text(str(ps.client.stats()[0]["workers"][me]["applied"]))
    ps.finish()
else:
    for _ in range(60):
        ps.step(ones)  # BOUND steps ahead it returns only when the slow one is gone
    ps.finish()
    (there / me.replace("/", "-")).touch()
    wait("back")
    if me == "worker/0":
        members = [member for told in ps.client.stats() for member in told["workers"].values()]
        (there / "ahead").write_text(json.dumps([member["ahead"] for member in members]))
"""


def test_nobody_gets_further_ahead_than_the_bound_and_a_killed_worker_holds_nobody(start, muster):
    """The slow worker stops after a step: the others are held at the bound, until it is killed; then it comes back."""
    launch = start(BOUNDED, "--mode", "bounded", "--max-staleness", str(BOUND), "--json")
    here = muster.folder
    pid, members = until(lambda: (here / "held").exists() and json.loads((here / "held").read_text() or "null"))
    slow = members["worker/2"]["at"]
    assert [members[task]["at"] - slow for task in ("worker/0", "worker/1")] == [BOUND + 1] * 2, "their next step"
    assert not (here / "worker-0").exists() and not (here / "worker-1").exists()
    os.kill(pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.text()
    assert launch.codes() == {"ps/0": [0], "ps/1": [0], "worker/0": [0], "worker/1": [0], "worker/2": [-9, 0]}
    assert int((here / "back").read_text()) == 1 + 20
    assert max(json.loads((here / "ahead").read_text())) == BOUND
    told = {t["task"]: t for t in launch.result()["tasks"]}
    assert told["worker/0"]["staleness_max"] > 0 and told["worker/2"]["restarts"] == 1
