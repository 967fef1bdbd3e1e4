"""The check against real machines: healthy ones give no row, planted faults are found where they are, nothing hangs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from muster.check import render
from muster.check.findings import Finding, Job

from .faults import Deal, other_pythons
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
