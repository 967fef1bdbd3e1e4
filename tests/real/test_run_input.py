"""What reaches the tasks, and what their output does: names, arguments, environment, logs."""

import json
import os
import pty
import select
import subprocess
import sys
import termios

import pytest
from standins import PRELUDE, SERVE, STEPS, WORDS

from muster.events import Exited, Step

SHOW = SERVE + "print(json.dumps([os.fsencode(a).hex() for a in sys.argv])); print(__file__)\n"
ONE = ("--workers", "1")


def test_arguments_are_byte_equal_at_the_worker(muster):
    """B4: whatever a shell would make of them."""
    launch = muster.run(SHOW, *ONE, args=tuple(WORDS))
    assert launch.wait() == 0
    got = [bytes.fromhex(arg) for arg in json.loads(launch.written("worker/0").splitlines()[0])]
    assert got[1:] == [os.fsencode(arg) for arg in WORDS]


@pytest.mark.parametrize("name", ["a b.py", "it's.py", 'q"uote.py', "ünï 训练.py", "-dash.py", "$(touch x).py"])
def test_a_script_of_any_name_runs_and_knows_it(muster, name):
    """B3."""
    launch = muster.run(SHOW, *ONE, name=name)
    assert launch.wait() == 0
    argv, file = launch.written("worker/0").splitlines()
    path = bytes.fromhex(json.loads(argv)[0])
    assert os.path.samefile(path, muster.folder / name) and os.path.samefile(file, path)
    assert not (muster.folder / "x").exists() and not (launch.folder / "x").exists()


def test_a_script_that_is_no_python_runs_as_it_is(muster):
    """B3, B4."""
    path = muster.script("", "train.sh")
    path.write_text('#!/bin/sh\n[ "$MUSTER_TASK" = ps/0 ] && exec sleep 600\nprintf "<%s>" "$@"\n')
    path.chmod(0o755)
    launch = muster.run(path.read_text(), *ONE, args=("a b", "", "$HOME"), name="train.sh")
    assert launch.wait() == 0 and launch.written("worker/0") == b"<a b><><$HOME>"


def test_what_the_shell_had_set_does_not_reach_the_tasks(muster):
    """CD-09, CD-12: a TF_CONFIG of the shell; a run inside of a run."""
    muster.env |= {"TF_CONFIG": "{'half': ", "MUSTER_TASK": "ps/7", "MUSTER_RUN": "outer", "MINE": "kept"}
    launch = muster.run(SERVE + "say(json.dumps(dict(os.environ)))\n", *ONE)
    assert launch.wait() == 0
    told = json.loads(launch.written("worker/0"))
    assert (told["MUSTER_TASK"], told["MUSTER_RUN"], told["MINE"]) == ("worker/0", launch.run().id, "kept")
    assert json.loads(told["TF_CONFIG"])["task"] == {"type": "worker", "index": 0}
    assert told["CUDA_VISIBLE_DEVICES"] == "" and "MUSTER_FD" not in told  # GP-01; the pipe is the bootstrap's


def test_a_proxy_is_kept_from_the_cluster_and_said(muster):
    """NW-05: in the environment of every task, and as a note."""
    muster.env |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": "corp.example.com"}
    code = PRELUDE + "say(os.environ['no_proxy'])\nif role == 'ps': serve()\nserver = listen()\n" + STEPS
    launch = muster.run(code, *ONE)
    assert launch.wait() == 0
    assert "http_proxy is set on here" in launch.text()
    for task in ("ps/0", "worker/0"):
        assert {"corp.example.com", "localhost", "127.0.0.1", "::1"} <= set(
            launch.written(task).decode().strip().split(",")
        )


FLOOD = SERVE + (
    "if index == '1':\n    for n in range(40): os.write(1, (b'%d ' % n) * 65536 + b'\\n')\n"
    "    for n in range(20000): print('line', n)\n    say('the end of the flood')\n" + STEPS + "say(me, 'through')"
)


def test_a_flood_of_output_is_capped_and_disturbs_nobody(muster):
    """S14: rotated at 1 MB, the newest bytes kept, lines beyond the budget counted."""
    launch = muster.run(FLOOD, "--log-mb", "1", "--done", "all-workers")
    assert launch.wait() == 0
    logs = {path.name: path.stat().st_size for path in launch.run().logs.iterdir()}
    assert set(logs) >= {"ps-0.log", "worker-0.log", "worker-1.log.1"} or logs["worker-1.log"] < 2 << 20
    assert sum(size for name, size in logs.items() if name.startswith("worker-1")) < 3 << 20
    kept = launch.written("worker/1") or (launch.run().logs / "worker-1.log.1").read_bytes()
    assert kept.endswith(b"the end of the flood\nworker/1 through\n")
    assert launch.written("worker/0") == b"worker/0 through\n"
    assert launch.events(Step, task="worker/0")[-1].step == 10 and launch.codes()["worker/0"] == [0]
    shown = launch.text().splitlines()
    assert any("lines not shown; the log has them" in line for line in shown) or len(shown) > 20000
    assert all(len(line) < 3000 for line in shown)


