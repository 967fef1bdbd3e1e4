"""The check against real machines: healthy ones give no row, planted faults are found where they are, nothing hangs."""

import json
import platform
from collections.abc import Callable
from dataclasses import replace

import pytest

from muster.check import render
from muster.check.findings import Finding, Job

from .faults import Deal, ancient, other_packages
from .lab import SEED, Lab
from .probe_over_ssh import PORT, SCRIPT, check, plan

TENSORFLOW = Job(engine="tensorflow")
PS0, PS1, WORKER0, WORKER1, WORKER2 = SEED
HEALTHY_RUNS = 20


def shown(findings: list[Finding]) -> str:
    return render.text(render.table([], findings), width=160)


@pytest.mark.timeout(600)
def test_healthy_machines_give_no_finding(lab: Lab) -> None:
    wanted = plan(lab)
    for run in range(HEALTHY_RUNS):
        job = TENSORFLOW if run % 2 else Job()
        checked = check(lab, wanted, job)
        assert checked.findings == [], f"run {run}\n{shown(checked.findings)}"
        assert len(checked.survey.pairs.links) == (10 if run % 2 else 6)
    assert list(lab.shared.iterdir()) == []
    assert not any("python" in command for host in SEED for command in lab.processes(host).values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(5))
def test_ten_planted_faults_are_found_on_the_right_host(lab: Lab, seed: int) -> None:
    deal = Deal(lab, plan(lab), seed)
    try:
        checked = check(lab, list(deal.wanted.values()), TENSORFLOW)
    finally:
        deal.close()
    missed = [planted for planted in deal.planted if not planted.found(checked.findings)]
    assert not missed, f"{missed}\n{shown(checked.findings)}"
    explained = [found for planted in deal.planted for found in planted.found(checked.findings)]
    extra = [finding for finding in checked.findings if finding not in explained]
    assert not extra, shown(extra)


@pytest.mark.timeout(120)
def test_sixteen_hosts_all_pairs_in_half_a_minute(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*[f"ps{i}.example.com" for i in range(4)], *[f"worker{i}.example.com" for i in range(12)])
    checked = check(lab, plan(lab), TENSORFLOW)
    assert len(checked.survey.pairs.links) == 120
    assert not [f for f in checked.findings if f.severity != "warning"], shown(checked.findings)
    assert checked.seconds < 30


# --- one at a time: what ssh cannot reach, what firewalls do, what hangs


def rows(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.kind, f.host, f.peer) for f in findings]


def test_each_way_of_not_getting_in_is_told_apart(lab: Lab) -> None:
    wanted = plan(lab)
    lab.crash(PS0)
    lab.power_off(PS1)
    lab.sshd(WORKER0, PubkeyAuthentication="no")
    lab.change_host_key(WORKER1)
    wanted[4] = replace(wanted[4], host="nowhere.example.com")
    checked = check(lab, wanted)
    errors = [(f.kind, f.host) for f in checked.findings if f.severity == "error"]
    assert errors == [
        ("ssh refused", PS0),
        ("ssh no route", PS1),  # on one cable; behind a router it would be a time-out
        ("ssh permission", WORKER0),
        ("ssh key changed", WORKER1),
        ("ssh no name", "nowhere.example.com"),
    ]
    assert [f.host for f in checked.findings if f.severity == "unknown"] == [w.host for w in wanted]
    assert checked.seconds < 12


def test_unknown_host_keys_and_an_open_key_file_give_no_prompt(lab: Lab) -> None:
    wanted = plan(lab)
    lab.known_hosts.write_text("")
    assert {f.kind for f in check(lab, wanted).findings} == {"ssh key unknown", "not asked"}
    lab.key.chmod(0o644)
    lab.ssh_config.write_text(
        lab.ssh_config.read_text().replace("StrictHostKeyChecking yes", "StrictHostKeyChecking no")
    )
    assert {f.kind for f in check(lab, wanted).findings} == {"ssh key too open", "not asked"}


def test_an_sshd_that_hangs_costs_its_own_answers_only(lab: Lab) -> None:
    lab.freeze(PS1)
    checked = check(lab, plan(lab), TENSORFLOW)
    assert [f.host for f in checked.findings] == [PS1, PS1]
    assert len(checked.survey.pairs.links) == 6
    assert checked.seconds < 30


def test_an_sshd_that_is_too_busy_is_asked_again(lab: Lab) -> None:
    lab.sshd(PS0, MaxStartups="1:100:1", LoginGraceTime="1")
    program = f"import socket, time; s = socket.create_connection(('{PS0}', 22)); print(flush=True); time.sleep(30)"
    child = lab.popen_in(WORKER0, ["python3", "-c", program])
    assert child.stdout is not None and child.stdout.readline() == b"\n"
    assert rows(check(lab, plan(lab)).findings) == []
    child.kill()
    child.communicate()


def test_firewalls_that_drop_and_that_reject(lab: Lab) -> None:
    """NW-04: told apart."""
    ports = ["-p", "tcp", "--dport", str(PORT)]
    lab.run_in(PS0, ["iptables", "-A", "INPUT", "-s", lab.address(WORKER0), *ports, "-j", "DROP"])
    lab.run_in(PS1, ["iptables", "-A", "INPUT", *ports, "-j", "REJECT"])
    findings = check(lab, plan(lab)).findings
    assert rows(findings) == [("filtered", PS0, WORKER0), ("refused", PS1, "")]
    assert f"ufw allow from {lab.address(WORKER0)} to any port {PORT}" in findings[0].try_


