import json
import time

import pytest
import tomllib
from making import read

from muster.errors import Refused
from muster.sources import from_host_file, from_tf_config, to_toml

SPEC = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}


def config(task=None, **cluster):
    return json.dumps({"cluster": cluster or SPEC, **({"task": task} if task is not None else {})})


@pytest.mark.parametrize(
    ("text", "at", "named"),
    [
        # CD-12: five slips, five messages
        ("{'cluster': {'ps': ['a:1']}}", "line 1, character 2", "single quotes"),
        ("", "TF_CONFIG", "TF_CONFIG is empty"),
        ("  \n", "TF_CONFIG", "TF_CONFIG is empty"),
        ("\ufeff" + config(), "character 1", "byte-order mark"),
        (b"\xef\xbb\xbf{}".decode("ascii", "surrogateescape"), "character 1", "byte-order mark"),
        ("{“cluster”: 1}", "line 1", "typographic quotes"),
        ('{"cluster": {"ps": ["a:1"],}}', "line 1", "comma before a closing bracket"),
        ('{\n "cluster": {"ps": ["a:1"]\n', "line 3", "near"),
        ("nonsense", "line 1", "near 'nonsense'"),
        ("[1]", "TF_CONFIG", "it is list"),
        ("3", "TF_CONFIG", "it is int"),
        ("{}", "TF_CONFIG", "has no cluster"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG", "has no cluster"),
        ('{"cluster": []}', "TF_CONFIG", "has no cluster"),
        # B6: duplicate keys
        ('{"cluster": {"ps": ["a:1"], "ps": ["b:1"]}}', "TF_CONFIG", "'ps' twice"),
        # CD-01
        (config(ps_hosts=["a:1"]), "cluster.ps_hosts", "did you mean 'ps'"),
        (config(worker_hosts=["a:1"]), "cluster.worker_hosts", "did you mean 'worker'"),
        (config(Worker=["a:1"]), "cluster.Worker", "did you mean 'worker'"),
        (config(workers=["a:1"]), "cluster.workers", "did you mean 'worker'"),
        (config(ps="a:1"), "cluster.ps", "no list"),
        (config(ps=[1]), "cluster.ps", "no list"),
        # CD-02
        (config({"type": "worker", "index": 2}), "task.index", "worker has 2 task(s), 0 to 1: b:1, c:1"),
        (config({"type": "worker", "index": -1}), "task.index", "no worker/-1"),
        (config({"type": "worker", "index": "-1"}), "task.index", "no worker/-1"),
        (config({"type": "worker", "index": 1.0}), "task.index", "1.0 is no whole number"),
        (config({"type": "worker", "index": True}), "task.index", "True is no whole number"),
        (config({"type": "worker", "index": None}), "task.index", "no whole number"),
        (config({"type": "worker "}), "task", "not whole"),
        (config({"type": "worker ", "index": 0}), "task.type", "did you mean 'worker'"),
        (config({"type": ["worker"], "index": 0}), "task.type", "no such job"),
        (config("worker/0"), "task", "not whole"),
        # CD-11
        (config(worker={"0": "a:1", "2": "b:1"}), "cluster.worker", "indices 0, 2"),
        (config(worker={"zero": "a:1"}), "cluster.worker", "zero"),
        ("[" * 100_000, "TF_CONFIG", "nested too deeply"),
    ],
)
def test_a_slip_in_tf_config_is_named_with_its_place(text, at, named):
    """CD-01, CD-02, CD-11, CD-12, B6."""
    with pytest.raises(Refused) as refused:
        from_tf_config(text)
    assert "TF_CONFIG" in str(refused.value)
    assert at in refused.value.at
    assert named in str(refused.value)


def test_a_tf_config_without_task_is_taken_and_warned_of():
    """CD-12."""
    found = from_tf_config(config())
    assert found.raw["run"] == {"ps": ["a:1"], "workers": ["b:1", "c:1"]} and found.task is None
    assert any("has no task" in note for note in found.notes)


@pytest.mark.parametrize(("index", "task"), [(1, ("worker", 1)), ("1", ("worker", 1)), (0, ("worker", 0))])
def test_the_task_is_read_be_its_index_a_number_or_text(index, task):
    """CD-02."""
    assert from_tf_config(config({"type": "worker", "index": index})).task == task


def test_a_bare_cluster_spec_is_taken():
    found = from_tf_config(json.dumps(SPEC))
    assert found.raw["run"] == {"ps": ["a:1"], "workers": ["b:1", "c:1"]} and found.raw["launcher"] == "ssh"


def test_numeric_keys_that_json_made_text_are_put_in_order():
    """CD-11."""
    rows = {str(n): f"h{n}:1" for n in range(12)}
    assert from_tf_config(json.dumps({"ps": ["a:1"], "worker": rows})).raw["run"]["workers"] == list(rows.values())


def test_two_chiefs_and_master_beside_chief_are_refused():
    """CD-08."""
    with pytest.raises(Refused, match="two chiefs"):
        read(from_tf_config(config(chief=["a:1", "b:1"], ps=["c:1"], worker=["d:1"])).raw)
    with pytest.raises(Refused, match="the same thing"):
        read(from_tf_config(config(chief=["a:1"], master=["b:1"], worker=["d:1"], ps=["e:1"])).raw)


def test_a_master_is_taken_as_chief_with_a_warning():
    """CD-08."""
    cluster = read(from_tf_config(config(master=["a:1"], worker=["d:1"], ps=["e:1"])).raw)
    assert cluster.run.chief == ["a:1"] and "old name" in cluster.warnings[0]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("\n# old\ngpu1 slots=4 # rack 2", [{"name": "gpu1", "slots": 4}]),
        ("gpu1\tslots=4\r\n\r\n#gpu3\r\ngpu2\r\n", [{"name": "gpu1", "slots": 4}, {"name": "gpu2"}]),
        ("\ufeffgpu1", [{"name": "gpu1"}]),
        ("ana@10.0.0.4 gpus=2", [{"name": "10.0.0.4", "ssh": "ana@10.0.0.4", "gpus": 2}]),
        ("a max_slots=2\nb max-slots=3", [{"name": "a", "slots": 2}, {"name": "b", "slots": 3}]),
    ],
)
def test_a_host_file_may_hold_blanks_comments_tabs_and_other_line_ends(text, hosts):
    """CD-18, CD-19."""
    raw = from_host_file(text).raw
    assert (raw["launcher"], raw["hosts"]) == ("ssh", hosts)


