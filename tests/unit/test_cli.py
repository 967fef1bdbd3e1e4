"""The command line, in this process: what it refuses before anything starts, and what it prints of a plan."""

import json

import pytest
import tomllib
from making import make
from msgspec.structs import replace

from muster.cli import main
from muster.clusterfile import load
from muster.journal import create


@pytest.fixture
def muster(tmp_path, monkeypatch, capsys):
    """Runs ``muster ARGS`` in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "runs"))
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "CUDA_VISIBLE_DEVICES", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("pass\n")

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.mark.parametrize(
    ("args", "named"),
    [
        # B1
        (["--workers", "0"], ["there is no worker", "--workers"]),
        (["--workers", "-1"], [">= 0", "--workers"]),
        (["--ps", "-1"], [">= 0", "--ps"]),
        (["--workers", "1000000"], ["10000", "--workers"]),
        (["--workers", "9999"], ["10001 tasks do not fit"]),
        (["--ps", "0"], ["there is no ps", "--ps"]),
        (["--workers", "many"], ["--workers takes a number", "'many'"]),
        (["--workers", ""], ["--workers"]),
        # B6
        (["--kind", "pps"], ["--kind", "v1, pss, mwms"]),
        (["--mode", "asink"], ["--mode", "async, sync, bounded"]),
        (["--grace", "soon"], ["--grace", "a number"]),
        (["--ports", "1-2"], ["--ports", "1024 to 65535"]),
        (["--wrokers", "3"], ["there is no option --wrokers", "--workers"]),
        (["--ps=2x"], ["--ps"]),
        (["--gpus-per-worker", "1"], ["3 workers on here want 3 GPUs, and it has 0"]),  # B9
        (["--spare", "1"], ["--spare", "mode is async"]),
        (["--tf1", "--kind", "pss"], ["tf1 goes with", "--tf1"]),
        # CD-13, CD-14, CD-03, B10
        (["--ps", "h1:70000", "--workers", "h2:1"], ["4464"]),
        (["--ps", "127.0.0.1:2222", "--workers", "127.0.0.1:2222"], ["ps/0 and worker/0 have the same address"]),
        (["--ps", "::1:23005", "--workers", "h2:1"], ["[::1]:23005"]),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_bad_request_is_refused_before_anything_starts(muster, tmp_path, verb, args, named):
    """B1, B6, B9, B10, CD-13, CD-14: exit 2, the option, what would have been valid."""
    code, out, err = muster(verb, *args, "train.py")
    assert (code, out) == (2, "")
    for words in named:
        assert words in err
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*/journal.jsonl"))


@pytest.mark.parametrize(
    ("seats", "named"),
    [
        (["10.255.255.1:2222"], "10.255.255.1, the address of worker/0, is not this machine"),  # CD-03
        (["no-such-host.invalid:2222"], "no-such-host.invalid, the address of worker/0, leads nowhere"),
    ],
)
def test_the_address_of_another_machine_is_refused(muster, seats, named):
    """CD-03: TensorFlow starts a server for either."""
    code, _, err = muster("run", "--ps", "127.0.0.1:2221", "--workers", ",".join(seats), "train.py")
    assert code == 2 and named in err


@pytest.mark.parametrize(
    ("name", "content", "mode", "named"),
    [
        ("nope.py", None, 0, ["there is no script 'nope.py'", "train.py"]),
        ("folder/nope.py", None, 0, ["there is no script"]),
        (".", None, 0, ["is no file"]),
        ("train", b"#!/bin/sh\n", 0o600, ["neither a .py file nor executable", "chmod +x train"]),
        ("bad.py", b"x = 1\nif x\n", 0o600, ["bad.py is not valid Python", "line 2", "expected ':'"]),
        ("nul.py", b"x = 1\0\n", 0o600, ["nul.py is not valid Python"]),
        ("latin.py", b"x = '\xff'\n", 0o600, ["latin.py is not valid Python"]),
        ("n" * 300 + ".py", None, 0, ["there is no script"]),
        ("\udcff.py", None, 0, ["b'\\xff.py' is not UTF-8"]),
    ],
)
def test_a_script_that_cannot_run_is_named_once(muster, tmp_path, name, content, mode, named):
    """B5: and not five times by five tasks."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    for verb in ("plan", "run"):
        code, _, err = muster(verb, name)
        assert code == 2 and all(words in err for words in named)
    assert not list((tmp_path / "runs").glob("*/journal.jsonl"))


def test_an_interpreter_or_folder_that_is_missing_is_named(muster, tmp_path):
    for setting, named in [("python", "there is no interpreter"), ("cwd", "the folder of ps/0 does not exist")]:
        (tmp_path / "cluster.toml").write_text(f'[[hosts]]\nname = "a"\n{setting} = "/nonexistent/x"\n')
        code, _, err = muster("run", "train.py")
        assert code == 2 and named in err and "/nonexistent/x" in err


