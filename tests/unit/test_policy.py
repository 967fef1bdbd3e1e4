import pytest
from making import after, dies, make, started, stepping

from muster.events import (
    Exited,
    Finish,
    Finished,
    Joined,
    Listening,
    Mismatch,
    PortTaken,
    Ready,
    Release,
    Released,
    Spawned,
    Start,
    Started,
    Step,
    Stop,
    StopAsked,
    Stopping,
)
from muster.policy import (
    ALONE,
    EVERYONE,
    SPREADS,
    Verdict,
    decide,
    never_joined,
    ready_at,
    recent,
    spread,
    verdict,
    wake,
)

PLAN = make(ps=1, workers=2, backoff=1.0)
KINDS = {
    "v1": {},
    "pss": {"kind": "pss"},
    "mwms": {"kind": "mwms", "ps": 0},
    "muster": {"engine": "muster"},
}


def act(state, now, plan):
    return list(decide(state, now, plan))


def back(task, at, attempt=2):
    return [Started(at, task, attempt), Spawned(at, task, attempt, 1)]


def stopped(plan, at, *tasks):
    return [[Stopping(at, name, 1), Exited(at, name, 1, -15)] for name in tasks or plan.tasks]


def test_everybody_is_started_once():
    assert act(after(PLAN), 0.0, PLAN) == [Start(name, 1) for name in PLAN.tasks]
    assert act(after(PLAN, started(PLAN)), 0.1, PLAN) == []


# --- how far a failure spreads


def test_every_role_of_every_kind_has_a_row():
    for kind, run in KINDS.items():
        for chief in (False, True):
            if not (kind == "pss" and not chief):
                plan = make(chief=chief, evaluator=kind != "muster", **{"workers": 2, **run})
                for task in plan.tasks.values():
                    assert spread(task, plan) in (ALONE, EVERYONE)
    assert {kind for kind, _ in SPREADS} == set(KINDS)


@pytest.mark.parametrize(("kind", "role"), SPREADS, ids=lambda word: word)
def test_a_failure_spreads_as_the_table_says(kind, role):
    """P1, P3, P4; FR-04: one row each."""
    expected = {
        ("v1", "worker"): ALONE,
        ("v1", "ps"): EVERYONE,
        ("v1", "chief"): EVERYONE,
        ("v1", "evaluator"): ALONE,
        ("pss", "worker"): ALONE,
        ("pss", "ps"): EVERYONE,
        ("pss", "chief"): EVERYONE,
        ("pss", "evaluator"): ALONE,
        ("mwms", "worker"): EVERYONE,
        ("mwms", "chief"): EVERYONE,
        ("mwms", "evaluator"): ALONE,
        ("muster", "worker"): ALONE,
        ("muster", "chief"): ALONE,
        ("muster", "ps"): EVERYONE,
    }
    plan = make(chief=True, workers=2, evaluator=kind != "muster", **KINDS[kind])
    name = f"{role}/0"
    others = [other for other in plan.tasks if other not in (name, "evaluator/0")]
    state = after(plan, started(plan), dies(name, 5.0))
    soon = act(state, 5.0, plan)
    if expected[kind, role] == ALONE:
        assert soon == [] and act(state, 6.0, plan) == [Start(name, 2)]
    else:
        assert {action.task for action in soon} == set(others)
        assert all(isinstance(a, Stop) and a.grace == 5.0 and name in a.why for a in soon)


@pytest.mark.parametrize(("engine", "spreads"), [("tensorflow", EVERYONE), ("muster", ALONE)])
def test_worker_0_as_chief_spreads_as_a_chief(engine, spreads):
    """CD-08, P3."""
    plan = make(engine=engine)
    assert spread(plan.tasks["worker/0"], plan) == spreads
    assert spread(plan.tasks["worker/1"], plan) == ALONE


def test_nobody_comes_back_before_everybody_is_out():
    up = [started(PLAN), stepping(PLAN), dies("ps/0", 5.0)]
    going = [Stopping(5.0, "worker/0", 1), Stopping(5.0, "worker/1", 1), Exited(6.0, "worker/0", 1, -15)]
    assert act(after(PLAN, *up, going), 60.0, PLAN) == []
    out = Exited(61.0, "worker/1", 1, -9)
    assert act(after(PLAN, *up, going, out), 61.0, PLAN) == [Start(name, 2) for name in PLAN.tasks]


