"""An evaluator beside real trainings: it does the last checkpoint, once, and the run ends."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from standins import SERVE

from muster.events import Concluded, Evaluating, Step, Stopping

ROOT = Path(__file__).parents[2]
ME = "evaluator/0"

# A stand-in of both sides: the chief saves a file for each checkpoint, the evaluator has a loop of its own.
LOOP = """
import os, time
import muster
folder = "../saved"
os.makedirs(folder, exist_ok=True)
def newest():
    names = sorted(name for name in os.listdir(folder) if name.startswith("ckpt-"))
    return names[-1] if names else None
if muster.task() == "evaluator/0":
    done = None
    muster.ready()
    print("up", muster.training_ended(), muster.final_step(), flush=True)
    open("../up", "w").close()
    while True:
        over = muster.training_ended()
        found = newest()
        if found not in (None, done):
            done = found
            print("evaluates", found, flush=True)
            muster.report(judged=int(found[5:]), step=9999)
        elif over:
            break
        else:
            time.sleep(0.02)
    print("ends at", muster.final_step(), flush=True)
    raise SystemExit
"""
SAVES = SERVE + (
    """
muster.ready()
while not os.path.exists("../up"): time.sleep(0.02)
for step in range(1, 31):
    muster.report(step=step, total=30)
    if index == "0" and step % 10 == 0:
        open(f"../saved/ckpt-{step:04}", "w").close()
    time.sleep(0.02)
"""
)


def lines(launch, task=ME):
    return launch.log(task).splitlines()


def test_the_last_checkpoint_is_evaluated_once_and_the_run_ends(muster):
    """SD-03."""
    launch = muster.run(LOOP + SAVES, "--evaluator", "--json")
    assert launch.wait() == 0
    said = lines(launch)
    assert said[0] == "up False None" and said[-1] == "ends at 30"
    assert said.count("evaluates ckpt-0030") == 1 and said[-2] == "evaluates ckpt-0030"
    told = launch.result()
    assert (told["ok"], told["steps"], told["warnings"]) == (True, 30, []) and told["metrics"] == {"judged": 30.0}
    rows = {t["task"]: (t["phase"], t["exit"], t["steps"]) for t in told["tasks"]}
    assert rows[ME] == ("done", "exit 0", 0)
    assert [e.step for e in launch.events(Concluded)] == [30]


def test_one_for_which_no_checkpoint_ever_comes_ends_with_the_run(muster):
    launch = muster.run(LOOP + SAVES.replace("step % 10 == 0", "False"), "--evaluator")
    assert launch.wait() == 0
    assert lines(launch) == ["up False None", "ends at 30"] and launch.codes()[ME] == [0]


DEAF = """
import os, time
import muster
if muster.task() == "evaluator/0":
    print("up", flush=True)
    open("../up", "w").close()
    while True: time.sleep(600)
