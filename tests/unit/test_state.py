import random

import pytest
from making import after, dies, make, started

from muster.events import (
    Event,
    Exited,
    Finished,
    Frozen,
    HostLost,
    HostUp,
    Joined,
    Listening,
    Metrics,
    Mismatch,
    PortTaken,
    Ready,
    Released,
    RunEnded,
    RunStarted,
    Said,
    Spawned,
    Started,
    Step,
    StopAsked,
    Stopping,
    Thawed,
    Total,
    Waiting,
    Warned,
    parse,
)
from muster.journal import Journal
from muster.launch.fake import FakeLauncher, says
from muster.state import FACTS, NEXT, Phase, Surprise, blank
from muster.supervise import supervise

PLAN = make()
UP = [Started(0.0, "worker/0", 1), Spawned(0.1, "worker/0", 1, 7)]


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([], Phase.WAITING),
        ([Started(0, "worker/0", 1)], Phase.STARTING),
        (UP, Phase.RUNNING),
        ([*UP, Ready(1, "worker/0", 1)], Phase.READY),
        ([*UP, Ready(1, "worker/0", 1), Released(2, "worker/0", 1)], Phase.RUNNING),
        ([*UP, dies("worker/0", 1)], Phase.FAILED),
        ([*UP, dies("worker/0", 1, code=-9)], Phase.FAILED),
        ([*UP, Exited(1, "worker/0", 1, 0)], Phase.DONE),
        ([Started(0, "worker/0", 1), Exited(1, "worker/0", 1, 127)], Phase.FAILED),
        ([*UP, Stopping(1, "worker/0", 1)], Phase.STOPPING),
        ([*UP, Stopping(1, "worker/0", 1), Exited(2, "worker/0", 1, -15)], Phase.STOPPED),
        ([*UP, Stopping(1, "worker/0", 1), Exited(2, "worker/0", 1, 1)], Phase.STOPPED),
        ([Started(0, "worker/0", 1), Stopping(1, "worker/0", 1), Spawned(2, "worker/0", 1, 3)], Phase.STOPPING),
        ([*UP, dies("worker/0", 1), Started(2, "worker/0", 2)], Phase.STARTING),
        ([*UP, Exited(1, "worker/0", 1, 0), Started(2, "worker/0", 2)], Phase.STARTING),
        ([*UP, Stopping(1, "worker/0", 1), Exited(2, "worker/0", 1, 1), Started(3, "worker/0", 2)], Phase.STARTING),
    ],
)
def test_the_phases_of_a_task(events, phase):
    assert after(PLAN, events).tasks["worker/0"].phase is phase


def test_every_event_of_a_task_is_a_fact_or_has_a_row():
    """What is in neither would be a Surprise whenever it came."""
    kinds = {kind for kind in Event.kinds.values() if hasattr(kind, "__dataclass_fields__")}
    of_tasks = {kind for kind in kinds if {"task", "attempt"} <= set(kind.__dataclass_fields__)}
    assert {kind for _, kind in NEXT} | FACTS == of_tasks - {kind for kind in of_tasks if kind.__name__ == "TaskEvent"}


@pytest.mark.parametrize(
    "event", [Spawned(1, "worker/0", 1, 5), Stopping(1, "worker/0", 1), dies("worker/0", 1), Ready(1, "worker/0", 1)]
)
def test_what_the_table_does_not_allow_tells_its_story(event):
    with pytest.raises(Surprise) as surprise:
        after(PLAN, UP, dies("worker/0", 0.5), event)
    told = str(surprise.value)
    assert told.startswith(f"worker/0 is failed: it cannot have {type(event).__name__}. Its story:")
    assert [line.strip() for line in told.splitlines()[1:]] == [e.line() for e in [*UP, dies("worker/0", 0.5), event]]


def test_a_task_that_the_plan_does_not_have_is_a_surprise():
    with pytest.raises(Surprise, match="the plan has no worker/9"):
        after(PLAN, Started(0, "worker/9", 1))


def test_a_start_while_it_is_alive_is_a_surprise():
    """Nobody is started twice."""
    with pytest.raises(Surprise, match="worker/0 is running: it cannot have Started"):
        after(PLAN, UP, Started(1, "worker/0", 2))