def test_a_host_file_with_slots_makes_a_cluster_that_fits_them():
    assert from_host_file("a slots=2\nb slots=2").raw["run"] == {"ps": 1, "workers": 3}
    assert "run" not in from_host_file("a slots=2\nb").raw


def test_addresses_of_other_machines_are_for_ssh():
    assert "launcher" not in from_tf_config(config(ps=["127.0.0.1:1"], worker=["localhost:2"])).raw


@pytest.mark.parametrize(
    ("text", "at", "named"),
    [
        ("gpu1 slots=4\ngpu2 slots=x", "line 2", "'slots=x'"),
        ("gpu1 slots = 4", "line 1", "'slots'"),
        ("gpu1\n\n gpu1", "line 3", "listed twice"),
        ("# only\n\n", "host file", "names no host"),
        ("", "host file", "names no host"),
    ],
)
def test_a_bad_line_of_a_host_file_is_shown_with_its_number(text, at, named):
    """CD-18, B1."""
    with pytest.raises(Refused) as refused:
        from_host_file(text)
    assert at in refused.value.at and named in str(refused.value)


@pytest.mark.parametrize("count", [1, 2, 200])
def test_a_host_file_survives_the_way_to_toml_and_back(count):
    """CD-19: 200 hosts of 8 slots are 1600 slots, in order, and fast."""
    began = time.perf_counter()
    raw = from_host_file("".join(f"node{n:03} slots=8\n" for n in range(1, count + 1))).raw
    again = tomllib.loads(to_toml(raw))
    assert again["hosts"] == raw["hosts"]
    assert [host["name"] for host in raw["hosts"]] == [f"node{n:03}" for n in range(1, count + 1)]
    assert sum(host["slots"] for host in raw["hosts"]) == 8 * count
    assert time.perf_counter() - began < 1


def test_a_tf_config_survives_the_way_to_toml_and_back():
    raw = from_tf_config(config(chief=["a:1"], ps=["[fd00::5]:2"], worker=["d:1", "训练机:1"])).raw
    again = tomllib.loads(to_toml(raw))
    assert again["launcher"] == "ssh"
    assert again == raw
