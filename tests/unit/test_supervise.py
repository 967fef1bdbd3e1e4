"""The loop over a cluster in memory, on a clock that jumps."""

from itertools import pairwise

import pytest
from making import make

from muster.events import (
    Exited,
    Finished,
    Listening,
    Mismatch,
    PortTaken,
    Ready,
    Released,
    RunEnded,
    RunStarted,
    Spawned,
    Started,
    Step,
    StopAsked,
    Stopping,
    Waiting,
    Warned,
)
from muster.journal import Journal, Logs, read
from muster.launch.fake import FakeLauncher, says
from muster.policy import Verdict
from muster.state import Phase
from muster.summary import summarise
from muster.supervise import supervise

TWO = {"ps": 1, "workers": 2, "backoff": 1.0}


def steady(task, attempt):
    """The chief ends after 100 s, the other workers with it, a ps never."""
    return [(0.1, says(Listening, port=task.port)), (1e6 if task.role == "ps" else 100.0, 0)]


def instead(name, *told, attempts=(1,)):
    """``steady``, but for these attempts of one task."""

    def script(task, attempt):
        return list(told) if task.id == name and attempt in attempts else steady(task, attempt)

    return script


class Ran:
    def __init__(self, folder, script, *, user=(), stop_takes=0.1, facts=None, launcher=None, **run):
        self.plan = make(**{**TWO, **run})
        self.launcher = launcher or FakeLauncher(script, stop_takes, user)
        self.journal = Journal(folder / "journal.jsonl", sync=lambda fd: None)
        self.logs = Logs(folder, self.plan)
        self.state = supervise(self.plan, self.launcher, self.journal, logs=self.logs, facts=facts)
        self.events = list(self.journal.replay())
        self.summary = summarise(self.state, self.plan, self.state.now)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def attempts(self):
        return {name: t.attempt for name, t in self.state.tasks.items()}

    @property
    def failed(self):
        return [name for name, t in self.state.tasks.items() if t.failures]


@pytest.fixture
def ran(tmp_path):
    return lambda script, **more: Ran(tmp_path, script, **more)


def test_the_run_is_done_when_the_chief_is(ran):
    """SD-01: the ps is ended, and that is a success."""
    end = ran(steady)
    assert end.summary.ok and end.launcher.closed and not end.launcher.alive
    assert {name: t.phase for name, t in end.state.tasks.items()} == {
        "ps/0": Phase.STOPPED,
        "worker/0": Phase.DONE,
        "worker/1": Phase.DONE,
    }
    assert isinstance(end.events[-1], RunEnded) and end.events[-1].ok


def test_a_run_has_begun_for_all_to_see_before_its_hosts_are_dialled(tmp_path):
    """Else status and stop call it dead, and another run is given its ports."""
    path = tmp_path / "journal.jsonl"
    begun, seen = RunStarted(0.0, "r", 1.0, 2, 3.0), []

    def connect():
        seen.extend(read(path))
        return [StopAsked(5.0, "ctrl-c")]

    state = supervise(make(**TWO), FakeLauncher(steady), Journal(path), first=[begun], connect=connect)
    assert seen == [begun] and state.stop == StopAsked(5.0, "ctrl-c")
    assert not any(t.attempt for t in state.tasks.values())


def test_intent_is_in_the_journal_before_the_act(tmp_path):
    path = tmp_path / "journal.jsonl"
    said = []

    class Watched(FakeLauncher):
        def start(self, task, attempt):
            said.append([e for e in read(path) if isinstance(e, Started) and (e.task, e.attempt) == (task.id, attempt)])
            super().start(task, attempt)

        def stop(self, task, grace):
            said.append([e for e in read(path) if isinstance(e, Stopping) and e.task == task.id])
            super().stop(task, grace)

        def release(self, task):
            said.append([e for e in read(path) if isinstance(e, Released) and e.task == task.id])
            super().release(task)

    def script(task, attempt):
        return [(0.1, says(Ready)), *steady(task, attempt)] if task.role == "worker" else steady(task, attempt)

    Ran(tmp_path, script, launcher=Watched(script))
    assert len(said) == 3 + 1 + 2 and all(said)


def test_a_worker_restarts_alone(ran):
    """P1."""
    end = ran(instead("worker/1", (5.0, 1)))
    assert end.attempts == {"ps/0": 1, "worker/0": 1, "worker/1": 2} and end.summary.ok
    died, back = end.of(Exited)[0], next(e for e in end.of(Started) if e.attempt == 2)
    assert back.at == pytest.approx(died.at + 1.0, abs=0.01)  # the back-off


