import json

import pytest
from making import after, dies, make, started, stepping

from muster.errors import MusterError
from muster.events import Exited, Metrics, Mismatch, PortTaken, RunEnded, RunStarted, Step, StopAsked, Stopping
from muster.summary import said_code, summarise

PLAN = make(ps=1, workers=2, retries=0)
RAN = [RunStarted(0.0, "lab-1", 1000.0, 1, 1.0)]


def summary(*events, ok=False, plan=PLAN):
    return summarise(after(plan, RAN, started(plan), *events, RunEnded(20.0, ok)), plan, 20.0, "/runs/lab-1")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "exit 0"),
        (3, "exit 3"),
        (-11, "SIGSEGV"),
        (-6, "SIGABRT"),
        (-9, "SIGKILL"),
        (-64, "SIGRTMAX"),
        (-99, "signal 99"),
    ],
)
def test_an_exit_code_and_a_signal_are_told_apart(code, said):
    """P13."""
    assert said_code(code) == said


@pytest.mark.parametrize(
    ("exit", "because", "hint"),
    [
        (Exited(3.4, "worker/1", 1, -11), "it died of SIGSEGV", "muster logs worker/1"),
        (Exited(3.4, "worker/1", 1, -6, tail="Aborted"), "it died of SIGABRT", ""),
        (Exited(3.4, "worker/1", 1, -9), "it was killed by SIGKILL from outside of Muster", ""),
        (Exited(3.4, "worker/1", 1, -9, oom=True), "out of memory", ""),
        (Exited(3.4, "worker/1", 1, 3), "it said nothing; see worker-1.log", ""),
        (Exited(3.4, "worker/1", 1, 3, tail="one\ntwo\n\n"), "two   (last line of worker-1.log)", ""),
        (
            Exited(3.4, "worker/1", 1, 1, "ModuleNotFoundError: No module named 'keras'", "Traceback"),
            "No module named 'keras'   (last lines of worker-1.log)",
            "install it for /usr/bin/python3",
        ),
        (
            Exited(3.4, "worker/1", 1, 1, "AttributeError: module 'tensorflow' has no attribute 'placeholder'"),
            "placeholder",
            "muster run --tf1",
        ),
        (
            Exited(3.4, "worker/1", 1, 1, "RuntimeError: Collective ops must be configured at program startup"),
            "Collective",
            "before any other use of TensorFlow",
        ),
        (
            Exited(3.4, "worker/1", 1, 1, tail="E1101 chttp2.cc: ENHANCE_YOUR_CALM: Too many pings\n"),
            "Too many pings",
            "GRPC_ARG_KEEPALIVE_TIME_MS",
        ),
        (
            Exited(3.4, "worker/1", 1, 1, "tensorflow...ResourceExhaustedError: OOM when allocating tensor"),
            "OOM when allocating tensor",
            "a smaller batch",
        ),
    ],
)
def test_a_failure_is_told_in_four_rows(exit, because, hint):
    """P13, P14, P20, CD-10, NW-16, GP-02."""
    told = summary(exit)
    assert told.cause == f"worker/1 on here ended 3 s after it started ({said_code(exit.code)}); too many restarts"
    assert because in told.because and hint in told.try_
    assert told.exit_code == 1 and not told.ok


@pytest.mark.parametrize(
    ("asked", "code", "cause"),
    [
        (StopAsked(5.0, "ctrl-c"), 130, "stopped by Ctrl-C"),
        (StopAsked(5.0, "sigterm"), 143, "stopped by a SIGTERM to the launcher"),
        (StopAsked(5.0, "stop"), 130, "stopped by muster stop"),
    ],
)
def test_a_stop_has_its_own_exit_code(asked, code, cause):
    """P8, P9."""
    told = summary(asked)
    assert (told.exit_code, told.cause, told.ok) == (code, cause, False)


def test_ctrl_c_while_a_lost_run_is_being_ended_hides_no_cause():
    """The first failure is the cause: 130 would say that the user gave up on a healthy run."""
    lost = dies("worker/1", 3.0, trace="ValueError: bad")
    plan = make(ps=1, workers=2, retries=0)
    told = summary(lost, StopAsked(4.0, "ctrl-c"), plan=plan)
    assert (told.exit_code, told.result) == (1, "failed") and told.cause.startswith("worker/1 on here ended")
    assert summary(StopAsked(2.0, "ctrl-c"), lost, plan=plan).exit_code == 130


def test_a_loss_that_is_no_number_is_null_in_json():
    """NaN is no JSON, and a diverged loss is what somebody most wants to read there."""
    told = summary(Metrics(3.0, "worker/0", 1, {"loss": float("nan"), "accuracy": 0.5}))
    assert json.loads(json.dumps(told.as_json(), allow_nan=False))["metrics"] == {"loss": None, "accuracy": 0.5}


