import json

import msgspec
import pytest
from making import SCRIPT, make

from muster.cluster import Cluster, Host, Run
from muster.errors import Refused
from muster.placement import Facts
from muster.plan import Plan, Script, check_task_name, make_plan

TWO = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]


def gpus(plan):
    return {task.id: task.gpus for task in plan.tasks.values()}


def test_without_a_file_this_machine_gets_two_ps_and_three_workers():
    plan = make()
    assert list(plan.tasks) == ["ps/0", "ps/1", "worker/0", "worker/1", "worker/2"]
    assert [task.where for task in plan.tasks.values()] == [f"127.0.0.1:{20000 + n}" for n in range(5)]
    assert plan.chief == "worker/0" and plan.name == "train" and not plan.exact
    assert {(task.host, task.cwd, task.python) for task in plan.tasks.values()} == {
        ("here", "/project", "/usr/bin/python3")
    }


def test_the_same_question_has_the_same_answer_and_survives_the_disk():
    plan = make(TWO, {"a": Facts(gpus=(0, 1))}, launcher="ssh", workers=5)
    assert plan == make(TWO, {"a": Facts(gpus=(0, 1))}, launcher="ssh", workers=5)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("has", "found", "workers", "each", "dealt"),
    [
        (None, (0, 1), 2, None, [(0,), (1,)]),  # GP-01
        (None, (0, 1, 2, 3), 2, None, [(0, 1), (2, 3)]),
        (None, (0, 1, 2), 2, None, [(0,), (1,)]),
        (None, (0, 1, 2, 3), 2, 1, [(0,), (1,)]),
        (None, (2, 5), 2, 1, [(2,), (5,)]),
        (None, (), 2, None, [(), ()]),
        (None, None, 2, None, [(), ()]),
        (None, (0, 1), 2, 0, [(), ()]),
        (4, None, 2, 2, [(0, 1), (2, 3)]),
        (2, (4, 5, 6), 2, 1, [(4,), (5,)]),
        ([1, 3], None, 2, 1, [(1,), (3,)]),
        ([1, 3], (0, 1, 2, 3), 2, None, [(1,), (3,)]),
        (None, (0, 1), 3, None, [(0,), (1,), (0,)]),
        (None, (7,), 2, None, [(7,), (7,)]),
    ],
)
def test_gpus_are_dealt_to_the_workers_and_none_to_the_ps(has, found, workers, each, dealt):
    """GP-01."""
    plan = make([Host("a", "10.0.0.1", gpus=has)], {"a": Facts(gpus=found)}, workers=workers, gpus_per_worker=each)
    assert [plan.tasks[f"worker/{n}"].gpus for n in range(workers)] == dealt
    assert plan.tasks["ps/0"].gpus == ()
    for task in plan.tasks.values():
        assert task.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, task.gpus))


def test_a_gpu_that_is_shared_is_said_so():
    """GP-01: three workers on two GPUs."""
    plan = make([Host("a", "10.0.0.1")], {"a": Facts(gpus=(0, 1))})
    assert "3 workers share 2 GPU(s) on a: each gets one, and some get the same one" in plan.notes


@pytest.mark.parametrize(
    ("host", "found", "run", "named"),
    [
        (Host("a", "1.1.1.1", gpus=2), (0,), {}, ["a has no GPU 1", "it shows 1 GPU(s): 0"]),
        (Host("a", "1.1.1.1", gpus=[5]), (), {}, ["a has no GPU 5", "it shows 0"]),
        (Host("a", "1.1.1.1"), (), {"gpus_per_worker": 1}, ["3 workers on a want 3 GPUs, and it has 0"]),
        (Host("a", "1.1.1.1"), (0, 1), {"gpus_per_worker": 1}, ["want 3 GPUs, and it has 2", "leave it out to share"]),
    ],
)
def test_a_gpu_that_is_not_there_is_named(host, found, run, named):
    """B9, GP-01."""
    with pytest.raises(Refused) as refused:
        make([host], {"a": Facts(gpus=found)}, **run)
    assert all(words in str(refused.value) for words in named)


