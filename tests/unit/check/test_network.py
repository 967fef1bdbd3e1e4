"""From outcomes of pairs to rows: which way is cut, whose fault it is, what a slow link costs."""

from dataclasses import replace
from typing import Any

import pytest

from muster.check.findings import Finding, Job, Link, Need, Pairs, Reach, Wanted, needs
from muster.check.network import agreed, blame, doubtful, judged, step
from muster.check.verdicts import judge, slowest
from muster.check.view import View

TENSORFLOW = Job(engine="tensorflow")
HOSTS = ("a", "b", "c", "d")
TASKS = ("ps/0", "ps/1", "worker/0", "worker/1")
WANTED = tuple(
    Wanted(host, f"10.0.0.{index + 1}", "python", ports={task: 2222}, tasks=(task,))
    for index, (host, task) in enumerate(zip(HOSTS, TASKS, strict=True))
)
ADDRESS = {w.host: w.address for w in WANTED}
GOOD = Link("a", "b", 0.2, 0.5, 0.15, 200, 0.0, 0.0, 1200, 900.0, 900.0)
FACTS: dict[str, dict[str, Any]] = {host: {"python": {"version": "3.11.7", "executable": "python"}} for host in HOSTS}


def facts(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    packages = {"packages": {"tensorflow": "2.21.0", "numpy": "2.4.6"}}
    return {host: {**FACTS[host], **packages, **more.get(host, {})} for host in HOSTS}


def pairs(outcomes: dict[tuple[str, str], str], job: Job = TENSORFLOW, spare: tuple[Reach, ...] = ()) -> Pairs:
    reaches = tuple(Reach(need, outcomes.get((need.src, need.dst), "ok")) for need in needs(WANTED, job))
    return Pairs((*reaches, *spare))


def rows(outcomes: dict[tuple[str, str], str], job: Job = TENSORFLOW, spare: Any = (), **more: Any) -> list[Finding]:
    return judge(WANTED, facts(**more), pairs(outcomes, job, spare), job)


def test_who_dials_whom() -> None:
    assert len(needs(WANTED, TENSORFLOW)) == 12
    assert {(n.src, n.dst) for n in needs(WANTED, Job())} == {("c", "a"), ("c", "b"), ("d", "a"), ("d", "b")}


def test_all_reached_is_no_row() -> None:
    assert rows({}) == [] and rows({}, Job()) == []


def test_the_direction_that_is_cut_is_named_by_who_heard_whom() -> None:
    both = {("a", "c"): "timeout", ("c", "a"): "timeout"}
    (finding,) = rows(both, a={"half_open": [ADDRESS["c"]]})
    assert (finding.kind, finding.host, finding.peer) == ("cut one way", "a", "c")
    assert finding.what == "nothing that a sends reaches c"
    (finding,) = rows(both, c={"half_open": [ADDRESS["a"]]})
    assert (finding.kind, finding.host, finding.peer) == ("cut one way", "c", "a")
    (finding,) = rows(both)
    assert (finding.kind, {finding.host, finding.peer}) == ("cut", {"a", "c"})


def test_a_firewall_lets_us_out_but_not_in() -> None:
    (finding,) = rows({("a", "c"): "timeout"})
    assert (finding.kind, finding.host, finding.peer) == ("filtered", "c", "a")
    assert "ufw allow from 10.0.0.1 to any port 2222" in finding.try_


def test_a_worker_that_nobody_dials_is_dialled_to_learn_which_way() -> None:
    def spare(outcome: str) -> tuple[Reach, ...]:
        return (Reach(Need("a", "c", "", ADDRESS["c"], 40001), outcome),)

    lost = {("c", "a"): "timeout"}
    (finding,) = rows(lost, Job(), spare("timeout"), c={"half_open": [ADDRESS["a"]]})
    assert (finding.kind, finding.host, finding.peer) == ("cut one way", "c", "a")
    (finding,) = rows(lost, Job(), spare("ok"))
    assert (finding.kind, finding.host) == ("filtered", "a")
    assert rows({}, Job(), spare("timeout")) == [], "what nobody needs is no row"


def test_refused_no_route_and_a_stranger_are_told_apart() -> None:
    for outcome in ("refused", "no_route", "wrong", "EPERM"):
        (finding,) = rows({("a", "c"): outcome})
        assert (finding.kind, finding.host, finding.peer) == (outcome, "c", "a")


def test_a_host_that_is_cut_off_from_all_is_one_row() -> None:
    outcomes = {pair: "timeout" for h in "abd" for pair in (("c", h), (h, "c"))}
    (finding,) = rows(outcomes)
    assert (finding.host, finding.peer) == ("c", "")
    everything = {(x, y): "timeout" for x in HOSTS for y in HOSTS}
    assert len(rows(everything)) == 6, "no host to blame: each pair is told"


def test_what_has_a_row_already_is_not_told_again_for_each_peer() -> None:
    taken = {
        "ports": {"2222": {"free": False, "error": "EADDRINUSE", "holder": None}},
        "listen": {"errors": {"2222": "EADDRINUSE"}},
    }
    outcomes = {(host, "a"): "refused" for host in "bcd"}
    assert [(f.host, f.kind) for f in rows(outcomes, a=taken)] == [("a", "port")]


def test_a_name_at_loopback_explains_why_nobody_gets_in() -> None:
    wanted = (replace(WANTED[0], address="a.example.com"), *WANTED[1:])
    told = facts()
    for host in HOSTS:
        told[host]["names"] = {"own": host, "found": {"a.example.com": ["127.0.1.1" if host == "a" else "10.0.0.1"]}}
    reaches = tuple(Reach(n, "refused" if n.dst == "a" else "ok") for n in needs(wanted, TENSORFLOW))
    assert [(f.host, f.kind) for f in judge(wanted, told, Pairs(reaches), TENSORFLOW)] == [("a", "loopback name")]


# --- links


def link_rows(*links: Link) -> list[Finding]:
    return judge(WANTED, facts(), Pairs((), links), TENSORFLOW)


def links_of(bad: dict[tuple[str, str], Link]) -> list[Link]:
    every = [(x, y) for index, x in enumerate(HOSTS) for y in HOSTS[index + 1 :]]
    return [replace(bad.get(pair, GOOD), a=pair[0], b=pair[1]) for pair in every]


LOSSY = replace(GOOD, loss_back=0.01)
SLOW = replace(GOOD, rtt_p50=50.0, rtt_min=49.0)


def test_good_links_are_no_row() -> None:
    assert link_rows(*links_of({})) == []


def test_one_bad_link_names_the_pair_its_figures_and_its_cost() -> None:
    (finding,) = link_rows(*links_of({("a", "c"): replace(SLOW, loss_forth=0.012, mbit_back=3.0)}))
    assert (finding.severity, finding.host, finding.peer, finding.kind) == ("error", "a", "c", "link")
    assert "50 ms round trip" in finding.because and "1.2% lost from a to c" in finding.because
    assert "a step of a model of 1,000,000 parameters takes 5.4 s" in finding.because


def test_a_host_whose_links_are_all_bad_is_one_row() -> None:
    (finding,) = link_rows(*links_of({("a", "c"): LOSSY, ("b", "c"): LOSSY, ("c", "d"): LOSSY}))
    assert (finding.host, finding.peer) == ("c", "")
    assert len(link_rows(*links_of(dict.fromkeys([(x, y) for x in HOSTS for y in HOSTS], SLOW)))) == 6


def test_chance_and_busy_hosts_are_no_row() -> None:
    assert judged(replace(GOOD, loss_forth=2 / 1200)) is None
    assert judged(replace(GOOD, loss_forth=1.0, segments=3)) is None, "three segments prove nothing"
    assert judged(replace(GOOD, rtt_p50=8.0, rtt_min=0.05)) is None, "the wire is fast, the host was busy"
    assert judged(replace(GOOD, mbit_back=90.0)) is not None


def test_a_link_that_was_not_measured_is_unknown() -> None:
    (finding,) = link_rows(Link("a", "c", error="time was up"))
    assert (finding.severity, finding.peer) == ("unknown", "c")


def test_looks_together_keep_the_best_figures_and_the_middle_loss() -> None:
    both = agreed([replace(SLOW, mbit_forth=100.0), replace(GOOD, loss_forth=0.01, mbit_forth=90.0)])
    assert (both.rtt_p50, both.mbit_forth, both.loss_forth, both.segments) == (0.2, 100.0, 0.0, 1200)
    assert agreed([GOOD, Link("a", "b", error="time was up")]) == GOOD
    three = [
        replace(GOOD, loss_back=loss, mbit_back=mbit) for loss, mbit in ((0.02, 150.0), (0.0, 90.0), (0.004, 300.0))
    ]
    assert (agreed(three).loss_back, agreed(three).mbit_back) == (0.004, 300.0)
    assert agreed([Link("a", "b", error="time was up")]).error


NARROW, LOSSY = replace(GOOD, mbit_back=90.0), replace(GOOD, loss_forth=0.01)
LATE = Link("a", "b", error="time was up")


@pytest.mark.parametrize(
    ("looks", "again", "kinds"),
    [
        ([GOOD], False, None),
        ([NARROW], True, ("mbit",)),
        ([LOSSY], True, ("loss",)),
        ([NARROW, GOOD], False, None),
        ([NARROW, NARROW], True, ("mbit",)),  # both ends may have been busy twice
        ([NARROW, NARROW, GOOD], False, None),
        ([NARROW, NARROW, NARROW], False, ("mbit",)),
        ([LOSSY, GOOD], False, None),
        ([GOOD, LOSSY], True, None),
        ([LOSSY, LOSSY], False, ("loss",)),
        ([NARROW, LOSSY], True, None),  # one look says this, the next says that
        ([NARROW, LATE], False, ("mbit",)),
        ([LATE], False, None),
    ],
)
def test_a_finding_needs_looks_that_agree(looks: list[Link], again: bool, kinds: tuple[str, ...] | None) -> None:
    verdict = judged(agreed(looks))
    assert (doubtful(looks), verdict.kinds if verdict else None) == (again, kinds)


def test_a_planted_fault_is_bad_in_every_look() -> None:
    planted = replace(GOOD, rtt_p50=50.0, rtt_min=49.8, loss_back=0.01, mbit_forth=9.0, mbit_back=7.0)
    busy = replace(planted, rtt_p50=61.0, loss_back=0.012)
    assert not doubtful([busy]), "even the fastest ping took 50 ms"
    assert doubtful([replace(busy, pings=20)]), "and there were many"
    verdict = judged(agreed([busy, planted]))
    assert verdict and verdict.kinds == ("rtt ms", "loss", "mbit") and verdict.link.rtt_p50 == 50.0


def test_step_time_of_ps_and_ring() -> None:
    view = View(WANTED, {}, Pairs(), Job(parameters=10_000_000))
    # 40 MB over 2 ps: 20 MB each way at 900 Mbit/s, and a round trip
    assert step(view, GOOD) == 0.0002 + 2 * 160 / 900
    ring = View(WANTED, {}, Pairs(), Job(engine="tensorflow", kind="mwms", parameters=10_000_000))
    assert abs((step(ring, GOOD) or 0) - (0.0002 + 320 / 900)) < 1e-9


def test_the_slowest_link_is_named() -> None:
    worst = slowest(WANTED, Pairs((), tuple(links_of({("b", "d"): replace(GOOD, mbit_forth=100.0)}))))
    assert worst is not None and (worst.link.a, worst.link.b) == ("b", "d")
    assert "b - d" in str(worst) and "1,000,000 parameters" in str(worst) and "middle" in str(worst)
    assert slowest(WANTED, Pairs()) is None


def test_blame_falls_on_the_host_that_explains_most() -> None:
    everyone = {ps: set("cde") for ps in "ab"} | {worker: set("ab") for worker in "cde"}
    told = blame([("c", "b"), ("d", "b"), ("e", "b"), ("c", "a")], everyone)
    assert {"".join(sorted(pair)): host for pair, host in told.items()} == {"bc": "b", "bd": "b", "be": "b", "ac": ""}
    assert blame([("a", "b")], {"a": {"b"}, "b": {"a"}}) == {frozenset("ab"): ""}
