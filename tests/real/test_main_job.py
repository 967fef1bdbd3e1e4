"""The main jobs as a user starts them: ``muster run``, real TensorFlow, 2 ps and 3 workers on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.launch.sweep import processes_of

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(200)]
pytest.importorskip("tensorflow")

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tests" / "data" / "seed"


def muster_run(folder, *args, **env):
    """Exit code and the summary of ``muster run --json ARGS``; nothing of the run may be left."""
    command = [sys.executable, "-m", "muster", "run", "--json", *map(str, args)]
    environ = {**os.environ, "MUSTER_RUNS": str(folder / "runs"), **env}
    ran = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=180)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert not processes_of(told["run"]), ran.stderr
    return ran, told


def test_the_tutorials_script_runs_unchanged(tmp_path):
    """SD-01, NW-02, TS-10: its ps never end, it has no device filters, and its step counter is not registered."""
    ran, told = muster_run(tmp_path, "--tf1", TUTORIAL / "distributed_training.py")
    assert ran.returncode == 0 and told["ok"], ran.stderr
    steps = {task["task"]: task["steps"] for task in told["tasks"]}
    assert 1000 <= told["steps"] <= 1002 and min(steps[f"worker/{n}"] for n in range(3)) >= 50
    assert {task["exit"] for task in told["tasks"] if task["task"].startswith("ps")} == {"ended"}


def test_a_script_with_its_role_written_into_it_is_stopped(tmp_path):
    """CD-03."""
    ran, told = muster_run(tmp_path, "--tf1", TUTORIAL / "cluster_setup.py")
    assert ran.returncode == 1 and "claims to be worker/0" in told["cause"]
    assert "Muster started it as" in told["because"] and "Traceback" not in ran.stderr


def test_softmax_learns_the_digits_though_a_proxy_is_set(tmp_path):
    """NW-05: gRPC would send even traffic to localhost to the proxy, and hang."""
    proxy = "http://127.0.0.1:9"
    script = ROOT / "examples" / "mnist_v1.py"
    ran, told = muster_run(tmp_path, "--kind", "v1", script, http_proxy=proxy, grpc_proxy=proxy)
    assert ran.returncode == 0 and told["metrics"]["accuracy"] >= 0.88, ran.stderr
    assert "the cluster's addresses are added to no_proxy" in ran.stderr