def test_a_parameter_server_takes_everybody_back(ran):
    """P4."""
    end = ran(instead("ps/0", (5.0, 9)))
    assert set(end.attempts.values()) == {2} and end.failed == ["ps/0"] and end.summary.ok


def test_everybody_is_out_before_anybody_is_in(ran):
    """However long one of them takes to go, it is ended by force after the grace time."""
    end = ran(instead("ps/0", (5.0, 9)), stop_takes=30.0, grace=4.0)
    told = [(type(e), e.task, e.attempt) for e in end.events if isinstance(e, Started | Exited)]
    first_in = told.index((Started, "ps/0", 2))
    assert {name for kind, name, attempt in told[:first_in] if kind is Exited and attempt == 1} == set(end.plan.tasks)
    assert {e.code for e in end.of(Exited) if e.task == "worker/1" and e.attempt == 1} == {-9}


def test_two_that_fail_together_bring_everybody_back_once(ran):
    """P5."""

    def script(task, attempt):
        return [(5.0, 9)] if task.role == "ps" and attempt == 1 else steady(task, attempt)

    end = ran(script, ps=3)
    assert set(end.attempts.values()) == {2} and end.failed == ["ps/0", "ps/1", "ps/2"]


def test_one_that_had_ended_well_goes_back_too(ran):
    """P17, P4."""

    def script(task, attempt):
        if attempt == 1 and task.id != "worker/0":
            return [(3.0, 0)] if task.id == "worker/1" else [(5.0, 9)]
        return steady(task, attempt)

    end = ran(script)
    assert end.summary.ok and set(end.attempts.values()) == {2}


def test_a_worker_that_ends_well_early_is_no_failure_and_not_started_again(ran):
    """P17."""
    end = ran(instead("worker/1", (1.0, 0)))
    assert end.summary.ok and end.attempts["worker/1"] == 1


def test_the_run_gives_up_and_names_the_first_failure(ran):
    """P15: a crash loop at import ends within the budget, after ever longer pauses."""
    end = ran(instead("worker/1", (1.0, 42), attempts=range(1, 99)), retries=3)
    assert (end.summary.ok, end.summary.exit_code) == (False, 1)
    assert end.attempts["worker/1"] == 4 and end.state.now < 60.0
    assert end.summary.cause == "worker/1 on here ended 1 s after it started (exit 42); too many restarts"
    starts = [at for at, name, _ in end.launcher.starts if name == "worker/1"]
    assert [round(b - a - 1.0) for a, b in pairwise(starts)] == [1, 2, 4]


def test_workers_that_serve_a_coordinator_are_not_called_quiet(ran):
    def script(task, attempt):
        return [(70.0, 0)] if task.id == "chief/0" else [(1e6, 0)]

    end = ran(script, kind="pss", quiet=60.0)
    assert [w.task for w in end.of(Warned)] == ["chief/0"] and end.summary.ok


def test_a_run_that_is_given_up_stays_so_while_the_others_end(ran):
    """The window has passed before the others are gone."""
    end = ran(instead("worker/1", (5.0, 1)), stop_takes=4.0, window=2.0, retries=0)
    assert end.attempts["worker/1"] == 1 and end.summary.cause.endswith("too many restarts") and not end.summary.ok


def test_workers_that_stall_again_and_again_use_up_their_restarts(ran):
    """P21: it was ended by us, and by its own fault."""
    end = ran(lambda task, attempt: [(0.1, says(Listening, port=task.port))], stall=5.0, retries=3, backoff=0.1)
    assert not end.summary.ok and end.summary.cause.endswith("too many restarts")
    assert "no step for 5 s" in end.summary.because and end.attempts["worker/1"] <= 4


def test_a_ps_that_dies_when_training_is_over_takes_nobody_back(ran):
    def script(task, attempt):
        if task.role == "ps":
            return [(0.1, says(Listening, port=task.port)), (9.99, 1)]
        return [(0.1, says(Listening, port=task.port)), (10.0 - 0.1, says(Finished)), (20.0, 0)]

    end = ran(script, stop_takes=5.0)
    assert end.summary.ok and set(end.attempts.values()) == {1}


def test_the_same_python_error_twice_ends_the_run_at_once(ran):
    """P14: no retry storm."""
    bug = Exited(0, "", 0, 1, "ValueError: bad", "Traceback\nValueError: bad")
    end = ran(instead("worker/1", (1.0, bug), attempts=range(1, 99)), retries=50)
    assert end.attempts["worker/1"] == 2 and Verdict.SAME.value in end.summary.cause
    assert end.summary.trace == "Traceback\nValueError: bad" and "ValueError: bad" in end.summary.because


