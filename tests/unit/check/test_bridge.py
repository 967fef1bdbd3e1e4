"""NW-14: a container on a bridge network, as the check sees it."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.check import probe
from muster.check.findings import Finding, Job, Need, Pairs, Reach, Wanted
from muster.check.verdicts import judge

BRIDGED = {"addresses": ["172.17.0.2"], "container": "Docker"}
OPEN = {"free": True, "error": "", "holder": None, "ephemeral": False}
SHUT = {"free": False, "error": "EADDRNOTAVAIL", "holder": None, "ephemeral": False}
PYTHON = {"version": "3.11.7", "executable": "/python"}
FIT = {"python": PYTHON, "packages": {"tensorflow": "2.21.0", "numpy": "2.0.0"}, "ports": {"2222": OPEN}}
PS = Wanted("gpu-a", "192.168.1.5", "/python", ports={"ps/0": 2222, "ps/1": 2223}, tasks=("ps/0", "ps/1"))
WORKER = Wanted("gpu-b", "192.168.1.6", "/python", tasks=("worker/0",))


def found(ps: Wanted = PS, outcome: str = "ok", **facts: Any) -> list[Finding]:
    told = {"gpu-a": {**copy.deepcopy(FIT), **facts}, "gpu-b": copy.deepcopy(FIT)}
    reaches = [Reach(Need("gpu-b", "gpu-a", task, ps.address, port), outcome) for task, port in ps.ports.items()]
    return judge([ps, WORKER], told, Pairs(tuple(reaches)), Job())


def test_an_address_that_only_the_machine_of_the_container_has_is_one_row():
    (row,) = found(interfaces=BRIDGED, ports={"2222": SHUT, "2223": SHUT})
    assert (row.severity, row.host, row.kind) == ("error", "gpu-a", "bridge")
    assert "172.17.0.2" in row.because and "192.168.1.5" in row.because
    assert "--network host" in row.try_ and 'bind = "0.0.0.0"' in row.try_


@pytest.mark.parametrize(
    "interfaces",
    [
        {},
        {"addresses": ["172.17.0.2"], "container": ""},
        {"addresses": ["10.0.0.7"], "container": "Docker"},
        {"addresses": ["172.17.0.1", "10.0.0.7"], "container": "Docker"},  # on the network of its machine
    ],
)
def test_elsewhere_it_is_a_wrong_address(interfaces):
    assert {row.kind for row in found(interfaces=interfaces, ports={"2222": SHUT, "2223": SHUT})} == {"address"}


@pytest.mark.parametrize("outcome", ["timeout", "refused", "no_route"])
def test_the_address_of_a_bridge_that_others_do_not_reach(outcome):
    ps = replace(PS, address="172.17.0.2")
    (row,) = found(ps, outcome, interfaces=BRIDGED)
    assert (row.kind, row.host, row.peer) == ("bridge", "gpu-a", "gpu-b") and "no other machine knows" in row.because


def test_containers_on_one_bridge_that_reach_each_other_are_fit():
    assert not found(replace(PS, address="172.17.0.2"), interfaces=BRIDGED)


def test_a_port_that_is_not_passed_on_is_named_with_both_ends():
    ps = replace(PS, bind="0.0.0.0", bound={"ps/0": 4222, "ps/1": 4223})
    (row,) = found(ps, "refused", interfaces=BRIDGED, ports={"4222": OPEN, "4223": OPEN})
    assert "192.168.1.5:2222 to port 4222" in row.try_


def test_a_task_listens_where_it_is_bound():
    assert PS.listens() == [("ps/0", "192.168.1.5", 2222), ("ps/1", "192.168.1.5", 2223)]
    assert replace(PS, bind="0.0.0.0", bound={"ps/0": 7, "ps/1": 8}).listens()[0] == ("ps/0", "0.0.0.0", 7)


def test_the_interfaces_of_this_computer():
    told = probe.interfaces({})
    assert not [address for address in told["addresses"] if address.startswith("127.")]
    assert not Path("/.dockerenv").exists() or told["container"] == "Docker"


def test_a_pod_says_what_it_is(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert probe._container() == "Kubernetes"