def test_a_run_without_a_script_is_refused(muster):
    code, _, err = muster("run")
    assert code == 2 and "no script is named" in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["rnu"], "muster run"),
        (["train.py"], "muster run train.py"),
        (["xyzzy"], "one of: init, "),
        (["status"], "there is no run yet"),
        (["logs", "worker/0"], "there is no run yet"),
        (["stop"], "there is no run yet"),
        (["plan", "-c", "nope.toml", "train.py"], "there is no such cluster file"),
        (["plan", "--env", "worker/7", "train.py"], "worker has 3 task(s), 0 to 2"),
    ],
)
def test_a_slip_on_the_command_line_has_a_hint(muster, args, named):
    """CD-02, B6."""
    code, _, err = muster(*args)
    assert code == 2 and named in err and "Traceback" not in err


def test_the_plan_says_which_cluster_it_took(muster, tmp_path):
    code, out, _ = muster("plan", "train.py")
    assert code == 0 and out.startswith("cluster: this machine (no cluster.toml here; muster init writes one)")
    (tmp_path / "cluster.toml").write_text("[run]\nworkers = 1\n")
    code, out, _ = muster("plan", "train.py")
    assert code == 0 and out.startswith("cluster: ./cluster.toml") and "worker/1" not in out


def test_the_plan_names_the_chief_and_why_each_task_is_where_it_is(muster):
    """CD-08, GP-01."""
    _, out, _ = muster("plan", "train.py")
    assert "worker/0 (chief)" in out and "note: worker/0 is the chief" in out
    assert out.count("one host") == 5 and "command: " in out


def test_a_flag_wins_over_the_file(muster, tmp_path):
    (tmp_path / "cluster.toml").write_text("[run]\nworkers = 1\nretries = 7\n")
    _, out, _ = muster("plan", "--workers", "2", "--json", "train.py")
    plan = json.loads(out)
    assert len([t for t in plan["tasks"] if t.startswith("worker")]) == 2 and plan["run"]["retries"] == 7


@pytest.mark.parametrize(
    ("file", "flags", "said", "engine", "kind"),
    [
        ('engine = "muster"', ["--tf1"], 'engine = "muster" of the file gives way', "tensorflow", "v1"),
        ('engine = "muster"', ["--kind", "pss"], 'engine = "muster" of the file gives way', "tensorflow", "pss"),
        ('engine = "muster"', ["--role-flags"], 'engine = "muster" of the file gives way', "tensorflow", "v1"),
        ('engine = "muster"', ["--no-role-flags"], "", "muster", "v1"),
        ('kind = "pss"', ["--engine", "muster"], 'kind = "pss" of the file gives way', "muster", "v1"),
        ("tf1 = true", ["--engine", "muster"], "tf1 = true of the file gives way", "muster", "v1"),
        ("role_flags = true", ["--engine", "muster"], "role_flags = true of the file gives way", "muster", "v1"),
        ('kind = "pss"', ["--tf1"], 'kind = "pss" of the file gives way to tf1', "tensorflow", "v1"),
        ("tf1 = true", ["--kind", "pss"], "tf1 = true of the file gives way to kind pss", "tensorflow", "pss"),
        ("ps = 2", ["--kind", "mwms"], "ps = 2 of the file gives way to kind mwms", "tensorflow", "mwms"),
        ("chief = false", ["--kind", "pss"], "chief = false of the file gives way", "tensorflow", "pss"),
        ('mode = "sync"\nspare = 1', ["--mode", "async"], "spare = 1 of the file gives way to mode", "muster", "v1"),
        ('mode = "bounded"\nmax_staleness = 3', ["--mode", "sync"], "max_staleness = 3 of the file", "muster", "v1"),
        ('kind = "pss"', ["--kind", "v1"], "", "tensorflow", "v1"),
    ],
)
def test_what_a_flag_contradicts_in_the_file_gives_way_and_is_said(muster, tmp_path, file, flags, said, engine, kind):
    (tmp_path / "cluster.toml").write_text(f"[run]\n{file}\n")
    code, out, err = muster("plan", *flags, "--json", "train.py")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["run"]["engine"], plan["run"]["kind"]) == (engine, kind)
    assert [n for n in plan["notes"] if "gives way" in n] == [n for n in plan["notes"] if said and said in n]
    assert not said or said in " ".join(plan["notes"])


