"""``muster check`` as a user runs it: one cluster file, the user's ssh, from a machine that trains nothing."""

import json
import subprocess
import sys

import pytest

from .lab import SEED, Lab

PS0, PS1, WORKER0, WORKER1, WORKER2 = SEED
SEATS = "ps = [{}]\nworkers = [{}]\n".format(
    ", ".join(f'"{host}:2222"' for host in SEED[:2]), ", ".join(f'"{host}:2222"' for host in SEED[2:])
)


def cluster_file(lab: Lab) -> str:
    hosts = "".join(
        f'[[hosts]]\nname = "{h}"\naddress = "{h}"\nssh = "{h}"\npython = "{sys.executable}"\ncwd = "{lab.home}"\n\n'
        for h in lab.names
    )
    head = f'name = "lab"\nlauncher = "ssh"\nssh_config = "{lab.ssh_config}"\n\n'
    run = f'[run]\nengine = "tensorflow"\nkind = "v1"\ncheckpoints = "{lab.shared}"\n{SEATS}'
    (lab.private("ctl") / "cluster.toml").write_text(head + hosts + run)
    return str(lab.home / "cluster.toml")


def muster_check(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "muster", "check", "-c", cluster_file(lab), *words]
    return lab.run_in("ctl", argv, cwd=lab.home, timeout=90)


@pytest.mark.timeout(120)
def test_a_healthy_cluster_is_exit_0_and_a_fault_is_exit_1_with_its_row(lab: Lab) -> None:
    for host in (*SEED, "ctl"):
        (lab.private(host) / "train.py").write_text("print('hello')\n")
    done = muster_check(lab, "train.py")
    assert (done.returncode, "5 hosts are fit" in done.stdout) == (0, True), done.stdout + done.stderr
    lab.set_name(PS1, PS1, "127.0.1.1")
    lab.cut(WORKER0, PS0)
    done = muster_check(lab, "--json", "train.py")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["ok"] is False
    assert {(f["kind"], f["host"], f["peer"]) for f in told["findings"]} == {
        ("loopback name", PS1, ""),
        ("cut one way", WORKER0, PS0),
    }
    assert told["slowest"]["parameters"] == 1_000_000