def test_no_progress_has_its_own_exit_code():
    """P16."""
    plan = make(ps=1, workers=2, retries=9, backoff=0.0)
    history = [stepping(plan)]
    for attempt in (1, 2, 3):
        history += [dies("worker/1", 10, attempt), started(plan, 10, attempt + 1)[-2:] if attempt < 3 else []]
    told = summary(*history, plan=plan)
    assert told.exit_code == 3 and told.cause.endswith("restarts bring no progress")


def test_the_traceback_of_the_user_is_kept_whole():
    """P14."""
    trace = 'Traceback (most recent call last):\n  File "t.py", line 50\nValueError: bad'
    assert summary(dies("worker/1", 1.0, trace=trace)).trace == trace


def test_a_claim_to_be_another_task_names_both():
    """CD-03, N12."""
    told = summary(Mismatch(1.0, "worker/1", 1, "worker/0"))
    assert told.cause == "worker/1 on here claims to be worker/0" and "--role-flags" in told.try_


def test_a_port_that_is_taken_names_its_holder():
    """N8, NW-09."""
    told = summary(PortTaken(1.0, "worker/1", 1, 20002, 7, "pid 7 (nc, user ana)"))
    assert told.cause == "port 20002 of worker/1 on here is taken" and "pid 7 (nc, user ana)" in told.because


def test_a_run_that_went_well():
    told = summary(
        stepping(PLAN, 2.0, 100),
        [
            Metrics(9.0, "worker/0", 1, {"accuracy": 0.9}),
            Step(12.0, "worker/0", 1, 600, 300),
            Exited(12.0, "worker/0", 1, 0),
        ],
        [Stopping(15.0, "worker/1", 1), Exited(15.0, "worker/1", 1, -15)],
        [Stopping(16.0, "ps/0", 1), Exited(16.0, "ps/0", 1, -15)],
        ok=True,
    )
    assert (told.run, told.ok, told.exit_code, told.cause, told.seconds) == ("lab-1", True, 0, "", 20.0)
    assert (told.steps, told.steps_per_s, told.metrics) == (600, 50.0, {"accuracy": 0.9})
    rows = {t.task: (t.phase, t.steps, t.exit, t.forced) for t in told.tasks}
    assert rows == {
        "ps/0": ("stopped", 0, "ended", True),
        "worker/0": ("done", 300, "exit 0", False),
        "worker/1": ("stopped", 100, "ended", True),
    }
    assert told.tasks[1].log == "/runs/lab-1/logs/worker-0.log"


def test_a_global_step_that_went_backwards_is_warned_of():
    """FR-02."""
    told = summary(
        [Step(1.0, "worker/0", 1, 398, 1), Step(2.0, "worker/0", 1, 66, 2), Exited(3, "worker/0", 1, 0)], ok=True
    )
    assert "398 -> 66" in told.warnings[0] and told.ok


def test_it_is_one_json_object():
    told = json.loads(json.dumps(summary(dies("worker/1", 1.0)).as_json()))
    assert told["try"] == "muster logs worker/1" and told["tasks"][0]["task"] == "ps/0" and told["exit_code"] == 1


def test_a_run_can_be_told_before_it_has_ended():
    told = summarise(after(PLAN, RAN, started(PLAN)), PLAN, 7.0)
    assert (told.ok, told.cause, told.seconds, told.steps_per_s) == (False, "not ended", 7.0, None)


def test_a_script_that_never_calls_muster_is_the_cause_with_the_engines_to_try():
    plan = make(ps=1, workers=3, engine="muster")
    told = summary(Exited(9.0, "worker/2", 1, 0), plan=plan)
    assert told.cause == "worker/2 on here ended without having called muster.fit or muster.connect"
    assert "3 workers trained alone" in told.because and told.exit_code == 1
    assert "muster.fit(model, ...)" in told.try_ and "--engine tensorflow --kind v1 | pss | mwms" in told.try_


def test_what_was_refused_is_told_as_it_was_told():
    plan = make(ps=1, workers=2, engine="muster")
    error = MusterError("Stepper overrides train_step", at="__main__", because="one\ntwo", try_="that")
    told = summary(Exited(3.0, "worker/1", 1, 2, tail=f"some notice\n{error}\n"), plan=plan)
    assert told.cause == "worker/1 on here: Stepper overrides train_step"
    assert (told.because, told.try_, told.exit_code) == ("one\ntwo", "that", 2)
    usage = summary(Exited(3.0, "worker/1", 1, 2, tail="usage: x\nx: error: bad"), plan=plan)
    assert "x: error: bad" in usage.because and usage.exit_code == 2
