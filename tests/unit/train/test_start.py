"""The bootstrap against ``python script.py``, in real processes (without TensorFlow, so quick)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """'''doc'''
import json, sys
main = sys.modules["__main__"]
mine = {name: str(globals().get(name)) for name in
        ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__cached__", "__builtins__", "__annotations__")}
mine["loader"] = type(globals()["__loader__"]).__name__
mine |= {"argv": sys.argv, "path0": sys.path[0], "main": main.__dict__ is globals(), "names": sorted(globals())}
print(json.dumps(mine))
"""


def python(*argv, cwd, **env):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")} | env
    env["PYTHONPATH"] = str(Path(__file__).parents[3] / "src")
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=30)


def started(*argv, cwd, **env):
    return python("-m", "muster.train.start", *argv, cwd=cwd, **env)


def write(folder, text, name="script.py"):
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize("path", ["script.py", "./script.py", "sub/script.py", "link.py"])
def test_a_script_sees_what_it_sees_under_python(tmp_path, path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, LOOK)
    write(tmp_path / "sub", LOOK)
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "script.py")
    plain = python(path, "--job_name=ps", "a b", cwd=tmp_path)
    ours = started(path, "--job_name=ps", "a b", cwd=tmp_path)
    assert json.loads(ours.stdout) == json.loads(plain.stdout), ours.stderr


@pytest.mark.parametrize(
    "ending, code", [("", 0), ("import sys; sys.exit(3)", 3), ("raise SystemExit('words')", 1), ("exit()", 0)]
)
def test_exit_codes_pass_through(tmp_path, ending, code):
    result = started(write(tmp_path, ending), cwd=tmp_path)
    assert result.returncode == code
    assert ("words" in result.stderr) == ("words" in ending)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    1 / 0\nf()\n",
        "def f(:\n",
        "import json\njson.loads('{')\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('x') from error\n",
        "import os\nos.environ['NOT_THERE']\n",
    ],
)
def test_a_traceback_is_that_of_python(tmp_path, text):
    script = write(tmp_path, text)
    plain, ours = python(script, cwd=tmp_path), started(script, cwd=tmp_path)
    assert ours.returncode == 1
    assert ours.stderr.replace(str(tmp_path) + "/", "") == plain.stderr.replace(str(tmp_path) + "/", "")


def test_the_scripts_own_excepthook_is_used(tmp_path):
    result = started(write(tmp_path, "import sys\nsys.excepthook = lambda *a: print('mine')\n1 / 0\n"), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "mine\n")


def test_our_own_errors_have_four_rows_and_no_traceback(tmp_path):
    text = "from muster.errors import Refused\nraise Refused('no', at='here', because='so', try_='this')\n"
    result = started(write(tmp_path, text), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "no\n  at        here\n  because   so\n  try       this\n"


def test_a_script_that_is_not_there(tmp_path):
    result = started("none.py", cwd=tmp_path)
    assert result.returncode == 2 and "none.py" in result.stderr and "Traceback" not in result.stderr


def test_a_child_of_the_script_neither_has_the_pipe_nor_hears_of_it(tmp_path):
    child = "import os; print(os.environ.get('MUSTER_FD'))"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    assert started(write(tmp_path, text), cwd=tmp_path, MUSTER_FD="0").stdout == "None\n"


def test_workers_of_multiprocessing_find_the_script(tmp_path):
    text = (
        "import multiprocessing as mp\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    )
    result = started(write(tmp_path, text), cwd=tmp_path)
    assert result.stdout == "[2, 4]\n", result.stderr


def test_a_script_that_never_imports_tensorflow_never_has_it(tmp_path):
    text = (
        "import sys, muster\nmuster.report(step=1)\nprint(any(name.startswith('tensorflow') for name in sys.modules))"
    )
    assert started("--tf1", write(tmp_path, text), cwd=tmp_path).stdout == "False\n"


def test_workers_that_trained_alone_are_a_failed_run(tmp_path):
    cluster = {"cluster": {"worker": ["a:1", "a:2"]}, "chief": "worker/0", "kind": "mwms"}
    env = {"MUSTER_TASK": "worker/1", "MUSTER_CLUSTER": json.dumps(cluster)}
    for text in ("", "import sys\nsys.exit(0)"):
        result = started(write(tmp_path, text), cwd=tmp_path, **env)
        assert result.returncode == 1 and "MultiWorkerMirroredStrategy" in result.stderr
    assert started(write(tmp_path, "import sys\nsys.exit(5)"), cwd=tmp_path, **env).returncode == 5