"""


def test_one_that_does_not_end_by_itself_is_ended_and_named(muster):
    """SD-02, SD-03."""
    code = "import os\nos.makedirs('../saved', exist_ok=True)\n" + DEAF + SAVES
    launch = muster.run(code, "--evaluator", "--last-evaluation", "0.5")
    assert launch.wait() == 0 and launch.codes()[ME] == [-15]
    assert "succeeded (1 task had to be ended)" in launch.text()
    assert "evaluator/0 was ended 0.5 s after training" in launch.text()


def test_one_that_dies_is_started_again_and_the_training_goes_on(muster):
    code = LOOP.replace('print("up"', 'print("attempt", os.environ["MUSTER_ATTEMPT"], "up"') + (
        SERVE + "muster.ready()\nstep = 0\n"
        "while not os.path.exists('../enough'):\n    step += 1; muster.report(step=step); time.sleep(0.05)\n"
        "open(f'../saved/ckpt-{step:04}', 'w').close()\n"
    )
    launch = muster.run(code, "--evaluator", "--backoff", "0.05", "--workers", "1")
    launch.saw(Step, task="worker/0")
    launch.said(ME, "attempt 1")
    os.kill(launch.pid(ME), signal.SIGKILL)
    launch.said(ME, "attempt 2")
    (muster.folder / "enough").touch()
    assert launch.wait() == 0
    assert launch.codes() == {"ps/0": [-15], "worker/0": [0], ME: [-9, 0]}
    assert [line for line in lines(launch) if line.startswith("evaluates")] != []


def test_a_training_that_fails_does_not_wait_for_it(muster):
    code = "import os\nos.makedirs('../saved', exist_ok=True)\n" + DEAF + SERVE
    code += (
        "if index == '1':\n    while not os.path.exists('../go'): time.sleep(0.02)\n    os._exit(3)\ntime.sleep(600)\n"
    )
    launch = muster.run(code, "--evaluator", "--retries", "0")
    launch.said(ME, "up")
    (muster.folder / "go").touch()
    assert launch.wait() == 1 and launch.codes()[ME] == [-15]
    assert not launch.events(Concluded) and launch.saw(Stopping, task=ME).why == "too many restarts"


# --- over TensorFlow itself


def run_example(muster, *options, args=()):
    launch = muster.run(
        (ROOT / "examples" / "v1_evaluator.py").read_text(),
        *("--kind", "v1", "--workers", "1", "--evaluator", "--json", *options),
        args=("--folder", str(muster.folder / "saved"), *args),
    )
    return launch


@pytest.fixture
def with_example(muster):
    if find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")
    (muster.folder / "v1_wait.py").write_text((ROOT / "examples" / "v1_wait.py").read_text())
    return muster


@pytest.mark.tensorflow
def test_over_tensorflow_the_last_checkpoint_is_evaluated_once(with_example):
    """SD-03: tf.train.checkpoints_iterator, which ends by itself."""
    launch = run_example(with_example, args=("--steps", "250"))
    assert launch.wait(60) == 0, launch.text()
    assert launch.codes() == {"ps/0": [-15], "worker/0": [0], ME: [0]}
    told = [Path(e.checkpoint).name for e in launch.events(Evaluating) if e.checkpoint]
    saved = (with_example.folder / "saved" / "checkpoint").read_text().splitlines()[0].split('"')[1]
    assert told[-1] == Path(saved).name == "model.ckpt-250" and told.count(told[-1]) == 1
    assert [line for line in lines(launch) if "step 250:" in line] == lines(launch)[-1:]
    assert launch.result()["metrics"]["held_out_error"] < 1


@pytest.mark.tensorflow
def test_over_tensorflow_a_loop_without_a_checkpoint_ends_with_the_run(with_example):
    """The evaluator looks elsewhere; a strategy and a server are refused in it, and the trainer is a stand-in."""
    code = """
import json, os, sys
me = json.loads(os.environ["TF_CONFIG"])["task"]
if me["type"] == "evaluator":
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    print("alone:", strategy.num_replicas_in_sync, resolver.task_type, resolver.task_id, flush=True)
    print(tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().jobs, flush=True)
    try:
        tf.distribute.Server(tf.train.ClusterSpec({"worker": ["a:1"], "evaluator": ["b:1"]}), "evaluator", 0)
    except Exception as error:
        print(error, flush=True)
    from tensorflow.compat.v1.train import checkpoints_iterator
    open("../up", "w").close()
    print("saw", [*checkpoints_iterator("../nowhere", timeout=1, timeout_fn=lambda: False)], flush=True)
else:
    import time, muster
    while not os.path.exists("../up"): time.sleep(0.05)
    time.sleep(0.2)
"""
    launch = with_example.run(code, "--evaluator", "--kind", "mwms", "--ps", "0", "--workers", "1")
    assert launch.wait(60) == 0, launch.text()
    assert launch.codes() == {"worker/0": [0], ME: [0]}
    said = launch.log(ME)
    assert "alone: 1 evaluator 0" in said and "['worker']" in said and "saw []" in said
    assert "the evaluator makes a Server" in said and "examples/v1_evaluator.py" in said


def test_the_plan_shows_it(muster):
    muster.script("")
    code, said = muster.ask("plan", "--kind", "v1", "--evaluator", "train.py")
    assert code == 0 and any(line.split()[:3] == [ME, "here", "127.0.0.1"] for line in said.splitlines())
