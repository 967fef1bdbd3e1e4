"""GP-07: a GPU that was given and is not used: when it is said, what is guessed, and on which screens."""

from typing import Any

import pytest
from making import after, make, started, stepping
from test_supervise import Ran, instead

from muster.cluster import Host
from muster.events import Exited, GpuUse, RunEnded, Spawned, Started, Step, Stopping, Warned
from muster.idle import idle, shared
from muster.launch.fake import says
from muster.summary import summarise
from muster.watch.ending import end_table, gpu_cell

PLAN = make([Host("gpu-a", "10.0.0.1", gpus=[4, 5])], ps=1, workers=2)


def use(at: float = 61.0, task: str = "worker/0", attempt: int = 1, **told: Any) -> GpuUse:
    return GpuUse(at, task, attempt, **{"used": {"4": 0}, **told})


def rows(*events, now=70.0):
    return idle(after(PLAN, started(PLAN), *events), now, PLAN)


def test_the_plan_gave_the_gpus_that_the_tests_speak_of():
    assert [PLAN.tasks[name].gpus for name in ("ps/0", "worker/0", "worker/1")] == [(), (4,), (5,)]
    assert PLAN.tasks["worker/0"].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_task_host_gpu_and_since_when_are_said():
    (row,) = rows(stepping(PLAN), use())
    assert (row.task, row.host, row.gpus, row.since) == ("worker/0", "gpu-a", ("4",), 0.0)
    assert row.text().startswith("worker/0 on gpu-a does not use GPU 4, which it was given: not once in 70 s")
    assert "Try: muster check" in row.text()


def test_a_task_is_not_blamed_for_a_gpu_that_it_has_not_come_to_yet():
    assert not rows(use()) and not rows(use(), now=179.0)
    assert rows(use(), now=180.0)


@pytest.mark.parametrize("told", [{"used": {"4": 1 << 30}}, {"used": {}}])
def test_one_that_is_used_or_of_which_nobody_can_tell_is_no_row(told):
    assert not rows(stepping(PLAN), use(**told))


def test_it_is_over_once_the_gpu_is_used_and_with_the_next_attempt():
    assert not rows(stepping(PLAN), use(), use(121.0, used={"4": 5}), now=500.0)
    ended = [Stopping(70.0, "worker/0", 1), Exited(72.0, "worker/0", 1, -15)]
    assert rows(stepping(PLAN), use(), ended)
    again = [Started(73.0, "worker/0", 2), Spawned(73.0, "worker/0", 2, 9)]
    assert not rows(stepping(PLAN), use(), ended, again, now=500.0)


@pytest.mark.parametrize(
    ("told", "why", "try_"),
    [
        ({"elsewhere": [7]}, "it uses GPU 7", "leave CUDA_VISIBLE_DEVICES"),
        ({"hidden": ""}, "CUDA_VISIBLE_DEVICES is '' in its process", "leave CUDA_VISIBLE_DEVICES"),
        (
            {"no_cuda": "Cannot dlopen some GPU libraries.", "loaded": ["TensorFlow"]},
            "its log says: Cannot",
            "muster check",
        ),
        ({"loaded": ["TensorFlow", "libcuda"]}, "pins its work to /CPU:0", "list_logical_devices"),
        ({"loaded": ["TensorFlow"]}, "built without CUDA", "muster check"),
        ({}, "neither TensorFlow nor libcuda", "muster check"),
    ],
)
def test_the_likeliest_reason(told, why, try_):
    (row,) = rows(stepping(PLAN), use(**told))
    assert why in row.why and try_ in row.try_


def test_the_warning_is_given_once_and_lasts_to_the_end_table(tmp_path):
    told = [(5.0, says(Step, step=1, local=1)), *((at, says(GpuUse, used={"4": 0})) for at in (61.0, 121.0, 181.0))]
    ran = Ran(tmp_path, instead("worker/1", *told, (300.0, 0)), done="all-workers", settle=1.0)
    (warned,) = [event for event in ran.of(Warned) if "does not use GPU 4" in event.text]
    assert warned.task == "worker/1" and 61.0 <= warned.at < 62.0
    (kept,) = ran.summary.warnings
    assert "not once in 300 s" in kept


def test_a_gpu_that_is_used_after_all_is_not_in_the_end_table(tmp_path):
    told = [
        (5.0, says(Step, step=1, local=1)),
        (61.0, says(GpuUse, used={"4": 0})),
        (121.0, says(GpuUse, used={"4": 9})),
    ]
    ran = Ran(tmp_path, instead("worker/1", *told, (300.0, 0)), done="all-workers", settle=1.0)
    assert [event for event in ran.of(Warned) if "GPU 4" in event.text] and not ran.summary.warnings


def test_strangers_on_the_gpu_are_named():
    state = after(PLAN, started(PLAN), use(used={"4": 7}, others={"4": ["pid 9 of bob: python x.py"]}))
    assert list(shared(state)) == [("worker/0", "4", "pid 9 of bob: python x.py")]


def test_the_table_has_a_column_for_gpus_where_there_are_any():
    state = after(PLAN, started(PLAN), stepping(PLAN), use(used={"4": 5 << 30}), RunEnded(90.0, True))
    summary = summarise(state, PLAN, 90.0)
    assert [t.gpus for t in summary.tasks] == [{}, {"4": 5 << 30}, {"5": None}]
    assert "GPU" in [column.header for column in end_table(summary, PLAN).columns]
    without = make(ps=1, workers=2)
    plain = summarise(after(without, started(without)), without, 1.0)
    assert "GPU" not in [column.header for column in end_table(plain, without).columns]
    assert [gpu_cell("0", used) for used in (None, 0, 5 << 30)] == ["0", "0 idle", "0 5.0 GiB"]