LATE = [
    Spawned(9, "worker/0", 1, 5),
    Ready(9, "worker/0", 1),
    Step(9, "worker/0", 1, 999, 999),
    Exited(9, "worker/0", 1, 1),
    Stopping(9, "worker/0", 1),
    Listening(9, "worker/0", 1, 20002),
    PortTaken(9, "worker/0", 1, 20002, 1, "x"),
    Mismatch(9, "worker/0", 1, "ps/0"),
    Finished(9, "worker/0", 1),
]


@pytest.mark.parametrize("event", LATE, ids=lambda e: type(e).__name__)
def test_late_news_of_an_attempt_that_is_over_changes_nothing(event):
    """N7."""
    history = [*UP, dies("worker/0", 1), Started(2, "worker/0", 2), Spawned(3, "worker/0", 2, 8)]
    state, same = after(PLAN, history), after(PLAN, history)
    state.apply(event)
    same.now = state.now
    assert state == same


@pytest.mark.parametrize("event", [e for e in LATE if type(e) in FACTS], ids=lambda e: type(e).__name__)
def test_a_report_that_comes_after_the_end_changes_nothing(event):
    state, same = after(PLAN, UP, dies("worker/0", 1)), after(PLAN, UP, dies("worker/0", 1))
    state.apply(event)
    same.now = state.now
    assert state == same


def test_the_first_failure_stays_the_cause_until_that_task_is_well_again():
    up = started(PLAN)
    state = after(PLAN, up, dies("worker/1", 1.0), dies("worker/0", 2.0))
    assert state.cause == dies("worker/1", 1.0)
    for event in (Started(3, "worker/0", 2), Spawned(3, "worker/0", 2, 1), Step(4, "worker/0", 2, 5, 5)):
        state.apply(event)
    assert state.cause == dies("worker/1", 1.0)
    for event in (Started(5, "worker/1", 2), Spawned(5, "worker/1", 2, 1), Step(6, "worker/1", 2, 6, 1)):
        state.apply(event)
    assert state.cause is None


def test_a_ps_without_a_port_is_well_again_once_it_is_ready():
    """Over Muster's engine; else the worker that fails an hour later would be put down to it."""
    state = after(PLAN, started(PLAN), dies("ps/0", 1.0))
    for event in (Started(3, "ps/0", 2), Spawned(3, "ps/0", 2, 1), Ready(4, "ps/0", 2)):
        state.apply(event)
    assert state.cause is None
    state.apply(dies("worker/1", 3600.0))
    assert state.cause.task == "worker/1"


def test_who_asked_first_for_the_end_stays_and_at_once_stays_at_once():
    first, at_once = StopAsked(1, "ctrl-c"), StopAsked(2, "stop", True)
    state = after(PLAN, first, StopAsked(1.5, "sigterm"))
    assert state.stop == first
    state.apply(at_once)
    state.apply(StopAsked(3, "lease"))
    assert state.stop == at_once


def test_our_own_stops_are_no_failures():
    state = after(PLAN, UP, Stopping(1, "worker/0", 1), Exited(2, "worker/0", 1, -9))
    assert state.cause is None and not state.tasks["worker/0"].failures and state.tasks["worker/0"].forced


def test_the_same_traceback_in_a_row_is_counted_and_another_begins_anew():
    state = blank(PLAN.tasks)
    seen = []
    for attempt, trace in enumerate(["A", "A", "B", "", "", "B"], 1):
        for event in (Started(attempt, "worker/0", attempt), dies("worker/0", attempt, attempt, trace=trace)):
            state.apply(event)
        seen.append(state.tasks["worker/0"].echoes)
    assert seen == [1, 2, 1, 1, 1, 1]


def test_steps_are_counted_over_attempts():
    again = [Started(2, "worker/0", 2), Spawned(2, "worker/0", 2, 1), Step(3, "worker/0", 2, 14, 4)]
    state = after(PLAN, UP, Step(1, "worker/0", 1, 10, 10, 0.5), dies("worker/0", 1), again)
    task = state.tasks["worker/0"]
    assert (task.steps, task.local, task.before, task.loss) == (14, 4, 10, None)
    assert (state.low, state.high, state.high_at) == (10, 14, 3)


def test_a_global_step_that_goes_backwards_is_kept_as_a_setback():
    """FR-02."""
    state = after(PLAN, UP, Step(1, "worker/0", 1, 398, 9), Step(2, "worker/0", 1, 66, 10))
    (setback,) = state.setbacks
    assert (setback.task, setback.was, setback.now, setback.at) == ("worker/0", 398, 66, 2)
    assert state.high == 398


