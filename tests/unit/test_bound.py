"""NW-14: what others dial, and where a task listens; from the file to the environment of each task."""

import json

import pytest
from making import make, read

from muster.addresses import Address
from muster.bound import apart, bound, candidates, free_ports, own_seat
from muster.cluster import Host, Run
from muster.errors import Refused
from muster.placement import Facts
from muster.ps.link import places

BEHIND = Host(name="gpu-a", address="192.168.1.5", bind="0.0.0.0", ports="3200-3209", bind_ports="2200-2209", ssh="a")
TWIN = Host(name="gpu-b", address="192.168.1.5", bind="0.0.0.0", ports="3210-3219", bind_ports="2200-2209", ssh="b")
PLAIN = Host(name="gpu-c", address="192.168.1.6", ssh="c")


def file(**host: object) -> dict[str, object]:
    return {"launcher": "ssh", "hosts": [{"name": "gpu-a", "address": "192.168.1.5", **host}]}


# --- the file


@pytest.mark.parametrize(
    ("said", "port", "place"),
    [
        ({}, 3222, "192.168.1.5:3222"),
        ({"bind": "0.0.0.0"}, 3222, "0.0.0.0:3222"),
        ({"bind": "172.17.0.2", "ports": "3222", "bind_ports": "2222"}, 3222, "172.17.0.2:2222"),
        ({"ports": "3200-3299", "bind_ports": "2200-2299"}, 3242, "192.168.1.5:2242"),
        ({"bind": "::", "ports": "3200-3299"}, 3242, "[::]:3242"),
    ],
)
def test_announced_and_bound(said, port, place):
    (host,) = read(file(**said)).hosts
    assert str(bound(host, port)) == place


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"bind": "0.0.0.0:2222"}, "is no host"),
        ({"ports": "80-90"}, "is no range of ports"),
        ({"ports": "3200-3299", "bind_ports": "2200"}, "not as many as its ports"),
        ({"bind_ports": "2200-2299"}, "not as many as its ports"),
        ({"ports": "a"}, "is no range of ports"),
    ],
)
def test_what_leads_nowhere_is_refused(said, told):
    with pytest.raises(Refused) as error:
        read(file(**said))
    assert told in str(error.value) and "hosts[0]" in str(error.value)


# --- the plan


def test_a_range_of_its_own_for_each_host():
    plan = make([BEHIND, PLAIN], ps=1, workers=2, launcher="ssh")
    assert [t.where for t in plan.tasks.values()] == ["192.168.1.5:3200", "192.168.1.6:20000", "192.168.1.5:3201"]
    assert [str(t.bound) for t in plan.tasks.values()] == ["0.0.0.0:2200", "192.168.1.6:20000", "0.0.0.0:2201"]


def test_what_is_busy_is_busy_where_it_is_bound():
    plan = make([BEHIND], {"gpu-a": Facts(busy=frozenset({2200, 3201}))}, ps=1, workers=1, launcher="ssh")
    assert [(t.port, t.bound.port) for t in plan.tasks.values()] == [(3201, 2201), (3202, 2202)]


def test_hosts_at_one_address_share_what_is_dialled_there():
    mine, other = Host(name="x", address="10.0.0.1", ssh="x"), Host(name="y", address="10.0.0.1", ssh="y")
    free = free_ports(Run(ports="20000-20003"), [mine, other], {"x": frozenset({20000}), "y": frozenset({20002})})
    assert [next(free["x"]), next(free["y"]), next(free["x"], None)] == [20001, 20003, None]


def test_a_host_has_no_more_seats_than_ports():
    few = Host(name="gpu-a", address="192.168.1.5", ports="3222", bind_ports="2222")
    with pytest.raises(Refused, match="2 tasks do not fit on 1 seats"):
        make([few], ps=1, workers=1, launcher="ssh")


def test_peers_get_the_announced_and_the_task_itself_what_it_can_bind():
    plan = make([BEHIND, PLAIN], ps=1, workers=2, launcher="ssh")
    told = {name: json.loads(t.env["TF_CONFIG"])["cluster"] for name, t in plan.tasks.items()}
    assert told["worker/0"] == {"ps": ["192.168.1.5:3200"], "worker": ["192.168.1.6:20000", "192.168.1.5:3201"]}
    assert told["ps/0"] == {"ps": ["127.0.0.1:2200"], "worker": ["192.168.1.6:20000", "192.168.1.5:3201"]}
    assert told["worker/1"] == {"ps": ["192.168.1.5:3200"], "worker": ["192.168.1.6:20000", "127.0.0.1:2201"]}
    assert json.loads(plan.tasks["ps/0"].env["MUSTER_CLUSTER"])["cluster"] == told["ps/0"]