def test_restarts_without_progress_end_the_run(ran):
    """P16."""

    def script(task, attempt):
        if task.id == "worker/1":
            return [(1.0, says(Step, step=7, local=1)), (2.0, attempt)]
        return steady(task, attempt)

    end = ran(script, retries=50, backoff=0.1)
    assert end.summary.exit_code == 3 and len(end.state.tasks["worker/1"].failures) == 3


def test_the_first_failure_is_the_cause(ran):
    """SL-11."""

    def script(task, attempt):
        after = {"worker/0": 3.0, "worker/1": 3.5}.get(task.id)
        return [(after, 7)] if after else steady(task, attempt)

    end = ran(script, retries=0, stop_takes=1.0)
    assert end.state.cause.task == "worker/0" and end.events[-1].cause == "worker/0"
    assert end.state.now < 6.0


def test_a_stop_ends_workers_then_ps(ran):
    """P8, P9."""
    end = ran(steady, user=[StopAsked(5.0, "ctrl-c")])
    assert end.summary.exit_code == 130 and end.state.now < 6.0
    assert [name for _, name, _ in end.launcher.stops] == ["worker/0", "worker/1", "ps/0"]
    gone = max(e.at for e in end.of(Exited) if e.task != "ps/0")
    assert next(e.at for e in end.of(Stopping) if e.task == "ps/0") >= gone
    assert end.state.cause is None


def test_a_second_stop_is_at_once(ran):
    """P8."""
    asked = [StopAsked(5.0, "ctrl-c"), StopAsked(6.0, "ctrl-c", now=True)]
    slow = ran(steady, user=asked, stop_takes=100.0, grace=60.0)
    assert slow.state.now < 6.5 and {e.code for e in slow.of(Exited)} == {-9}


@pytest.mark.parametrize("at", [5.3, 5.6])
def test_a_second_stop_does_not_wait_for_a_ps_that_is_going(ran, at):
    """P8: at 5.6 s both workers have gone, and the ps has been asked to."""

    class Slow(FakeLauncher):
        def stop(self, task, grace):
            self.stop_takes = 100.0 if task.role == "ps" else 0.5
            super().stop(task, grace)

    end = ran(
        steady,
        launcher=Slow(steady, 0.5, [StopAsked(5.0, "ctrl-c"), StopAsked(at, "ctrl-c", now=True)]),
        grace=60.0,
    )
    assert end.state.now < at + 0.5


def test_a_worker_that_sleeps_after_the_end_is_ended_and_the_run_succeeds(ran):
    """SD-02: succeeded, one task forced."""
    end = ran(instead("worker/1", (1e6, 0)), settle=10.0)
    assert end.summary.ok and end.state.now < 112.0
    assert [t.task for t in end.summary.tasks if t.forced and not t.task.startswith("ps")] == ["worker/1"]


@pytest.mark.parametrize(("rule", "seconds"), [("chief", 110.0), ("first-worker", 60.0), ("all-workers", 160.0)])
def test_each_rule_says_when_the_run_is_done(ran, rule, seconds):
    """SD-05: worker 1 ends 60 s after the chief, worker 2 50 s before it."""

    def script(task, attempt):
        after = {"worker/0": 100.0, "worker/1": 160.0, "worker/2": 50.0}.get(task.id)
        return [(after or 1e6, 0)]

    end = ran(script, workers=3, done=rule, settle=10.0)
    assert end.summary.ok and end.state.now == pytest.approx(seconds, abs=1.0)


def test_the_ps_go_while_the_chief_exports(ran):
    """SD-08."""
    export = [(1.0, says(Finished)), (61.0, 0)]
    end = ran(lambda task, attempt: export if task.id == "worker/0" else [(1.0, 0)] if task.index else [(1e6, 0)])
    gone = next(e.at for e in end.of(Exited) if e.task == "ps/0")
    assert gone < 3.0 and end.summary.ok and end.attempts["ps/0"] == 1


def test_workers_step_together(ran):
    """NW-02: nobody starts before the last is ready."""

    def script(task, attempt):
        late = {"worker/0": 1.0, "worker/1": 7.0}.get(task.id)
        return [(late, says(Ready)), (50.0, 0)] if late else steady(task, attempt)

    end = ran(script)
    assert [(e.task, round(e.at, 1)) for e in end.of(Released)] == [("worker/0", 7.0), ("worker/1", 7.0)]


