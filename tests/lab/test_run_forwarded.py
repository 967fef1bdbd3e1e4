"""NW-14: machines that listen at one place and are dialled at another, as containers on bridge networks are.

``front`` stands for the machine of the containers, or a router: it passes the ports on, and nobody but ``front`` gets
through to them.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator

import pytest

from muster.events import Joined, Listening

from .lab import Lab
from .remote import Site

PS, WORKERS, FRONT = "ps0.example.com", ("worker0.example.com", "worker1.example.com"), "front.example.com"
FORWARD = """
import socket, sys, threading

def pump(a, b):
    try:
        while data := a.recv(1 << 16):
            b.sendall(data)
    except OSError:
        pass
    for sock in (a, b):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def serve(listener, there):
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(there, timeout=5)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for a, b in ((near, far), (far, near)):
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(a, b), daemon=True).start()

for first, count, host, behind in zip(*[iter(sys.argv[1:])] * 4):
    for n in range(int(count)):
        listener = socket.create_server(("", int(first) + n))
        threading.Thread(target=serve, args=(listener, (host, int(behind) + n))).start()
print("passing on", flush=True)
"""
LOOP = """
import os, json, socket
import muster, numpy as np
ps = muster.connect()
ps.declare({"w": np.zeros(4)}, "sgd")
while not ps.stopping and ps.step_now < 60:
    ps.step({"w": np.ones(4)}, samples=1)
print(os.environ["MUSTER_CLUSTER"], flush=True)
"""


@pytest.fixture
def behind(make_lab: Callable[..., Lab]) -> Iterator[Site]:
    """Three machines, each with ten ports from 2200 on; ``front`` has 3200 to 3209 for the first, 3210 for the next."""
    lab = make_lab(PS, *WORKERS, FRONT)
    parts: list[str] = []
    for n, host in enumerate((PS, *WORKERS)):
        parts += [str(3200 + 10 * n), "10", lab.address(host), "2200"]
        others = ["!", "-i", "lo", "!", "-s", lab.address(FRONT), "-p", "tcp", "--syn", "--dport", "1024:65535"]
        assert lab.run_in(host, ["iptables", "-A", "INPUT", *others, "-j", "DROP"]).returncode == 0
    child = lab.popen_in(FRONT, [sys.executable, "-c", FORWARD, *parts])
    assert child.stdout and child.stdout.readline() == b"passing on\n"
    site = Site(lab)
    site.broken.add(FRONT)  # what runs there is ours
    yield site
    for launch in site.launches:
        with contextlib.suppress(ProcessLookupError):
            launch.kill()
    child.kill()
    child.communicate()


def forwarded(n: int, host: str) -> dict[str, str]:
    place = {"address": FRONT, "ssh": host, "bind": "0.0.0.0"}
    return {**place, "ports": f"{3200 + 10 * n}-{3209 + 10 * n}", "bind_ports": "2200-2209"}


def test_peers_dial_what_is_announced_and_the_ps_listens_where_that_leads(behind: Site):
    behind.cluster(
        run={"engine": "muster", "ps": 1, "workers": 2},
        hosts={PS: {"name": "ps0", **forwarded(0, PS)}, **{host: {"name": host.split(".")[0]} for host in WORKERS}},
    )
    behind.everywhere("train.py", LOOP)
    code, said = behind.ask("check", "-c", "lab.toml", "train.py")
    assert code == 0 and "error" not in said.replace("0 errors", ""), said
    launch = behind.run(LOOP, check=True)
    assert launch.wait() == 0, launch.text()
    plan = launch.run().plan()
    assert (plan.tasks["ps/0"].where, str(plan.tasks["ps/0"].bound)) == (f"{FRONT}:3200", "0.0.0.0:2200")
    assert [event.port for event in launch.events(Listening, task="ps/0")] == [2200]
    for worker in ("worker/0", "worker/1"):
        told = json.loads(launch.log(worker).splitlines()[-1])
        assert told["cluster"]["ps"] == [f"{FRONT}:3200"]
    assert len(launch.events(Joined)) == 2 and launch.run().state(plan).high >= 60


def test_containers_that_share_an_address_are_different_machines(behind: Site):
    """All tasks are announced at ``front``; a worker beside its ps takes the local socket, the other one dials."""
    rows = {host: {"name": host.split(".")[0], **forwarded(n, host)} for n, host in enumerate((PS, WORKERS[0]))}
    behind.cluster(run={"engine": "muster", "ps": 2, "workers": 2}, hosts=rows)
    launch = behind.run(LOOP, check=True)
    assert launch.wait() == 0, launch.text()
    plan = launch.run().plan()
    assert {task.host for task in plan.of("ps")} == {"ps0", "worker0"} == {task.host for task in plan.of("worker")}
    assert len({task.where for task in plan.tasks.values()}) == 4
    assert sorted((event.task, event.port) for event in launch.events(Listening)) == [("ps/0", 2200), ("ps/1", 2200)]


def test_a_port_that_nobody_passes_on_is_named_with_where_it_should_lead(behind: Site):
    wrong = {**forwarded(0, PS), "ports": "3300-3309"}
    behind.cluster(
        run={"engine": "muster", "ps": 1, "workers": 2},
        hosts={PS: {"name": "ps0", **wrong}, **{host: {"name": host.split(".")[0]} for host in WORKERS}},
    )
    behind.everywhere("train.py", LOOP)
    code, said = behind.ask("check", "-c", "lab.toml", "train.py")
    told = " ".join(said.replace("│", " ").split())
    assert code == 1 and f"{FRONT}:3300 to port 2200 of ps0" in told, said


def test_a_host_that_cannot_have_its_address_is_named_before_the_start(behind: Site):
    behind.cluster(
        run={"engine": "muster", "ps": 1, "workers": 2},
        hosts={PS: {"name": "ps0", "address": FRONT, "ssh": PS}, **{h: {"name": h.split(".")[0]} for h in WORKERS}},
    )
    behind.everywhere("train.py", LOOP)
    code, said = behind.ask("check", "-c", "lab.toml", "train.py")
    assert code == 1 and "no interface of that host has" in " ".join(said.split()), said
