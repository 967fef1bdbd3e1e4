import pytest
from making import after, dies, make, started

from muster.cluster import Host
from muster.events import Exited, Frozen, Listening, PortTaken, Ready, Released, Started, Step, Stopping
from muster.placement import Facts
from muster.waits import waits

PLAN = make(ps=1, workers=2)


def listen(*tasks, at=1.0):
    return [Listening(at, name, 1, 1) for name in tasks]


def only(plan, now, *events, facts=None):
    (wait,) = waits(after(plan, *events), now, plan, facts)
    return wait


def test_short_waits_are_not_worth_a_word():
    assert waits(after(PLAN, started(PLAN), listen("worker/0")), 4.9, PLAN) == []
    assert waits(after(PLAN, started(PLAN)), 4.9, PLAN) == []


@pytest.mark.parametrize(
    ("events", "now", "why"),
    [
        ([], 9.0, "started 9 s ago and not listening yet; importing TensorFlow takes a few seconds"),
        ([], 30.0, "started 30 s ago and not listening yet; does its script make a Server?"),
        ([Frozen(2.0, "ps/0", 1)], 9.0, "it is frozen (SIGSTOP, pid 1)"),
        ([PortTaken(2.0, "ps/0", 1, 20000, 7, "pid 7 (nc)")], 9.0, "port 20000 is held by pid 7 (nc)"),
        ([dies("ps/0", 2.0, trace="T\nE: x")], 9.0, "it ended (E: x); it is started again in 0 s"),
        ([dies("ps/0", 8.5, code=-9)], 14.0, "it ended (signal 9); it is started again in 0 s"),
        ([Stopping(2.0, "ps/0", 1)], 9.0, "it is being ended"),
        ([Stopping(2.0, "ps/0", 1), Exited(3.0, "ps/0", 1, -15)], 9.0, "it is being ended"),
    ],
)
def test_a_worker_waits_for_a_ps_that_is_not_there(events, now, why):
    """NW-01, SL-13: who, for whom, where, since when, and the likeliest reason."""
    wait = only(PLAN, now, started(PLAN), listen("worker/0", "worker/1"), events)
    assert (wait.who, wait.whom) == (("worker/0", "worker/1"), ("ps/0",))
    assert wait.where == ("here, 127.0.0.1:20000",)
    assert wait.why == why


def test_the_sentence_has_all_of_it():
    said = only(PLAN, 9.0, started(PLAN), listen("worker/0", "worker/1")).text(9.0)
    assert said.startswith("worker/0, worker/1 wait for ps/0 (here, 127.0.0.1:20000), 9 s so far: started 9 s ago")


def test_waits_for_the_same_reason_are_one_row():
    plan = make(ps=6, workers=1)
    wait = only(plan, 9.0, started(plan), listen("worker/0"))
    assert wait.whom == tuple(f"ps/{n}" for n in range(6))
    assert " and 1 more, 9 s so far" in wait.text(9.0)


def test_the_chief_that_does_not_initialise_is_named():
    """CD-06."""
    wait = only(PLAN, 9.0, started(PLAN), listen(*PLAN.tasks))
    assert (wait.who, wait.whom) == (("worker/1",), ("worker/0",))
    assert wait.why == "it is up and has not initialised the variables yet"


def test_a_chief_that_never_came_up_is_named():
    """CD-06."""
    plan = make(ps=1, workers=1, chief=True)
    wait = only(plan, 9.0, started(plan), listen("ps/0", "worker/0"))
    assert (wait.who, wait.whom) == (("worker/0",), ("chief/0",)) and "not listening yet" in wait.why


def test_the_one_that_everybody_waits_for_at_the_barrier_is_named():
    """NW-02."""
    ready = [Ready(8.0, "worker/0", 1)]
    wait = only(PLAN, 14.0, started(PLAN), listen(*PLAN.tasks), ready)
    assert (wait.who, wait.whom, wait.since) == (("worker/0",), ("worker/1",), 8.0)
    assert wait.why == "it has not reached the start barrier: it listens, and has made no session in 14 s"


def test_a_task_that_nobody_is_up_to_wait_for_keeps_the_run_waiting():
    wait = only(PLAN, 9.0, started(PLAN), listen("ps/0"))
    assert wait.who == ("the run",) and wait.whom == ("worker/0", "worker/1")


def test_one_that_does_not_reach_the_others_is_told_of_proxies_names_and_firewalls():
    """NW-01, NW-05, NW-07."""
    hosts = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]
    plan = make(hosts, None, "ssh", ps=1, workers=1)
    events = [started(plan), listen(*plan.tasks)]
    name = {"a": "a is 127.0.1.1 in its own hosts file"}
    assert waits(after(plan, *events), 14.0, plan) == []
    assert "a firewall, or an address" in only(plan, 16.0, *events).why
    proxied = {"b": Facts(proxies={"grpc_proxy": "http://p"})}
    assert only(plan, 16.0, *events, facts=proxied).why.startswith("grpc_proxy is set for worker/0")
    assert only(plan, 16.0, *events, facts={"a": Facts(own_name=name["a"])}).why == name["a"]


@pytest.mark.parametrize(
    ("run", "up", "who", "whom"),
    [
        ({"kind": "mwms", "workers": 2}, ["worker/0"], ("worker/0",), ("worker/1",)),
        ({"kind": "pss", "ps": 1, "workers": 1}, ["chief/0", "ps/0"], ("chief/0",), ("worker/0",)),
        ({"engine": "muster", "ps": 1, "workers": 1}, ["worker/0"], ("worker/0",), ("ps/0",)),
    ],
)
def test_each_kind_needs_others(run, up, who, whom):
    """NW-01."""
    plan = make(**run)
    wait = only(plan, 9.0, started(plan), listen(*up))
    assert (wait.who, wait.whom) == (who, whom)


def test_nobody_waits_once_there_are_steps():
    steps = [Step(3.0, name, 1, 1, 1) for name in ("worker/0", "worker/1")]
    assert waits(after(PLAN, started(PLAN), listen(*PLAN.tasks), steps), 60.0, PLAN) == []


def test_a_peer_that_has_ended_well_is_not_waited_for():
    """NW-02."""
    events = [started(PLAN), listen(*PLAN.tasks), Exited(2.0, "worker/0", 1, 0), Ready(3.0, "worker/1", 1)]
    assert waits(after(PLAN, *events, Released(3.0, "worker/1", 1)), 60.0, PLAN) == []


def test_a_restarted_task_waits_since_its_own_start():
    again = [dies("worker/0", 50.0), Started(51.0, "worker/0", 2)]
    state = after(PLAN, started(PLAN), listen("ps/0"), again, Listening(52.0, "worker/0", 2, 1))
    assert all(wait.since >= 51.0 for wait in waits(state, 60.0, PLAN) if "worker/0" in wait.who)


def test_the_event_of_a_wait_says_the_same():
    event = only(PLAN, 9.0, started(PLAN), listen("worker/0", "worker/1")).event(9.0)
    assert (event.who, event.whom, event.where, event.since) == (
        "worker/0, worker/1",
        "ps/0",
        "here, 127.0.0.1:20000",
        0.0,
    )