def test_ps_go_to_hosts_without_gpus_and_workers_to_those_with_most():
    hosts = [Host("big", "10.0.0.1"), Host("small", "10.0.0.2"), Host("cpu", "10.0.0.3")]
    facts = {"big": Facts(gpus=(0, 1, 2, 3)), "small": Facts(gpus=(0, 1)), "cpu": Facts(gpus=())}
    plan = make(hosts, facts, launcher="ssh", ps=1, workers=6, gpus_per_worker=1)
    on = {host.name: [t.id for t in plan.tasks.values() if t.host == host.name] for host in hosts}
    assert on["cpu"] == ["ps/0"]
    assert (len(on["big"]), len(on["small"])) == (4, 2)
    assert sorted(sum((t.gpus for t in plan.of("worker") if t.host == "big"), ())) == [0, 1, 2, 3]
    assert plan.tasks["ps/0"].why == "a host without GPUs"


def test_tasks_are_spread_over_equal_hosts():
    plan = make(TWO, launcher="ssh", ps=2, workers=4)
    assert [task.host for task in plan.of("ps")] == ["a", "b"]
    assert sorted(task.host for task in plan.of("worker")) == ["a", "a", "b", "b"]
    assert {task.port for task in plan.tasks.values()} == {20000, 20001, 20002}  # each host counts for itself


def test_slots_are_kept_to():
    hosts = [Host("a", "10.0.0.1", slots=1), Host("b", "10.0.0.2", slots=4)]
    plan = make(hosts, launcher="ssh")
    assert [task.host for task in plan.tasks.values()].count("a") == 1


@pytest.mark.parametrize(
    ("hosts", "run", "named"),
    [
        ([Host("a", "10.0.0.1", slots=2), Host("b", "10.0.0.2", slots=2)], {}, ["5 tasks do not fit on 4 seats"]),
        ([Host("a", "10.0.0.1", slots=0)], {}, ["5 tasks do not fit on 0 seats", "a has 0"]),
        ([], {"ports": "20000-20003"}, ["5 tasks do not fit on 4 seats", "here has 4"]),
        ([], {"workers": 9999}, ["10001 tasks do not fit on 1000 seats"]),
    ],
)
def test_more_tasks_than_seats_are_refused(hosts, run, named):
    """B1."""
    with pytest.raises(Refused) as refused:
        make(hosts, launcher="ssh", **run)
    assert all(words in str(refused.value) for words in named)


def test_a_port_in_use_is_passed_over():
    """NW-09, NW-10."""
    plan = make(facts={"here": Facts(busy=frozenset({20000, 20002}))})
    assert [task.port for task in plan.tasks.values()] == [20001, 20003, 20004, 20005, 20006]


def test_when_no_port_is_left_the_host_and_the_range_are_named():
    with pytest.raises(Refused) as refused:
        make(facts={"here": Facts(busy=frozenset({20000}))}, ports="20000-20004")
    assert "no port is free for worker/2 on here" in str(refused.value) and "20000-20004" in refused.value.because


def test_exact_seats_are_taken_as_they_are():
    plan = make(ps=["h0:2222"], workers=["h1:7", "h2:8"], chief="h3:9")
    assert {t.id: t.where for t in plan.tasks.values()} == {
        "chief/0": "h3:9",
        "ps/0": "h0:2222",
        "worker/0": "h1:7",
        "worker/1": "h2:8",
    }
    assert plan.exact and plan.chief == "chief/0"
    assert [host.name for host in plan.hosts] == ["h3", "h0", "h1", "h2"]


def test_exact_seats_find_their_host_by_address_or_name():
    hosts = [Host("a", "10.0.0.1", python="/opt/python"), Host("b", "10.0.0.2")]
    plan = make(hosts, {"a": Facts(gpus=(0, 1))}, "ssh", ps=["10.0.0.2:1"], workers=["A:1", "10.0.0.1:2"])
    assert [(t.host, t.address, t.gpus) for t in plan.tasks.values()] == [
        ("b", "10.0.0.2", ()),
        ("a", "A", (0,)),
        ("a", "10.0.0.1", (1,)),
    ]
    assert plan.tasks["worker/0"].python == "/opt/python"


def test_a_seat_on_a_host_that_is_not_in_the_file_is_refused():
    """CD-03."""
    with pytest.raises(Refused) as refused:
        make(TWO, launcher="ssh", ps=["10.0.0.1:1"], workers=["10.0.0.9:1"])
    assert "worker/0 sits on 10.0.0.9" in refused.value.what and "run.workers[0]" in refused.value.at
    assert "10.0.0.1, 10.0.0.2" in refused.value.because