def test_a_worker_that_comes_back_is_released_at_once(ran):
    def script(task, attempt):
        if task.role == "ps":
            return steady(task, attempt)
        return [(1.0, says(Ready)), (5.0, 1) if (task.id, attempt) == ("worker/1", 1) else (50.0, 0)]

    end = ran(script)
    again = [e for e in end.of(Released) if e.attempt == 2]
    assert [e.task for e in again] == ["worker/1"]
    assert again[0].at == pytest.approx(next(e.at for e in end.of(Ready) if e.attempt == 2))


@pytest.mark.parametrize(
    ("what", "code"),
    [(says(Mismatch, claims="worker/0"), 1), (says(PortTaken, port=20002, pid=7, holder="pid 7 (nc)"), 1)],
)
def test_what_no_restart_can_mend_ends_the_run(ran, what, code):
    """CD-03, N8, N12."""
    end = ran(instead("worker/1", (1.0, what), attempts=range(99)))
    assert end.summary.exit_code == code and end.attempts["worker/1"] == 1 and end.state.now < 3.0


def test_a_wait_is_told_and_told_again_every_ten_seconds(ran):
    """NW-01, SL-13: with TensorFlow itself silent."""
    end = ran(instead("worker/1", (1e6, 0)), user=[StopAsked(40.0, "ctrl-c")])
    told = [e for e in end.of(Waiting) if e.whom == "worker/1"]
    assert [round(e.at) for e in told] == [5, 15, 25, 35]
    assert told[0].why.startswith("started 5 s ago and not listening yet") and told[0].where == "here, 127.0.0.1:20002"


def test_a_task_without_a_word_is_warned_of_once(ran):
    """P21: and left alone."""
    end = ran(steady, quiet=30.0)
    told = [e for e in end.of(Warned) if e.task == "worker/1"]
    assert len(told) == 1 and "worker/1 has neither printed nor made a step for 30 s" in told[0].text
    assert set(end.attempts.values()) == {1}


def test_a_task_that_prints_is_not_quiet(ran):
    def script(task, attempt):
        return [*((20.0 * n, b"still here\n") for n in range(1, 5)), *steady(task, attempt)]

    assert not ran(script, quiet=30.0).of(Warned)


def test_a_setback_is_told_as_it_happens(ran):
    """FR-02."""
    steps = [(1.0, says(Step, step=398, local=1)), (2.0, says(Step, step=66, local=2)), (9.0, 0)]
    end = ran(instead("worker/0", *steps))
    assert "398 -> 66" in end.of(Warned)[0].text


@pytest.mark.parametrize(
    ("run", "said"), [({}, "starts over at step 0 (it was at 50)"), ({"checkpoints": "/x"}, "in /x")]
)
def test_going_back_says_to_where(ran, run, said):
    """FR-02."""

    def script(task, attempt):
        if task.role == "worker":
            return [(1.0, says(Step, step=50 * attempt, local=1)), (100.0, 0)]
        return [(5.0, 9)] if attempt == 1 else [(1e6, 0)]

    end = ran(script, **run)
    assert said in " ".join(e.text for e in end.of(Warned))


def test_late_news_of_a_dead_attempt_is_dropped(ran):
    """N7."""
    from muster.launch import Output

    class Late(FakeLauncher):
        def wait(self, until):
            news = super().wait(until)
            if self.clock > 20.0 and self.starts and not self.stops:
                news += [Step(self.clock, "worker/1", 1, 10**9, 1), Output("worker/1", 1, b"late\n")]
            return news

    end = ran(None, launcher=Late(instead("worker/1", (5.0, 1))))
    assert end.summary.ok and end.state.high == 0


def test_a_supervisor_that_breaks_leaves_nothing_behind(tmp_path):
    class Full(Journal):
        def append(self, events):
            if any(isinstance(event, Spawned) for event in events):
                raise OSError("No space left on device")
            super().append(events)

    launcher = FakeLauncher(steady)
    with pytest.raises(OSError):
        supervise(make(**TWO), launcher, Full(tmp_path / "j"))
    assert launcher.closed and not launcher.alive


def test_what_the_tasks_print_is_in_their_logs(ran, tmp_path):
    ran(instead("worker/1", (1.0, b"hello "), (2.0, b"world\n"), (50.0, 0)))
    assert (tmp_path / "worker-1.log").read_bytes() == b"hello world\n"


def test_hundreds_of_workers_come_and_go(ran):
    """Section 6 of the design: no step of the loop looks at every task for every event."""
    end = ran(
        lambda task, attempt: [(1.0, says(Ready)), (2.0, 0)] if task.role == "worker" else [(1e6, 0)], workers=300
    )
    assert end.summary.ok