def test_a_cut_is_named_though_nobody_dials_workers(lab: Lab) -> None:
    """Muster's own workers have no port that anybody dials: one is opened to learn which way is cut."""
    lab.cut(WORKER0, PS0)
    lab.cut(PS1, WORKER1)
    lab.cut(WORKER2, PS0)
    lab.cut(PS0, WORKER2)
    wanted = [replace(w, ports={}) if "worker" in w.host else w for w in plan(lab)]
    found = check(lab, wanted).findings
    told = {(f.kind, *(sorted((f.host, f.peer)) if f.kind == "cut" else (f.host, f.peer))) for f in found}
    assert told == {
        ("cut one way", WORKER0, PS0),
        ("cut one way", PS1, WORKER1),
        ("cut", PS0, WORKER2),
    }, shown(found)
    assert len(found) == 3


def test_a_host_that_dies_during_the_check(lab: Lab) -> None:
    """Its answers so far are kept, and what it did not answer is said."""
    wanted = plan(lab)

    def progress(text: str) -> None:
        if "measuring" in text:
            lab.power_off(WORKER2)

    checked = check(lab, wanted, TENSORFLOW, progress=progress)
    assert ("broke off", WORKER2, "") in rows(checked.findings), shown(checked.findings)
    assert {f.host for f in checked.findings if f.severity != "unknown"} == {WORKER2}
    assert checked.seconds < 30


def test_scripts_and_pythons_of_each_host(lab: Lab) -> None:
    wanted = plan(lab)
    (lab.private(WORKER0) / SCRIPT).unlink()
    (lab.private(WORKER1) / SCRIPT).write_text("import tensorflow as tf\nprint 'x'\n")
    found = {f.host: f for f in check(lab, wanted).findings}
    assert {f.kind for f in found.values()} == {"script"} and set(found) == {WORKER0, WORKER1}
    assert "line 2" in found[WORKER1].because


def test_versions_and_platforms_of_each_host(lab: Lab) -> None:
    """EN-06, EN-07, EN-08, EN-09: another protobuf, a script that fits with Keras 3, a TensorFlow before 2.4 and an ARM
    machine, each said once; and all that every host has, in JSON."""
    wanted = plan(lab)
    for host in SEED:
        (lab.private(host) / SCRIPT).write_text("import keras\n\nkeras.Sequential().fit([0], [0])\n")
    wanted[1] = replace(wanted[1], python=other_packages(lab, PS1, tensorflow_cpu="2.1.0", keras="2.2.4"))
    wanted[2] = replace(wanted[2], python=other_packages(lab, WORKER0, protobuf="3.20.3"))
    shim = lab.private(WORKER1) / "bin" / "uname"
    shim.parent.mkdir()
    shim.write_text('#!/bin/sh\n[ "$1" = -m ] && echo aarch64\n')
    shim.chmod(0o755)
    lab.environ(WORKER1, PATH=f"{lab.home}/bin:/usr/local/bin:/usr/bin:/bin")
    checked = check(lab, wanted, Job(engine="tensorflow", kind="pss"))
    rows = {(f.severity, f.kind, f.host): f for f in checked.findings}
    assert set(rows) == {
        ("error", "kind", PS1),
        ("error", "legacy keras", PS0),
        ("warning", "protobuf", WORKER0),
        ("warning", "machine", WORKER1),
    }, shown(checked.findings)
    assert len(rows) == len(checked.findings)
    assert "needs 2.4+" in rows["error", "kind", PS1].what
    keras = rows["error", "legacy keras", PS0]
    assert f"{SCRIPT}, line 3 calls fit" in keras.because and WORKER2 in keras.because
    assert "TF_USE_LEGACY_KERAS" in keras.try_
    assert "protobuf 3.20.3" in rows["warning", "protobuf", WORKER0].what
    assert "aarch64" in rows["warning", "machine", WORKER1].because
    told = json.loads(render.as_json(checked.findings, heard=checked.survey.facts))["hosts"]
    assert [told[host]["machine"] for host in (WORKER0, WORKER1)] == [platform.machine(), "aarch64"]
    assert [told[host]["packages"]["protobuf"] == "3.20.3" for host in SEED] == [False, False, True, False, False]
    assert {told[host]["system"] for host in SEED} == {"Linux"} and all(told[host]["libc"] for host in SEED)
    assert all(told[host]["python"] == platform.python_version() for host in SEED)


@pytest.mark.skipif(not ancient(), reason="no old Python here")
def test_a_python_of_another_age_still_says_which_one_it_is(lab: Lab) -> None:
    wanted = plan(lab)
    for index, path in enumerate(ancient()[:2]):
        wanted[index] = replace(wanted[index], python=path)
    findings = check(lab, wanted, TENSORFLOW).findings
    assert {(f.kind, f.host) for f in findings} == {
        ("python", w.host) for w, _ in zip(wanted, ancient()[:2], strict=False)
    }
    assert all("too old" in f.what for f in findings)