def test_failures_without_a_growing_step_are_counted():
    """P16."""
    again = [Started(3, "worker/0", 2), Spawned(3, "worker/0", 2, 1)]
    state = after(PLAN, UP, Step(1, "worker/0", 1, 5, 5), dies("worker/0", 2), again, Step(4, "worker/0", 2, 5, 1))
    assert state.tasks["worker/0"].stuck == 1
    state.apply(dies("worker/0", 5, 2))
    assert state.tasks["worker/0"].stuck == 2
    for event in (Started(6, "worker/0", 3), Spawned(6, "worker/0", 3, 1), Step(7, "worker/0", 3, 6, 1)):
        state.apply(event)
    state.apply(dies("worker/0", 8, 3))
    assert state.tasks["worker/0"].stuck == 1


def test_facts_are_kept():
    state = after(
        PLAN,
        [RunStarted(1.0, "r", 1001.0, 5, 9.0), HostUp(0.1, "here"), HostLost(0.2, "there", "its agent ended"), *UP],
        [Total(1, "worker/0", 1, 500), Metrics(1, "worker/0", 1, {"accuracy": 0.5, "auc": 1.0})],
        [Metrics(2, "worker/0", 1, {"accuracy": 0.9}), Frozen(2, "worker/0", 1), Joined(2, "worker/0", 1)],
        [Finished(2, "worker/0", 1), PortTaken(3, "worker/0", 1, 20002, 4, "x"), Listening(4, "worker/0", 1, 20002)],
        [Said(4, "worker/0", 1, "hm"), Warned(4, "careful"), StopAsked(5, "stop"), RunEnded(6, False, "worker/0")],
    )
    task = state.tasks["worker/0"]
    assert (state.run, state.wall, state.pid, state.born) == ("r", 1000.0, 5, 9.0)
    assert state.hosts == {"here": "up", "there": "its agent ended"}
    assert state.total == 500 and state.metrics == {"accuracy": 0.9, "auc": 1.0}
    assert task.frozen and task.joined and task.finished and task.listening and task.taken is None
    assert state.stop == StopAsked(5, "stop") and state.ended_at == 6
    state.apply(Thawed(7, "worker/0", 1))
    assert not task.frozen


def test_a_wait_that_is_told_again_replaces_the_last_telling():
    state = after(PLAN, [Waiting(n, "worker/0", "ps/0", "here", 0, "x") for n in range(9)])
    assert [w.at for w in state.waits] == [8]
    many = after(PLAN, [Waiting(n, "worker/0", f"ps/{n}", "here", 0, "x") for n in range(100)])
    assert len(many.waits) < 30  # a run of weeks must not fill memory


@pytest.mark.parametrize(
    "event", [*LATE, RunStarted(0, "r", 1.5, 2, 3.0), HostUp(0, "a", {"x": [1]}), StopAsked(1, "stop", True)]
)
def test_an_event_and_its_line_are_the_same_thing(event):
    assert parse(event.line()) == event
    assert "\n" not in event.line()


@pytest.mark.parametrize(
    "line", ["", "3", "null", "[]", "{}", '{"kind":"Nope","at":0}', '{"kind":"Ready","at":0}', '{"kind":["a"]}', "{"]
)
def test_what_is_no_event_is_refused(line):
    with pytest.raises(ValueError):
        parse(line)


def chaos(dice, chief, steps=40):
    """Tasks that report, die and end as the dice say."""

    def script(task, attempt):
        told = [(0.1, says(Listening, port=task.port))]
        if task.role != "ps":
            told += [(0.2, says(Ready))]
            told += [(0.3 + n, says(Step, step=n * 3, local=n)) for n in range(dice.randint(0, steps))]
        if dice.random() < 0.25:
            return [*told, (dice.uniform(1, 50), dice.choice([1, 9, 137, -9, -11]))]
        return [*told, (60.0 if task.id == chief else 1e6, 0)]

    return script


@pytest.mark.parametrize("seed", range(50))
def test_replay_equals_live(tmp_path, seed):
    plan = make(ps=2, workers=6, retries=4, chief=seed % 2 == 0)
    journal = Journal(tmp_path / "journal.jsonl", sync=lambda fd: None)
    live = supervise(plan, FakeLauncher(chaos(random.Random(seed), plan.chief)), journal)
    again = blank(plan.tasks)
    for event in journal.replay():
        again.apply(event)
    assert again == live and again.ended is not None
