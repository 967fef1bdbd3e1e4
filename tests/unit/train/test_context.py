import json

import pytest

from muster.train.context import Context, context


def told(task, kind="v1", chief="worker/0", **cluster):
    return context(
        {"MUSTER_TASK": task, "MUSTER_CLUSTER": json.dumps({"cluster": cluster, "chief": chief, "kind": kind})}
    )


def test_alone_there_is_one_worker_and_it_is_the_chief():
    me = context({})
    assert me == Context() and me.alone
    assert (me.task, me.worker_index, me.workers, me.is_chief) == ("worker/0", 0, 1, True)


@pytest.mark.parametrize("task, index, chief", [("worker/0", 0, True), ("worker/2", 2, False), ("ps/1", 1, False)])
def test_a_task_knows_its_place(task, index, chief):
    me = told(task, ps=["a:1", "a:2"], worker=["a:3", "a:4", "a:5"])
    assert (me.worker_index, me.workers, me.is_chief) == (index, 3, chief)


def test_a_separate_chief_is_not_counted_among_the_workers():
    me = told("chief/0", "pss", "chief/0", chief_=[], ps=["a:1"], worker=["a:2", "a:3"])
    assert (me.worker_index, me.workers, me.is_chief) == (0, 2, True)


@pytest.mark.parametrize("task, index", [("chief/0", 0), ("worker/0", 1), ("worker/1", 2)])
def test_a_mirrored_strategy_counts_the_chief_as_its_first_worker(task, index):
    cluster = {"chief": ["a:1"], "worker": ["a:2", "a:3"]}
    me = context(
        {
            "MUSTER_TASK": task,
            "MUSTER_CLUSTER": json.dumps({"cluster": cluster, "chief": "chief/0", "kind": "mwms"}),
        }
    )
    assert (me.worker_index, me.workers) == (index, 3)


def test_what_is_not_told_keeps_its_default():
    me = told("worker/0", worker=["a:1"])
    assert (me.attempt, me.mode, me.spare, me.max_staleness) == (1, "async", 0, None)