@pytest.mark.parametrize(
    "flags", [["--engine", "muster", "--kind", "pss"], ["--engine", "muster", "--tf1"], ["--tf1", "--kind", "mwms"],
              ["--engine", "muster", "--role-flags"], ["--kind", "mwms", "--ps", "2"]],
)  # fmt: skip
@pytest.mark.parametrize("file", ["", 'engine = "muster"', 'kind = "v1"'])
def test_flags_that_contradict_each_other_are_refused(muster, tmp_path, flags, file):
    (tmp_path / "cluster.toml").write_text(f"[run]\n{file}\n")
    code, _, err = muster("plan", *flags, "train.py")
    assert code == 2 and "at        command line: --" in err and "Traceback" not in err


def test_the_arguments_of_the_script_are_left_alone(muster):
    """B4: those that look like ours too."""
    args = ["--workers", "9", "--json", "", "--", "-h", "a b", "$HOME", "'", '"', "\\", "*"]
    code, out, _ = muster("plan", "--json", "train.py", *args)
    argv = json.loads(out)["tasks"]["worker/0"]["argv"]
    assert code == 0 and argv[-len(args) :] == args


def test_the_environment_of_one_task_can_be_had_for_a_shell(muster):
    """CD-09: TF_CONFIG is set before Python starts."""
    code, out, _ = muster("plan", "--kind", "v1", "--env", "worker/1", "train.py", "a b")
    assert code == 0 and "export MUSTER_TASK=worker/1" in out and "export TF_CONFIG='{" in out
    assert out.rstrip().endswith("train.py 'a b'")


@pytest.mark.parametrize("name", ["a b.py", "it's.py", 'q"uote.py', "ünï.py", "./-dash.py"])
def test_any_name_of_a_script_will_do(muster, tmp_path, name):
    """B3."""
    (tmp_path / name).write_text("pass\n")
    code, out, _ = muster("plan", "--json", name)
    assert code == 0 and json.loads(out)["script"]["path"] == str(tmp_path / name)


def test_a_script_with_a_dash_in_front_may_follow_two_dashes(muster, tmp_path):
    """B3."""
    (tmp_path / "-dash.py").write_text("pass\n")
    code, out, _ = muster("plan", "--json", "--", "-dash.py", "-x")
    assert code == 0 and json.loads(out)["script"] == {"path": str(tmp_path / "-dash.py"), "args": ["-x"]}


def test_half_a_slurm_environment_changes_nothing(muster, monkeypatch):
    """B7, SU-07."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert muster("plan", "train.py")[0] == 0


def test_a_proxy_is_said_and_kept_from_the_cluster(muster, monkeypatch):
    """NW-05."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    _, out, _ = muster("plan", "--engine", "tensorflow", "--json", "train.py")
    plan = json.loads(out)
    assert "http_proxy is set on here" in " ".join(plan["notes"])
    assert "127.0.0.1" in plan["tasks"]["worker/0"]["env"]["no_proxy"].split(",")


@pytest.mark.parametrize("words", [["check"], ["run"], ["run", "--no-check"], ["run", "--sync", "."]])
def test_a_machine_without_ssh_says_so(muster, tmp_path, monkeypatch, words):
    """EN-09."""
    (tmp_path / "cluster.toml").write_text('launcher = "ssh"\n[[hosts]]\nname = "a"\naddress = "10.0.0.1"\n')
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = muster(*words, "train.py")
    assert code == 2 and "there is no ssh on this machine" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["run", "--json", "none.py"], "none.py"),
        (["run", "--json", "--workers", "0", "train.py"], "there is no worker"),
        (["plan", "--json", "--workers", "0", "train.py"], "there is no worker"),
        (["check", "--json", "-c", "none.toml"], "cluster file"),
        (["status", "--json", "nobody"], "run"),
    ],
)
def test_who_asks_for_json_gets_it_for_a_refusal_too(muster, words, cause):
    code, out, err = muster(*words)
    told = json.loads(out)
    assert cause in told["cause"] and told["cause"] in err
    assert (told["ok"], told["result"], told["exit_code"]) == (False, "refused", code) and code == 2
    assert told["try"] in err and set(told) == {"ok", "result", "cause", "at", "because", "try", "exit_code"}


# --- init


def test_init_writes_a_file_that_is_read(muster, tmp_path):
    assert muster("init")[0] == 0
    assert muster("plan", "train.py")[0] == 0
    assert tomllib.loads((tmp_path / "cluster.toml").read_text())["run"] == {"ps": 2, "workers": 3}


