"""The lab itself: what it promises about machines, names, faults and leaving nothing behind."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .lab import FOLDERS, SEED, Lab, _born, sweep

PS0, PS1, WORKER0 = SEED[:3]


def ssh(lab: Lab, host: str, command: str, timeout: float = 20) -> "subprocess.CompletedProcess[str]":
    return lab.run_in("ctl", ["ssh", "-F", str(lab.ssh_config), "--", host, command], timeout=timeout)


DIAL = """
import socket, sys, time
def once():
    began = time.monotonic()
    socket.create_connection((sys.argv[1], 22), 5).close()
    return (time.monotonic() - began) * 1000
print(min(once() for _ in range(7)))
"""


def dial_ms(lab: Lab, host: str, peer: str) -> float:
    """Milliseconds that a connection from ``host`` to ``peer``'s sshd takes, one round trip; the best of several, since
    this computer has other things to do. Infinite if the first one does not come through."""
    done = lab.run_in(host, [sys.executable, "-c", DIAL, peer])
    return float(done.stdout) if done.returncode == 0 else float("inf")


def test_every_machine_has_its_own_name_address_and_processes(lab: Lab) -> None:
    for host in SEED:
        told = ssh(lab, host, f"hostname; getent hosts {host}; cat /proc/1/comm; pwd").stdout.split("\n")
        assert told[0] == host
        assert told[1].split() == [lab.address(host), host]
        assert told[2:4] == ["sshd", str(lab.home)]


def test_home_is_private_and_shared_is_not(lab: Lab) -> None:
    ssh(lab, PS0, f"echo a > {lab.home}/mine; echo b > {lab.shared}/ours; echo c > /tmp/muster-lab-trace")
    assert (lab.private(PS0) / "mine").read_text() == "a\n"
    assert ssh(lab, PS1, f"cat {lab.home}/mine").returncode == 1
    assert ssh(lab, PS1, f"cat {lab.shared}/ours").stdout == "b\n"
    assert not Path("/tmp/muster-lab-trace").exists()
    lab.unshare_folder(PS1)
    assert ssh(lab, PS1, f"ls {lab.shared}").stdout == ""


def test_a_name_can_mean_something_else_on_one_machine(lab: Lab) -> None:
    lab.set_name(PS0, PS0, "127.0.1.1")
    lab.set_name(PS1, PS0, None)
    assert ssh(lab, PS0, f"getent hosts {PS0}").stdout.split()[0] == "127.0.1.1"
    assert ssh(lab, PS1, f"getent hosts {PS0}").returncode == 2
    assert ssh(lab, WORKER0, f"getent hosts {PS0}").stdout.split()[0] == lab.address(PS0)


def test_delay_from_one_peer_only(lab: Lab) -> None:
    lab.delay(PS0, 50, peer=PS1)
    assert 50 <= dial_ms(lab, PS0, PS1) < 75
    assert 50 <= dial_ms(lab, PS1, PS0) < 75
    assert dial_ms(lab, PS0, WORKER0) < 25
    lab.calm(PS0)
    assert dial_ms(lab, PS0, PS1) < 25


def test_total_loss_is_a_cut_and_rate_slows_a_copy(lab: Lab) -> None:
    lab.rate(PS0, 20)
    began = time.monotonic()
    assert ssh(lab, PS0, "head -c 2000000 /dev/zero").returncode == 0
    assert time.monotonic() - began > 0.6  # 16 Mbit at 20 Mbit/s
    lab.rate(PS0, None)
    lab.delay(PS1, 0, loss=100)
    assert ssh(lab, PS1, "true").returncode == 255


def test_a_cut_has_one_direction(lab: Lab) -> None:
    lab.cut(PS0, PS1)
    count = ["iptables", "-L", "INPUT", "-v", "-n", "-x"]
    assert dial_ms(lab, WORKER0, PS1) < 25
    assert dial_ms(lab, PS0, PS1) == float("inf")
    assert "DROP" in lab.run_in(PS1, count).stdout
    assert "DROP" not in lab.run_in(PS0, count).stdout
    lab.mend(PS0, PS1)
    assert dial_ms(lab, PS0, PS1) < 1000


def test_power_off_is_silent_and_power_on_brings_it_back(lab: Lab) -> None:
    child = lab.popen_in("ctl", ["ssh", "-F", str(lab.ssh_config), "--", PS0, "echo up; exec sleep 60"])
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    lab.power_off(PS0)
    with pytest.raises(subprocess.TimeoutExpired):  # no FIN, no RST: the client knows nothing
        child.wait(0.5)
    child.kill()
    child.communicate()
    assert lab.processes(PS0) == {}
    lab.power_on(PS0)
    assert ssh(lab, PS0, "hostname").stdout == PS0 + "\n"


def test_a_crash_says_goodbye(lab: Lab) -> None:
    child = lab.popen_in("ctl", ["ssh", "-F", str(lab.ssh_config), "--", PS0, "echo up; exec sleep 60"])
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    lab.crash(PS0)
    child.communicate(timeout=5)
    assert child.returncode == 255


def test_clock_environ_and_sshd_options_reach_every_command(lab: Lab) -> None:
    lab.clock(PS0, 300)
    program = "import time; print(time.time())"
    ahead = float(ssh(lab, PS0, f"{sys.executable} -c '{program}'").stdout) - time.time()
    assert 295 < ahead < 305
    lab.environ(PS1, https_proxy="http://127.0.0.1:9")
    assert ssh(lab, PS1, "echo $https_proxy").stdout == "http://127.0.0.1:9\n"
    lab.sshd(PS1, PubkeyAuthentication="no")
    assert "Permission denied" in ssh(lab, PS1, "true").stderr


def test_a_changed_host_key_is_refused(lab: Lab) -> None:
    lab.change_host_key(PS0)
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(lab, PS0, "true").stderr


def test_two_labs_side_by_side_and_nothing_left(make_lab: Callable[..., Lab]) -> None:
    first, second = Lab(["a", "b"]), Lab(["a", "b"])
    with first, second:
        sleeper = first.popen_in("ctl", ["sleep", "60"])
        (first.private("a") / "x").write_text("1")
        assert ssh(second, "a", f"cat {second.home}/x").returncode == 1
        pids = [machine.pid for lab in (first, second) for machine in lab._machines.values()]
        first.delay("a", 1)
    sleeper.communicate(timeout=5)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert first.prefix + "-" not in spaces and second.prefix + "-" not in spaces
    assert not first.folder.exists() and not second.folder.exists()
    assert not [pid for pid in pids if _born(pid)]


def test_a_lab_whose_owner_was_killed_is_swept(make_lab: Callable[..., Lab]) -> None:
    program = Path(__file__).with_name("lab.py")
    owner = subprocess.Popen([sys.executable, str(program), "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline().startswith(b"machines")
    left = [
        folder for folder in FOLDERS.glob("muster-lab-*") if (folder / "owner").read_text().startswith(f"{owner.pid} ")
    ]
    owner.kill()
    owner.communicate()
    sweep()
    assert left and not left[0].exists()
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert left[0].name.removeprefix("muster-lab-") + "-" not in spaces