def test_everybody_waits_for_the_backoff_of_the_one_that_failed():
    plan = make(ps=1, workers=1, backoff=10.0)
    state = after(plan, started(plan), dies("ps/0", 5.0), *stopped(plan, 5.1, "worker/0"))
    assert act(state, 14.9, plan) == [] and wake(state, 14.9, plan) == 15.0
    assert act(state, 15.0, plan) == [Start("ps/0", 2), Start("worker/0", 2)]


def test_one_that_had_ended_well_goes_back_with_the_others():
    state = after(PLAN, started(PLAN), Exited(3.0, "worker/1", 1, 0), dies("ps/0", 5.0), *stopped(PLAN, 6, "worker/0"))
    assert act(state, 10.0, PLAN) == [Start(name, 2) for name in PLAN.tasks]


# --- restarts


def test_a_failed_task_waits_longer_each_time():
    """P15: 1, 2, 4 s."""
    state = after(PLAN, started(PLAN), dies("worker/1", 10.0))
    waits = []
    for attempt in (2, 3, 4):
        waits.append(ready_at(state.tasks["worker/1"], PLAN.run) - state.now)
        for event in [*back("worker/1", state.now, attempt), dies("worker/1", state.now, attempt)]:
            state.apply(event)
    assert waits == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(("gap", "gives_up"), [(10.0, True), (190.0, True), (210.0, False)])
def test_the_budget_counts_over_a_window_of_time(gap, gives_up):
    """P15, P1: three restarts in ten minutes, then it is over; more, if they are further apart."""
    plan = make(ps=1, workers=2, retries=3, window=600.0, backoff=0.0)
    history = [started(plan)]
    for attempt in range(1, 5):
        history += [dies("worker/1", attempt * gap, attempt)]
        if attempt < 4:
            history += [back("worker/1", attempt * gap, attempt + 1), Step(attempt * gap, "worker/0", 1, attempt, 1)]
    state = after(plan, *history)
    assert recent(state.tasks["worker/1"], state.now, plan.run) == (4 if gives_up else 3)
    assert verdict(state, plan) is (Verdict.SPENT if gives_up else None)


def test_no_restart_at_all_can_be_asked_for():
    """SL-11."""
    plan = make(retries=0)
    assert verdict(after(plan, started(plan), dies("worker/1", 1.0)), plan) is Verdict.SPENT


def test_the_same_traceback_twice_is_a_bug_and_not_bad_luck():
    """P14."""
    one = after(PLAN, started(PLAN), dies("worker/1", 1.0, trace="E"))
    assert verdict(one, PLAN) is None
    two = after(
        PLAN, started(PLAN), dies("worker/1", 1.0, trace="E"), back("worker/1", 2), dies("worker/1", 3, 2, 1, "E")
    )
    assert verdict(two, PLAN) is Verdict.SAME
    other = after(
        PLAN, started(PLAN), dies("worker/1", 1, trace="E"), back("worker/1", 2), dies("worker/1", 3, 2, 1, "F")
    )
    assert verdict(other, PLAN) is None


def test_the_same_traceback_hours_apart_is_bad_luck():
    late = after(
        PLAN, started(PLAN), dies("worker/1", 1.0, trace="E"), back("worker/1", 2), dies("worker/1", 3600, 2, 1, "E")
    )
    assert verdict(late, PLAN) is None


@pytest.mark.parametrize(("grows", "ends"), [(False, True), (True, False)])
def test_restarts_that_bring_no_progress_end_the_run(grows, ends):
    """P16: three failures in a row without the step growing, once it had."""
    plan = make(ps=1, workers=2, retries=9, backoff=0.0)
    history = [started(plan), stepping(plan)]
    for attempt in (1, 2, 3):
        history += [dies("worker/1", 10.0 * attempt, attempt)]
        history += [back("worker/1", 10.0 * attempt, attempt + 1)] if attempt < 3 else []
        history += [Step(10.0 * attempt + 1, "worker/0", 1, 5 + grows * attempt, 9)]
    state = after(plan, *history)
    assert verdict(state, plan) is (Verdict.NO_PROGRESS if ends else None)


def test_a_crash_loop_before_the_first_step_is_left_to_the_budget():
    plan = make(ps=1, workers=2, retries=9, backoff=0.0)
    history = [started(plan)]
    for attempt in (1, 2, 3, 4):
        history += [dies("worker/1", attempt, attempt), back("worker/1", attempt, attempt + 1)]
    assert verdict(after(plan, *history), plan) is None