def test_our_own_ps_is_told_where_to_listen_and_nobody_else_is():
    plan = make([BEHIND, PLAIN], ps=1, workers=2, launcher="ssh", engine="muster")
    told = {name: json.loads(t.env["MUSTER_CLUSTER"]) for name, t in plan.tasks.items()}
    assert told["ps/0"]["bind"] == "0.0.0.0:2200" and "bind" not in told["worker/0"]
    assert {tuple(each["cluster"]["ps"]) for each in told.values()} == {("192.168.1.5:3200",)}
    assert plan.tasks["ps/0"].listens and plan.apart


def test_a_plan_without_forwarding_says_nothing_of_it():
    plan = make([PLAIN, Host(name="d", address="192.168.1.7")], ps=1, workers=1, launcher="ssh", engine="muster")
    for task in plan.tasks.values():
        assert (task.bind, task.bind_port, task.bound) == ("", 0, Address(task.address, task.port))
        assert not {"bind", "near"} & set(json.loads(task.env["MUSTER_CLUSTER"]))


def test_no_proxy_has_the_place_inside_too():
    facts = {"gpu-a": Facts(proxies={"http_proxy": "http://p:1"})}
    env = make([BEHIND, PLAIN], facts, ps=1, workers=1, launcher="ssh").tasks["ps/0"].env
    assert {"192.168.1.5", "127.0.0.1", "0.0.0.0"} <= set(env["no_proxy"].split(","))


# --- exact seats


def test_an_exact_seat_is_announced_and_leads_behind():
    host = Host(name="gpu-a", address="192.168.1.5", bind="0.0.0.0", ports="3222", bind_ports="2222")
    plan = make([host, PLAIN], ps=["192.168.1.5:3222"], workers=["gpu-c:2222"], launcher="ssh")
    assert (plan.tasks["ps/0"].where, str(plan.tasks["ps/0"].bound)) == ("192.168.1.5:3222", "0.0.0.0:2222")
    assert plan.tasks["worker/0"].bound == Address("gpu-c", 2222)


def test_an_exact_seat_finds_its_container_by_its_port():
    plan = make([BEHIND, TWIN], ps=["192.168.1.5:3215"], workers=["192.168.1.5:3204"], launcher="ssh")
    assert [(t.host, t.bound.port) for t in plan.tasks.values()] == [("gpu-b", 2205), ("gpu-a", 2204)]


def test_an_exact_seat_that_nothing_leads_to_is_refused():
    with pytest.raises(Refused, match="ps/0 announces port 2222 of gpu-b, and nothing leads from there to it"):
        make([BEHIND, TWIN], ps=["192.168.1.5:2222"], workers=["192.168.1.5:3204"], launcher="ssh")
    assert candidates(Address("10.9.9.9", 1), [BEHIND], "ps/0", "") == []


# --- containers at one address


@pytest.mark.parametrize(
    ("launcher", "where", "found"),
    [
        ("local", [("a", "127.0.0.1"), ("b", "127.0.0.1")], False),
        ("ssh", [("a", "10.0.0.1"), ("b", "10.0.0.1")], True),
        ("ssh", [("a", "10.0.0.1"), ("a", "10.0.0.1")], False),
        ("local", [("a", "127.0.0.1"), ("b", "127.0.0.2")], True),
    ],
)
def test_whether_a_network_is_between(launcher, where, found):
    assert apart(launcher, where) is found


def test_containers_at_one_address_know_which_ps_is_theirs():
    plan = make([BEHIND, TWIN], ps=2, workers=2, launcher="ssh", engine="muster")
    told = {name: json.loads(t.env["MUSTER_CLUSTER"]) for name, t in plan.tasks.items()}
    assert [told[f"worker/{n}"]["near"] for n in (0, 1)] == [[0], [1]]
    found = places(told["worker/0"], "run", "worker/0")
    assert found[0].path and (found[1].path, found[1].host, found[1].port) == ("", "192.168.1.5", 3210)


def test_the_own_seat_leads_inside():
    told = own_seat({"worker": ["h:1", "h:2"]}, "worker", 1, Host(bind="10.1.1.1"), Address("10.1.1.1", 7))
    assert told == {"worker": ["h:1", "10.1.1.1:7"]}
