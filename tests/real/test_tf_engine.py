"""Scripts on TensorFlow's own runtime, in real processes.

Each process costs three to four seconds of processor time: few tests, each for what nothing smaller can show.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import by_hand
import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(150)]
pytest.importorskip("tensorflow")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = Path(__file__).parent / "scripts"


def one(task, script, *args, kind="v1", tf1=False, **cluster):
    """One task of a cluster whose others are not there: for what happens before it needs them."""
    told = {"cluster": cluster, "chief": "worker/0", "engine": "tensorflow", "kind": kind}
    env = {**os.environ, "MUSTER_TASK": task, "MUSTER_CLUSTER": json.dumps(told), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "muster.train.start", *(["--tf1"] if tf1 else []), str(script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


THREE = {"ps": ["127.0.0.1:1", "127.0.0.1:2"], "worker": ["127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5"]}


def test_a_tensorflow_1_script_runs_unchanged(tmp_path):
    run = by_hand.run(SCRIPTS / "tutorial_v1.py", tmp_path, roles={"ps": 2, "worker": 3}, tf1=True, role_flags=True)
    workers = [run.tasks[f"worker/{index}"] for index in range(3)]
    assert [run.codes[task.name] for task in workers] == [0, 0, 0], run.text("worker/0")
    last = [task.of("Step")[-1] for task in workers]
    assert all(1000 <= step["step"] <= 1002 for step in last), last
    assert all(step["local"] >= 50 for step in last), last
    assert sum(step["local"] for step in last) == max(step["step"] for step in last)
    chief, *others = workers
    assert chief.of("Total") == [{"kind": "Total", "steps": 1000}]
    said = " ".join(report["text"] for report in chief.of("Said"))
    assert "ps/0 ps0.example.com:2222 -> 127.0.0.1:" in said and "global step" in said
    assert not any(task.of("Said") for task in others)


def test_a_script_that_is_another_task_than_its_own_is_stopped(tmp_path):
    run = by_hand.run(SCRIPTS / "fixed_role.py", tmp_path, roles={"worker": 2}, tf1=True, chief="worker/1")
    assert run.codes == {"worker/0": 0, "worker/1": 2}
    assert run.tasks["worker/1"].of("Mismatch") == [{"kind": "Mismatch", "claims": "worker/0"}]
    first = run.text("worker/1").split("this task is", 1)[1].splitlines()
    assert first[0] == " worker/1, but the script made itself worker/0" and "fixed_role.py:6" in first[1]


def test_what_a_tensorflow_1_script_may_ask_for():
    result = one("worker/0", SCRIPTS / "names_v1.py", "--name=bob", tf1=True, **THREE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "all there for bob"


def test_a_session_waits_for_no_other_worker():
    addresses = by_hand.addresses({"worker": 2})
    result = one("worker/0", SCRIPTS / "filters_v1.py", tf1=True, **addresses)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "none waited"


def test_a_session_that_the_script_made_itself_is_followed_too(tmp_path):
    run = by_hand.run(SCRIPTS / "plain_v1.py", tmp_path, roles={"worker": 2}, tf1=True, role_flags=True)
    assert run.codes == {"worker/0": 0, "worker/1": 0}, run.text("worker/0")
    for task in run.tasks.values():
        kinds = [report["kind"] for report in task.reports if report["kind"] != "Said"]
        assert kinds.count("Ready") == 1 and set(kinds) == {"Ready", "Step"}
        last = task.of("Step")[-1]
        assert (last["step"], last["local"]) == (50, 50) and last["loss"] <= 9


@pytest.mark.parametrize(
    "line, tells",
    [
        ("import tensorflow as tf; tf.contrib.layers.xavier_initializer()", "tf.glorot_uniform_initializer"),
        ("from tensorflow.contrib import slim", "tf-slim"),
        ("import tensorflow as tf; tf.train.ClusterSpec({'ps': ['a:1'], 'worker': ['b:1']})", "plan: ps 2, worker 3"),
    ],
)
def test_what_it_may_not_have_is_refused_in_four_rows(tmp_path, line, tells):
    (tmp_path / "script.py").write_text(line + "\n")
    result = one("worker/0", tmp_path / "script.py", tf1=True, **THREE)
    assert result.returncode == 2 and tells in result.stderr and "Traceback" not in result.stderr
    assert "script.py:1" in result.stderr


def test_v1_async_learns_the_digits(tmp_path):
    run = by_hand.run(EXAMPLES / "mnist_v1.py", tmp_path, roles={"ps": 2, "worker": 3})
    assert [run.codes[f"worker/{index}"] for index in range(3)] == [0, 0, 0], run.text("worker/0")
    assert run.tasks["worker/0"].of("Metrics")[-1]["values"]["accuracy"] >= 0.88
    steps = [run.tasks[f"worker/{index}"].of("Step")[-1] for index in range(3)]
    assert all(1000 <= step["step"] <= 1002 and step["local"] >= 50 and step["loss"] < 1 for step in steps), steps


def test_v1_sync_takes_one_gradient_of_each_and_ends(tmp_path):
    run = by_hand.run(
        EXAMPLES / "mnist_v1.py", tmp_path, "--mode", "sync", "--steps", "150", roles={"ps": 1, "worker": 2}
    )
    assert [run.codes["worker/0"], run.codes["worker/1"]] == [0, 0], run.text("worker/0")
    assert run.tasks["worker/0"].of("Metrics")[-1]["values"]["accuracy"] >= 0.85
    assert all(abs(run.tasks[f"worker/{index}"].of("Step")[-1]["local"] - 150) <= 2 for index in range(2))


def test_with_permuted_labels_there_is_nothing_to_learn(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "TF_CONFIG"))}
    command = [sys.executable, str(EXAMPLES / "mnist_v1.py"), "--permute-labels"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split("accuracy ")[1].split()[0]) < 0.2


def test_v1_goes_on_from_its_checkpoint(tmp_path):
    roles = {"ps": 1, "worker": 1}
    folder = str(tmp_path / "line")
    by_hand.run(EXAMPLES / "v1_checkpoint.py", tmp_path, "--folder", folder, roles=roles)
    again = by_hand.run(EXAMPLES / "v1_checkpoint.py", tmp_path, "--folder", folder, "--steps", "400", roles=roles)
    assert again.codes["worker/0"] == 0 and "starts at step 300" in again.text("worker/0")
    assert again.tasks["worker/0"].of("Step")[-1] == {
        **again.tasks["worker/0"].of("Step")[-1],
        "step": 400,
        "local": 100,
    }
    assert abs(again.tasks["worker/0"].of("Metrics")[-1]["values"]["slope"] - 3) < 0.01


def test_pss_with_a_chief(tmp_path):
    roles = {"chief": 1, "ps": 1, "worker": 2}
    run = by_hand.run(
        EXAMPLES / "pss_custom_loop.py", tmp_path, "--steps", "200", roles=roles, kind="pss", chief="chief/0", grace=0
    )
    chief = run.tasks["chief/0"]
    assert run.codes["chief/0"] == 0, run.text("chief/0")
    assert chief.of("Step")[-1]["step"] == 200 and chief.of("Metrics")[-1]["values"]["accuracy"] >= 0.85
    assert all(run.tasks[f"worker/{index}"].of("Ready") for index in range(2))


def test_mwms_trains_together(tmp_path):
    run = by_hand.run(EXAMPLES / "mwms_custom_loop.py", tmp_path, roles={"worker": 2}, kind="mwms")
    assert run.codes == {"worker/0": 0, "worker/1": 0}, run.text("worker/0")
    losses = [run.tasks[f"worker/{index}"].of("Step")[-1]["loss"] for index in range(2)]
    assert losses[0] == losses[1]
    assert run.tasks["worker/0"].of("Metrics")[-1]["values"]["accuracy"] >= 0.88


def test_a_strategy_that_comes_too_late_is_told_which_line_came_before_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tensorflow as tf\ntf.constant(1)\ntf.distribute.MultiWorkerMirroredStrategy()\n")
    run = by_hand.run(script, tmp_path, roles={"worker": 2}, kind="mwms")
    assert run.codes == {"worker/0": 1, "worker/1": 1}
    said = run.tasks["worker/0"].of("Said")[-1]["text"]
    assert "before the strategy" in said and "script.py:2" in said
    assert "Collective ops must be configured at program startup" in run.text("worker/0").splitlines()[-1]
    assert "muster" not in run.text("worker/0").partition("Traceback")[2]


def test_a_strategy_that_does_not_see_all_workers_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nos.environ.pop('TF_CONFIG', None)\nimport tensorflow as tf\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n"
    )
    result = one("worker/0", script, kind="mwms", worker=["127.0.0.1:1", "127.0.0.1:2"])
    assert result.returncode == 2 and "expected 2 workers, the strategy sees 1" in result.stderr