def test_a_worker_that_stalls_is_ended_only_where_the_run_says_so():
    """P21."""
    events = [started(PLAN), stepping(PLAN, at=10.0)]
    assert act(after(PLAN, *events), 1e6, PLAN) == []
    plan = make(ps=1, workers=2, stall=30.0)
    assert act(after(plan, *events), 39.9, plan) == [] and wake(after(plan, *events), 39.0, plan) == 40.0
    assert [(a.task, a.why) for a in act(after(plan, *events), 40.0, plan)] == [
        ("worker/0", "no step for 30 s"),
        ("worker/1", "no step for 30 s"),
    ]


def test_the_coordinator_makes_the_steps_of_its_workers_so_they_never_stall():
    plan = make(ps=1, workers=2, kind="pss", stall=30.0)
    state = after(plan, started(plan), Step(10.0, "chief/0", 1, 5, 5))
    assert act(state, 39.9, plan) == [] and [a.task for a in act(state, 40.0, plan)] == ["chief/0"]


def test_the_wait_at_the_start_barrier_is_no_stall():
    plan = make(ps=1, workers=2, stall=30.0)
    late = [Ready(29.0, "worker/1", 1), Released(29.0, "worker/0", 1), Released(29.0, "worker/1", 1)]
    state = after(plan, started(plan), Ready(5.0, "worker/0", 1), *late)
    assert act(state, 58.9, plan) == [] and wake(state, 31.0, plan) == 59.0
    assert {a.task for a in act(state, 59.0, plan)} == {"worker/0", "worker/1"}


# --- the start barrier


def test_the_barrier_opens_when_all_workers_are_ready():
    events = [started(PLAN), Ready(1.0, "worker/0", 1)]
    assert act(after(PLAN, *events), 60.9, PLAN) == []
    assert act(after(PLAN, *events, Ready(2.0, "worker/1", 1)), 2.0, PLAN) == [Release("worker/0"), Release("worker/1")]


def test_the_barrier_opens_after_its_time_limit():
    """NW-02."""
    state = after(PLAN, started(PLAN), Ready(1.0, "worker/0", 1))
    assert wake(state, 2.0, PLAN) == 61.0
    assert act(state, 61.0, PLAN) == [Release("worker/0")]


def test_one_that_comes_back_or_comes_late_goes_at_once():
    """NW-02."""
    state = after(PLAN, started(PLAN), Ready(1, "worker/0", 1), Released(61, "worker/0", 1), Ready(90, "worker/1", 1))
    assert act(state, 90.0, PLAN) == [Release("worker/1")]


def test_the_barrier_does_not_wait_for_those_that_have_ended():
    """P17."""
    state = after(PLAN, started(PLAN), Exited(1.0, "worker/1", 1, 0), Ready(2.0, "worker/0", 1))
    assert act(state, 2.0, PLAN) == [Release("worker/0")]


# --- verdicts

MISMATCH = Mismatch(2.0, "worker/1", 1, "worker/0")
TAKEN = PortTaken(2.0, "worker/1", 1, 20002, 7, "somebody")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], None),
        ([StopAsked(2.0, "ctrl-c")], Verdict.STOPPED),
        ([Exited(2.0, "worker/0", 1, 0)], Verdict.DONE),
        ([Exited(2.0, "worker/1", 1, 0)], None),
        ([Exited(2.0, "ps/0", 1, 0)], None),
        ([MISMATCH], Verdict.MISMATCH),
        ([TAKEN], Verdict.PORT),
        ([TAKEN, Listening(3.0, "worker/1", 2, 20002)], Verdict.PORT),
        # the order: asked for (unless it was lost already), done, lost
        ([MISMATCH, StopAsked(3.0, "ctrl-c"), StopAsked(4.0, "ctrl-c", now=True)], Verdict.MISMATCH),
        ([StopAsked(1.0, "ctrl-c"), TAKEN], Verdict.STOPPED),
        ([MISMATCH, Exited(2.0, "worker/0", 1, 0)], Verdict.DONE),
        ([MISMATCH, Exited(2.0, "worker/0", 1, 0), StopAsked(3.0, "stop")], Verdict.STOPPED),
        ([dies("worker/1", 1.0), MISMATCH], Verdict.MISMATCH),
    ],
)
def test_verdicts(events, why):
    """CD-03 (a script that claims to be another), N8, P17."""
    late = [e for e in events if not (isinstance(e, Mismatch) and isinstance(events[0], Exited))]
    assert verdict(after(PLAN, started(PLAN), late), PLAN) is (None if late != events else why)