def test_an_address_of_ipv6_keeps_its_brackets_everywhere():
    """CD-14."""
    plan = make([Host("a", "fd00::5")], launcher="ssh")
    task = plan.tasks["worker/1"]
    assert task.where == "[fd00::5]:20003" and task.address == "fd00::5"
    for told in ("TF_CONFIG", "MUSTER_CLUSTER"):
        assert json.loads(task.env[told])["cluster"]["ps"] == ["[fd00::5]:20000", "[fd00::5]:20001"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.1.1"])
def test_a_loopback_address_among_several_hosts_is_refused(address):
    """CD-14."""
    with pytest.raises(Refused, match="b has a loopback address"):
        make([Host("a", "10.0.0.1"), Host("b", address)], launcher="ssh")


def test_a_proxy_never_sees_the_traffic_of_the_cluster():
    """NW-05, NW-06: exact names, added to what is there already, for the hosts that have a proxy."""
    facts = {"a": Facts(proxies={"http_proxy": "http://p:9"}, no_proxy="corp.example.com"), "b": Facts()}
    plan = make(TWO, facts, "ssh", ps=1, workers=1)
    on_a = next(t for t in plan.tasks.values() if t.host == "a")
    on_b = next(t for t in plan.tasks.values() if t.host == "b")
    assert on_a.env["no_proxy"] == "corp.example.com,localhost,127.0.0.1,::1,10.0.0.1,10.0.0.2"
    assert "no_proxy" not in on_b.env
    assert any("http_proxy is set on a" in note for note in plan.notes)


def test_no_proxy_takes_ipv6_without_brackets():
    plan = make([Host("a", "fd00::5")], {"a": Facts(proxies={"grpc_proxy": "x"})}, "ssh")
    assert plan.tasks["ps/0"].env["no_proxy"].split(",")[-1] == "fd00::5"


@pytest.mark.parametrize(
    ("run", "tasks", "chief", "computing"),
    [
        ({}, "ps/0 ps/1 worker/0 worker/1 worker/2", "worker/0", "worker/0 worker/1 worker/2"),
        ({"chief": True, "workers": 1}, "ps/0 ps/1 chief/0 worker/0", "chief/0", "chief/0 worker/0"),
        ({"kind": "pss", "workers": 2}, "ps/0 ps/1 chief/0 worker/0 worker/1", "chief/0", "worker/0 worker/1"),
        ({"kind": "mwms", "workers": 2}, "worker/0 worker/1", "worker/0", "worker/0 worker/1"),
        ({"kind": "mwms", "workers": 1, "chief": True}, "chief/0 worker/0", "chief/0", "chief/0 worker/0"),
        ({"engine": "muster", "ps": 1, "workers": 1}, "ps/0 worker/0", "worker/0", "worker/0"),
    ],
)
def test_each_kind_has_its_roles(run, tasks, chief, computing):
    """CD-06, CD-08."""
    plan = make(**run)
    assert (" ".join(plan.tasks), plan.chief) == (tasks, chief)
    assert " ".join(task.id for task in plan.workers) == computing
    assert ("worker/0 is the chief (no separate one is asked for)" in plan.notes) is (chief == "worker/0")


def test_the_coordinator_of_a_parameter_server_strategy_gets_no_gpu():
    plan = make([Host("a", "10.0.0.1")], {"a": Facts(gpus=(0, 1))}, kind="pss", workers=2)
    assert gpus(plan) == {"ps/0": (), "ps/1": (), "chief/0": (), "worker/0": (0,), "worker/1": (1,)}


def test_a_task_learns_who_it_is_and_who_the_others_are():
    plan = make(chief=True, ps=1, workers=1, mode="sync", checkpoints="/x")
    told = json.loads(plan.tasks["worker/0"].env["TF_CONFIG"])
    assert told == {
        "cluster": {"chief": ["127.0.0.1:20001"], "ps": ["127.0.0.1:20000"], "worker": ["127.0.0.1:20002"]},
        "task": {"type": "worker", "index": 0},
    }
    assert json.loads(plan.tasks["worker/0"].env["MUSTER_CLUSTER"]) == {
        "cluster": told["cluster"],
        "chief": "chief/0",
        "engine": "tensorflow",
        "kind": "v1",
        "mode": "sync",
        "spare": 0,
        "max_staleness": None,
        "checkpoints": "/x",
        "evaluator": False,
    }
    assert plan.tasks["worker/0"].env["MUSTER_TASK"] == "worker/0"
    assert plan.tasks["worker/0"].env["PYTHONUNBUFFERED"] == "1"


def test_the_variables_of_a_host_win_over_ours():
    plan = make([Host("a", "10.0.0.1", env={"TF_FORCE_GPU_ALLOW_GROWTH": "false", "X": "1"})], launcher="ssh")
    assert plan.tasks["ps/0"].env["TF_FORCE_GPU_ALLOW_GROWTH"] == "false" and plan.tasks["ps/0"].env["X"] == "1"


START = ("/usr/bin/python3", "-m", "muster.train.start")
FLAGS = ("--job_name=worker", "--task_index=1")


@pytest.mark.parametrize(
    ("run", "script", "argv"),
    [
        ({}, SCRIPT, (*START, "/project/train.py")),
        ({}, Script("/p/a b'é.py", ("", "-x", "$H")), (*START, "/p/a b'é.py", "", "-x", "$H")),
        ({"role_flags": True}, Script("/t.py", ("--lr", "1")), (*START, "/t.py", *FLAGS, "--lr", "1")),
        ({"tf1": True}, Script("/t.py"), (*START, "--tf1", "/t.py", *FLAGS)),
        ({}, Script("/bin/train", ("a",)), ("/bin/train", "a")),
        ({"role_flags": True}, Script("/bin/train", ("a",)), ("/bin/train", *FLAGS, "a")),
    ],
)
def test_the_command_of_a_task(run, script, argv):
    """B3, B4: no shell, no quoting."""
    plan = make_plan(Cluster(run=Run(**run)), script, "/project", python="/usr/bin/python3")
    assert plan.tasks["worker/1"].argv == argv


def test_a_ps_of_our_own_does_not_run_the_script():
    plan = make(engine="muster")
    assert plan.tasks["ps/0"].argv == ("/usr/bin/python3", "-m", "muster.ps")
    assert "TF_CONFIG" not in plan.tasks["worker/0"].env


def test_many_workers_on_one_ps_are_remarked_on():
    """PF-03."""
    assert any("19 workers on 1 ps" in note for note in make(ps=1, workers=19).notes)


@pytest.mark.parametrize("name", ["worker/3", "worker/-1", "worker/01", "worker/x", "worker/", "worker/²"])
def test_an_index_outside_the_job_is_refused_with_its_size_and_addresses(name):
    """CD-02."""
    with pytest.raises(Refused) as refused:
        check_task_name(name, make())
    assert "worker has 3 task(s), 0 to 2: 127.0.0.1:20002" in refused.value.because


@pytest.mark.parametrize("name", ["chief/0", "wurker/1", "", "worker"])
def test_a_task_of_no_job_is_refused_with_those_there_are(name):
    with pytest.raises(Refused) as refused:
        check_task_name(name, make())
    assert "ps/0, ps/1, worker/0" in refused.value.try_


def test_a_task_is_found_by_its_name():
    assert check_task_name("worker/2", make()).port == 20004


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "given"),
    [(2, 3, "", "1"), (16, 3, "", "5"), (8, 1, "", None), (8, 3, "4", None), (0, 3, "", None)],
)
def test_workers_of_one_host_share_its_cores(cores, workers, threads, given):
    """PF-05: unless the user has set the number, or one worker has the host for itself."""
    plan = make(facts={"here": Facts(cores=cores, threads=threads)}, workers=workers)
    assert plan.tasks["worker/0"].env.get("TF_NUM_INTRAOP_THREADS") == given
    assert "TF_NUM_INTRAOP_THREADS" not in plan.tasks["ps/0"].env
    assert any("share" in note and "cores" in note for note in plan.notes) == (given is not None)


@pytest.mark.parametrize(("there", "said"), [(1, []), (2, ["2"])])
def test_a_gpu_that_workers_share_is_counted_once(there, said):
    """Three workers on one GPU are no case for all-reduce."""
    notes = make(facts={"here": Facts(gpus=tuple(range(there)))}).notes
    assert [note.split()[0] for note in notes if "all-reduce" in note] == said
