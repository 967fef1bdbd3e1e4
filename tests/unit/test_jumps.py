"""Few logins at one moment through the same sshd: what ``ssh -G`` tells, and who has to wait."""

import os
import threading
from typing import Any

import msgspec
import pytest

from muster.check.findings import Wanted
from muster.check.survey import survey
from muster.cluster import Cluster, Host
from muster.launch.jumps import AT_ONE_SSHD, Turns, doors, room, ways

JUMP = "user ana\nhostname 10.0.0.5\nport 2200\nproxyjump {}\n"
HOSTS = [f"h{n}" for n in range(12)]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("hostname a\nport 22\n", ["a:22"]),
        (JUMP.format("gate"), ["gate", "10.0.0.5:2200"]),
        (JUMP.format("bo@gate:2222,ssh://ana@inner"), ["gate:2222", "inner", "10.0.0.5:2200"]),
        (JUMP.format("none"), ["10.0.0.5:2200"]),
        ("hostname a\nport 22\nproxycommand ssh -W %h:%p gate\n", ["ssh -W %h:%p gate", "a:22"]),
        ("", []),
    ],
)
def test_the_doors_that_a_login_meets(told: str, found: list[str]) -> None:
    assert doors(told) == found


@pytest.fixture
def fake_ssh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """h0 to h7 behind a gate, h8 direct, h9 and h10 two names of one machine, h11 of which ssh knows nothing."""
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\nfor word; do :; done\ncase $word in\n"
        'h[0-7]) printf "hostname %s\\nport 22\\nproxyjump gate\\n" $word;;\n'
        'h8) printf "hostname h8\\nport 22\\n";;\nh9|h10) printf "hostname one\\nport 22\\n";;\n*) exit 255;;\nesac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


CLUSTER = Cluster(launcher="ssh", hosts=[Host(name=name, address=name) for name in HOSTS])


def test_only_doors_that_several_meet_count(fake_ssh: None) -> None:
    found = ways(CLUSTER, CLUSTER.hosts)
    assert found == {
        **{f"h{n}": ["gate"] for n in range(8)}, "h8": [], "h9": ["one:22"], "h10": ["one:22"], "h11": []
    }  # fmt: skip
    assert ways(CLUSTER, CLUSTER.hosts[:AT_ONE_SSHD]) == {}
    assert ways(msgspec.structs.replace(CLUSTER, launcher="local"), CLUSTER.hosts) == {}


def test_without_ssh_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert set(map(tuple, ways(CLUSTER, CLUSTER.hosts).values())) == {()}


def test_room_is_per_door() -> None:
    given = {f"h{n}": ["gate"] for n in range(8)} | {"h8": [], "h9": ["gate", "inner"]}
    three, four = HOSTS[:3], HOSTS[:4]
    assert room(given, "h7", three) and not room(given, "h7", four)
    assert room(given, "h8", four) and room({}, "h7", HOSTS)
    assert not room(given, "h9", four) and not room({**given, "h5": ["inner"] * 4}, "h9", ["h5"])


class Door:
    """A host whose login waits until as many are under way as can be, or until no more come; it counts them."""

    lock, now, most = threading.Condition(), 0, 0

    def ask(self, request: Any, within: float) -> dict[str, Any]:
        if request["ask"] == "clock" and not hasattr(self, "known"):
            self.known = True
            with Door.lock:
                Door.now += 1
                Door.most = max(Door.most, Door.now)
                Door.lock.notify_all()
                Door.lock.wait_for(lambda: Door.most > AT_ONE_SSHD, timeout=0.1)
                Door.now -= 1
        return {"now": 0.0}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("behind", ["gate", ""])
def test_a_check_goes_through_a_jump_host_a_few_at_a_time(behind: str) -> None:
    Door.now = Door.most = 0
    wanted = [Wanted(name, "127.0.0.1", "python") for name in HOSTS]
    turns = Turns({name: [behind] for name in HOSTS} if behind else {})
    heard = survey(wanted, lambda w: Door(), pairs=False, turn=turns.take)
    assert set(heard.facts) == set(HOSTS) and not any("failure" in told for told in heard.facts.values())
    assert Door.most == AT_ONE_SSHD if behind else Door.most > AT_ONE_SSHD