@pytest.mark.parametrize(
    ("run", "ended", "since"),
    [
        ({"done": "chief"}, {"worker/0": 5.0}, 5.0),
        ({"done": "chief"}, {"worker/1": 5.0}, None),
        ({"done": "chief", "chief": True}, {"chief/0": 5.0}, 5.0),
        ({"done": "chief", "chief": True}, {"worker/0": 5.0, "worker/1": 6.0}, None),
        ({"done": "all-workers"}, {"worker/0": 5.0}, None),
        ({"done": "all-workers"}, {"worker/0": 5.0, "worker/1": 9.0}, 9.0),
        ({"done": "all-workers", "chief": True}, {"worker/0": 5.0, "worker/1": 9.0}, None),
        ({"done": "first-worker"}, {"worker/1": 5.0}, 5.0),
        ({"done": "first-worker"}, {}, None),
        ({"done": "all-workers", "kind": "pss"}, {"chief/0": 5.0}, 5.0),
        ({"done": "first-worker", "kind": "pss"}, {"worker/0": 5.0}, None),
        ({"kind": "mwms", "ps": 0}, {"worker/0": 5.0}, 5.0),
    ],
)
def test_when_a_run_is_done(run, ended, since):
    """SD-05: chief, all-workers, first-worker."""
    plan = make(**{"ps": 1, "workers": 2, **run})
    state = after(plan, started(plan), [Exited(at, name, 1, 0) for name, at in ended.items()])
    assert verdict(state, plan) is (None if since is None else Verdict.DONE)
    if since is not None:
        assert wake(state, since, plan) == since + plan.run.settle


# --- ending


def test_the_others_get_time_to_end_by_themselves_and_the_ps_goes_last():
    """SD-01, SD-02."""
    done = [started(PLAN), Exited(5.0, "worker/0", 1, 0)]
    assert act(after(PLAN, *done), 14.9, PLAN) == []
    assert act(after(PLAN, *done), 15.0, PLAN) == [Stop("worker/1", "the run is done", 5.0)]
    going = [*done, Stopping(15.0, "worker/1", 1)]
    assert act(after(PLAN, *going), 16.0, PLAN) == []
    gone = [*going, Exited(16.0, "worker/1", 1, -15)]
    assert act(after(PLAN, *gone), 16.0, PLAN) == [Stop("ps/0", "the run is done", 5.0)]
    over = [*gone, Stopping(16.0, "ps/0", 1), Exited(16.5, "ps/0", 1, -15)]
    assert act(after(PLAN, *over), 17.0, PLAN) == [Finish(True)]


def test_a_grace_of_nothing_does_not_shorten_the_time_to_settle():
    plan = make(ps=1, workers=2, grace=0.0)
    assert act(after(plan, started(plan), Exited(5.0, "worker/0", 1, 0)), 6.0, plan) == []


def test_workers_of_a_parameter_server_strategy_go_at_once_since_they_only_serve():
    plan = make(ps=1, workers=1, kind="pss")
    state = after(plan, started(plan), Exited(5.0, "chief/0", 1, 0))
    assert act(state, 5.0, plan) == [Stop("worker/0", "the run is done", 5.0)]


def test_a_stop_that_is_asked_for_ends_workers_then_ps():
    """P8, P9."""
    asked = [started(PLAN), StopAsked(5.0, "ctrl-c")]
    assert {a.task for a in act(after(PLAN, *asked), 5.0, PLAN)} == {"worker/0", "worker/1"}
    gone = [*asked, *stopped(PLAN, 6.0, "worker/0", "worker/1")]
    assert act(after(PLAN, *gone), 6.0, PLAN) == [Stop("ps/0", "stopped by the user", 5.0)]
    assert act(after(PLAN, *gone, *stopped(PLAN, 7.0, "ps/0")), 7.0, PLAN) == [Finish(False)]