def test_long_lines_of_many_tasks_stay_apart(muster):
    """SL-12: whole-line prefixes, files exact."""
    code = PRELUDE + (
        "letter = chr(97 + int(index)) if role == 'worker' else 'p'\n"
        "for n in range(50): os.write(1, b'\\r%d%% ' % n + letter.encode() * 4000)\n"
        "os.write(1, b'\\n' + letter.encode() * 200_000)\n"
        "if role == 'ps': serve()\nserver = listen()\n" + STEPS
    )
    launch = muster.run(code, "--workers", "4", "--done", "all-workers")
    assert launch.wait() == 0
    for task, letter in {"ps/0": b"p", "worker/0": b"a", "worker/3": b"d"}.items():
        bars = b"".join(b"\r%d%% " % n + letter * 4000 for n in range(50))
        assert launch.written(task) == bars + b"\n" + letter * 200_000
    shown = [line.partition(" | ") for line in launch.text().splitlines() if line.startswith("worker/")]
    long = [(who.strip(), text) for who, _, text in shown if text.endswith("(200,000 bytes; the log has all)")]
    assert sorted(who for who, _ in long) == [f"worker/{n}" for n in range(4)]
    assert all(set(text.split(" ...")[0]) == {chr(97 + int(who[-1]))} for who, text in long)


def test_logs_can_be_followed_until_the_end(muster):
    launch = muster.run(SERVE + "say('one')\n" + STEPS + "say('two')", *ONE)
    launch.said("worker/0", "one")
    code, said = muster.ask("logs", "-f", "worker/0")
    assert (code, said) == (0, "one\ntwo\n")
    assert launch.wait() == 0 and launch.events(Exited)


def test_planning_imports_nothing_heavy(muster):
    """Section 6 of the design: ``muster plan`` answers at once."""
    muster.script("pass")
    code = (
        "import sys\nfrom muster.cli import main\ntry: main(['plan', 'train.py'])\nexcept SystemExit: pass\n"
        "print([m for m in ('tensorflow', 'keras', 'numpy', 'rich', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=muster.folder, env=muster.env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_tf_config_of_the_shell_does_not_reach_the_tasks_of_our_own_engine(muster):
    """CD-09: it would make a strategy of theirs out of the shell's cluster."""
    muster.env |= {"TF_CONFIG": "{'half': "}
    launch = muster.run("import json, os; print(json.dumps(dict(os.environ)))\n", *ONE, "--engine", "muster")
    launch.wait()
    assert "TF_CONFIG" not in json.loads(launch.written("worker/0").splitlines()[0])


def shown(terminal: int, words: bytes) -> bytes:
    """What comes on a terminal until ``words`` are in it."""
    got = b""
    while words not in got:
        assert select.select([terminal], [], [], 40)[0], got
        got += os.read(terminal, 1 << 16)
    return got


def test_the_terminal_that_one_task_had_is_as_before_afterwards(muster):
    """``--only``: key strokes went to the task, and the shell gets its terminal back."""
    muster.script(SERVE + "if me == 'worker/0': say(input('who? ').upper())\n" + STEPS)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    only = [*("--engine", "tensorflow", "--ps", "1"), *ONE, "--only", "worker/0", "train.py"]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "run", *only],
            cwd=muster.folder, env=muster.env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        shown(ours, b"who?")
        os.write(ours, "ärger\r".encode())
        assert "ÄRGER" in shown(ours, b"logs: ").decode() and process.wait(40) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours), os.close(theirs)
        process.kill(), process.wait()


MWMS = ("--kind", "mwms", "--ps", "0", "--workers", "2", "--retries", "0")
# worker/1 waits: the first to end ends the run, and a test can know only one
LEAVES = "import os, sys, time\ntime.sleep(600) if os.environ['MUSTER_TASK'] == 'worker/1' else sys.exit(3)\n"
FIT = LEAVES + "from tensorflow import keras\nkeras.Sequential().fit([0])\n"


def test_keras_3_with_a_strategy_is_refused_before_the_start(muster):
    """EN-07: where the script is seen to call fit; naming the variable."""
    muster.env.pop("TF_USE_LEGACY_KERAS", None)
    launch = muster.run(FIT, *MWMS)
    assert launch.wait() == 1 and "nothing was started" in launch.text()
    assert "line 4 calls fit" in launch.text() and "TF_USE_LEGACY_KERAS" in launch.text()


@pytest.mark.parametrize("way", ["keras 2", "a loop", "not asked"])
def test_a_strategy_that_may_train_starts(muster, way):
    """EN-07: Keras 2 asked for, or nothing seen that would fail: a hint, and no more."""
    pytest.importorskip("tf_keras")
    muster.env["TF_USE_LEGACY_KERAS"] = "1" if way == "keras 2" else "0"
    options = {"keras 2": ("--pass", "TF_USE_LEGACY_KERAS"), "a loop": (), "not asked": ("--no-check",)}[way]
    launch = muster.run(LEAVES if way == "a loop" else FIT, *MWMS, *options)
    assert launch.wait() == 1 and launch.events(Exited, task="worker/0", code=3), launch.text()
    assert ("a loop of your own works" in launch.text()) is (way == "a loop")
