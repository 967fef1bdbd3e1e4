"""``muster.fit`` through ``muster run``: what threads of one process cannot show (processes, kills, verdicts)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(280)]
pytest.importorskip("tensorflow")

ROOT = Path(__file__).parents[2]
EXAMPLES, SCRIPTS = ROOT / "examples", Path(__file__).parent / "scripts"


def run(folder, *words):
    """``muster run --engine muster``; its exit code and what it printed, in lines as long as they come."""
    env = {**os.environ, "MUSTER_RUNS": str(folder), "PYTHONPATH": str(EXAMPLES), "COLUMNS": "200"}
    command = [sys.executable, "-m", "muster", "run", "--engine", "muster", "--pass", "PYTHONPATH", *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def accuracy(text):
    title = next(line for line in text.splitlines() if line.startswith("succeeded in"))
    return float(title.split(", accuracy ")[1].split(",")[0])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_digits_are_learned(tmp_path, mode):
    code, text = run(tmp_path, "--mode", mode, EXAMPLES / "mnist.py")
    assert code == 0 and accuracy(text) >= 0.95, text
    assert "56,000 samples trained on, 0 of them repeated" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("worker/") and " done " in line]
    assert len(rows) == 3 and sum(int(row[3]) for row in rows) >= 14 * 80
    largest = [int(found[1]) for row in rows if (found := re.search(r"\d\.\d,? \(?(?:max )?(\d+)", " ".join(row)))]
    assert len(largest) == 3
    assert max(largest) == 0 if mode == "sync" else max(largest) > 0


def test_a_chief_and_a_worker_that_are_killed_come_back_where_the_run_is(tmp_path):
    code, text = run(tmp_path, SCRIPTS / "fit_deaths.py", tmp_path / "told.json")
    assert code == 0 and "worker/0 is started again" in text and "worker/1 is started again" in text, text
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["attempt"] == 2 and told["epochs"] == list(range(8)) and len(told["val_accuracy"]) == 8
    assert told["measured"] == pytest.approx(told["val_accuracy"][-1], abs=0.02) and told["measured"] > 0.85
    assert 1600 <= told["steps"] <= 1600 + 2 * 16
    words = text[text.index(" samples trained on, ") - 7 :].split()
    seen, repeated = (int(words[i].replace(",", "")) for i in (0, 4))
    assert seen == 20 * told["steps"] and repeated == seen - 32_000


def test_a_script_that_never_calls_muster_fails_the_run(tmp_path):
    code, text = run(tmp_path, SCRIPTS / "fit_never.py")
    assert code == 1 and "ended without having called muster.fit or muster.connect" in text, text
    assert "--engine tensorflow --kind v1 | pss | mwms" in text


def test_what_is_refused_is_told_in_four_rows_and_not_tried_again(tmp_path):
    code, text = run(tmp_path, SCRIPTS / "fit_refused.py")
    assert code == 2 and "started again" not in text and "Traceback" not in text, text
    end = text[text.rindex("on here: ") :].splitlines()
    assert end[0] == "on here: Stepper overrides train_step"
    assert end[1].startswith("  because   Muster computes the gradients itself") and end[2].startswith("  try       ")