@pytest.mark.parametrize(
    "before",
    [
        [],
        [Stopping(4.0, "worker/0", 1), Stopping(4.0, "worker/1", 1)],
        [*stopped(PLAN, 4.0, "worker/0")[0], *stopped(PLAN, 4.0, "worker/1")[0], Stopping(4.5, "ps/0", 1)],
    ],
    ids=["nobody is going", "workers are going", "only a ps is left, and it is going"],
)
def test_a_second_stop_ends_all_that_is_left_at_once(before):
    """P8, SL-08."""
    state = after(PLAN, started(PLAN), before, StopAsked(5.0, "ctrl-c", now=True))
    left = {name for name, t in state.tasks.items() if t.phase.value in ("running", "stopping")}
    assert {(a.task, a.grace) for a in act(state, 5.0, PLAN)} == {(name, 0.0) for name in left}


def test_a_lost_run_ends_its_tasks_without_the_time_to_settle():
    """SL-11."""
    plan = make(retries=0, ps=1, workers=2)
    state = after(plan, started(plan), dies("worker/1", 5.0))
    assert act(state, 5.0, plan) == [Stop("worker/0", "too many restarts", 5.0)]


def test_nothing_is_started_any_more_once_the_run_ends():
    state = after(PLAN, started(PLAN), dies("worker/1", 1.0), StopAsked(1.5, "stop"))
    assert not any(isinstance(action, Start) for action in act(state, 60.0, PLAN))


# --- training is finished, and the script goes on


def finished(*tasks):
    return [Finished(6.0, name, 1) for name in tasks]


@pytest.mark.parametrize(
    ("run", "events", "may_go"),
    [
        ({}, finished("worker/0"), False),
        ({}, finished("worker/0", "worker/1"), True),
        ({}, [*finished("worker/0"), Exited(7.0, "worker/1", 1, 0)], True),
        ({}, [*finished("worker/1"), Exited(7.0, "worker/1", 1, 0)], False),
        ({"kind": "pss"}, finished("chief/0"), True),
        ({"kind": "pss"}, finished("worker/0", "worker/1"), False),
    ],
)
def test_the_ps_may_go_once_all_that_compute_are_finished(run, events, may_go):
    """SD-08."""
    plan = make(ps=1, workers=2, **run)
    actions = act(after(plan, started(plan), events), 8.0, plan)
    assert actions == ([Stop("ps/0", "training is finished", 5.0)] if may_go else [])


def test_a_ps_that_has_gone_since_training_is_finished_stays_away():
    """SD-08."""
    plan = make(ps=1, workers=1)
    state = after(plan, started(plan), finished("worker/0"), *stopped(plan, 7.0, "ps/0"))
    assert act(state, 60.0, plan) == []
    state.apply(Exited(66.0, "worker/0", 1, 0))
    assert act(state, 66.0, plan) == [Finish(True)]


def test_a_worker_that_never_asked_for_the_ps_fails_the_run_though_it_exits_with_0():
    plan = make(ps=1, workers=3, engine="muster")
    joined = [Joined(1.0, f"worker/{index}", 1) for index in range(3)]
    ended = [Exited(9.0, f"worker/{index}", 1, 0) for index in range(3)]
    assert verdict(after(plan, started(plan), joined, ended), plan) is Verdict.DONE
    for missing in range(3):
        some = [e for e in joined if e.task != f"worker/{missing}"]
        state = after(plan, started(plan), some, ended)
        assert verdict(state, plan) is Verdict.UNUSED and never_joined(state, plan) == f"worker/{missing}"
    alone = after(plan, started(plan), joined[:2], ended[2])
    assert {action.task for action in act(alone, 9.0, plan)} == {"worker/0", "worker/1"}
    other = make(ps=1, workers=3)
    assert verdict(after(other, started(other), ended), other) is Verdict.DONE


@pytest.mark.parametrize("engine", ["muster", "tensorflow"])
def test_what_is_refused_is_not_tried_again(engine):
    """Exit code 2 before the first step: a bad request, ours or that of the script's own argument parser."""
    plan = make(ps=1, workers=2, engine=engine, retries=3)
    refused = after(plan, started(plan), dies("worker/1", 1.0, code=2))
    assert verdict(refused, plan) is Verdict.REFUSED
    assert verdict(after(plan, started(plan), dies("worker/1", 1.0, code=1)), plan) is None
    assert verdict(after(plan, started(plan), stepping(plan), dies("worker/1", 9.0, code=2)), plan) is None


def test_a_host_that_is_away_is_given_time_to_come_back():
    plan = make(ps=1, workers=2, backoff=1.0)
    lost = Exited(10.0, "worker/1", 1, -1, "the agent is gone", lost=True)
    assert wake(after(plan, started(plan), stepping(plan), lost), 10.0, plan) == 20.0
