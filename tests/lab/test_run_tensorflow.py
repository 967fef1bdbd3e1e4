"""The two things that Muster is for, on five machines: somebody's TensorFlow 1 script, and Keras over our own ps."""

import shutil
from pathlib import Path

import pytest

from muster.events import Joined, Spawned

from .lab import SEED
from .remote import Site

REPOSITORY = Path(__file__).parents[2]
TUTORIAL = Path(__file__).parents[1] / "data" / "seed"

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]


def test_the_tutorial_script_runs_unchanged_on_its_five_machines_at_port_2222(site: Site):
    """``muster run --tf1 -c lab.toml distributed_training.py``, checked first; SD-01: its ps, which never end, are
    ended."""
    site.cluster(run={"engine": None})
    site.everywhere("distributed_training.py", (TUTORIAL / "distributed_training.py").read_text())
    launch = site.start("--tf1", "--json", "distributed_training.py")
    assert launch.wait(240) == 0, launch.text()
    told = launch.result()
    assert told["ok"] and 1000 <= told["steps"] <= 1002, told  # async: the others may finish the step they are in
    assert {task.where for task in launch.run().plan().tasks.values()} == {f"{host}:2222" for host in SEED}
    assert set(launch.attempts().values()) == {1} and len(launch.events(Spawned)) == 5
    assert {t["task"]: t["exit"] for t in told["tasks"]}["worker/0"] == "exit 0"
    assert any(f"Step: {n}" in launch.log(w) for w in ("worker/0", "worker/1", "worker/2") for n in range(990, 1003))


def test_a_script_with_one_task_written_into_it_is_refused_naming_both(site: Site):
    """CD-03: the tutorial's cluster_setup.py, which is worker/0 wherever it runs."""
    site.cluster(run={"engine": None})
    launch = site.run((TUTORIAL / "cluster_setup.py").read_text(), "--tf1", name="cluster_setup.py")
    assert launch.wait(120) == 1
    assert "claims to be worker/0" in launch.text() and "Muster started it as" in launch.text(), launch.text()


def test_keras_over_our_own_parameter_servers_with_tls(site: Site):
    """The main example, its folder brought along; NumPy alone on the machines of the ps."""
    site.cluster(run={"engine": "muster"}, every={"cwd": str(site.lab.home / "code")})
    shutil.copytree(REPOSITORY / "examples", site.lab.private("ctl") / "examples")
    launch = site.start("--sync", "examples", "--json", "examples/mnist.py", "--epochs", "4")
    assert launch.wait(280) == 0, launch.text()
    told = launch.result()
    assert told["metrics"]["accuracy"] > 0.85, told
    assert {event.task for event in launch.events(Joined)} == {"worker/0", "worker/1", "worker/2"}
    assert set(launch.attempts().values()) == {1}