def test_init_does_not_write_over_a_file(muster, tmp_path):
    (tmp_path / "cluster.toml").write_text("mine")
    code, _, err = muster("init")
    assert code == 2 and "exists already" in err and "--force" in err
    assert (tmp_path / "cluster.toml").read_text() == "mine"
    assert muster("init", "--force")[0] == 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{'cluster': 1}", "single quotes"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b"{}", "has no cluster"),
        (b'{"cluster": {"ps_hosts": ["a:1"]}}', "did you mean 'ps'"),
        (b'{"cluster": {"ps": ["a:1"], "ps": ["b:1"]}}', "twice"),
        (b"", "names no host"),
        (b"gpu1 slots=4\ngpu2 slots=x\n", "line 2"),
    ],
)
def test_init_names_the_slip_in_what_people_have(muster, tmp_path, content, named):
    """CD-12, CD-18, B6."""
    (tmp_path / "given").write_bytes(content)
    code, _, err = muster("init", "--from", "given")
    assert code == 2 and named in err and "given" in err
    assert not (tmp_path / "cluster.toml").exists()


def test_init_makes_a_file_of_a_tf_config(muster, tmp_path):
    spec = {"cluster": {"ps": ["127.0.0.1:2221"], "worker": ["127.0.0.1:2222"]}, "task": {"type": "ps", "index": 0}}
    (tmp_path / "tf.json").write_text(json.dumps(spec))
    assert muster("init", "--from", "tf.json")[0] == 0
    code, out, _ = muster("plan", "--json", "train.py")
    assert code == 0 and json.loads(out)["tasks"]["worker/0"]["port"] == 2222
    assert muster("plan", "-c", "tf.json", "train.py")[0] == 0


def test_init_makes_a_file_of_a_host_file(muster, tmp_path):
    """CD-18."""
    (tmp_path / "hosts").write_text("\n# old\ngpu1 slots=4 # rack 2\r\n")
    assert muster("init", "--from", "hosts")[0] == 0
    assert tomllib.loads((tmp_path / "cluster.toml").read_text())["hosts"] == [{"name": "gpu1", "slots": 4}]


@pytest.mark.parametrize("count", [2, 200])
def test_init_makes_a_file_of_many_hosts(muster, tmp_path, count):
    """CD-19: order kept; the file that it writes can be read."""
    (tmp_path / "hosts").write_text("".join(f"node{n:03} slots=8\n" for n in range(count)))
    assert muster("init", "--from", "hosts")[0] == 0
    hosts = load(tmp_path / "cluster.toml").hosts
    assert [(host.name, host.slots) for host in hosts] == [(f"node{n:03}", 8) for n in range(count)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["status", "a" * 300], "there is no run"),
        (["logs", f"{'a' * 300}/x"], "there is no run"),
        (["fetch", "a" * 300], "there is no run"),
        (["run", f"--{'a' * 300}"], "there is no option"),
        (["check", "--wrokers", "3"], "--workers"),
        (["logs", "-n", "-5"], "x>=0"),
        (["init", "no/such/folder/c.toml"], "no/such/folder"),
        (["init", "--force", "."], "Is a directory"),
        (["run", "--pass", "ODD", "train.py"], "ODD is not UTF-8"),
    ],
)
def test_a_slip_is_answered_in_words(muster, monkeypatch, words, named):
    monkeypatch.setenv("ODD", "\udcff")
    code, _, err = muster(*words)
    assert code == 2 and named in err


def test_a_folder_that_is_gone_is_said(muster, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = muster("plan", "train.py")
    assert code == 2 and "the folder that you are in is gone" in err


@pytest.fixture
def ran(muster, tmp_path):
    """The folder of a run that is over; its tasks ran in ``project``, and one left a checkpoint there."""
    (tmp_path / "project" / "saved").mkdir(parents=True)
    (tmp_path / "project" / "saved" / "step-9").write_text("x")
    (tmp_path / "runs").mkdir()
    plan = make(checkpoints="saved")
    tasks = {name: replace(task, cwd=str(tmp_path / "project")) for name, task in plan.tasks.items()}
    return create(tmp_path / "runs", replace(plan, tasks=tasks))


def test_files_are_fetched_from_where_the_tasks_ran(muster, ran, tmp_path):
    assert muster("fetch", "--to", "got")[0] == 0
    assert (tmp_path / "got" / "here" / "saved" / "step-9").read_text() == "x"


def test_a_run_is_known_by_its_name_in_its_own_folder(muster, ran, monkeypatch):
    monkeypatch.chdir(ran.path)
    assert f"run {ran.id} was over" in muster("stop", ".")[1]


def test_a_place_that_files_cannot_be_brought_to_is_named(muster, ran):
    code, _, err = muster("fetch", "--to", "train.py")
    assert code == 2 and "nothing can be brought there" in err and "train.py" in err


def test_an_argument_that_is_not_utf_8_is_refused_in_words(muster):
    """B4."""
    code, _, err = muster("run", "train.py", "ok", "a\udcff")
    assert code == 2 and "b'a\\xff' is not UTF-8" in err
