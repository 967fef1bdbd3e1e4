"""The judgement of runs and the pace of reports, on made-up graphs."""

import socket

import pytest

from muster.train.report import EVERY, Channel
from muster.train.sessions import follow
from muster.train.steps import Notes, Progress, ancestors, costs_nothing, trains


class Op:
    def __init__(self, type="NoOp", *inputs, control=(), stateful=False):
        self.type, self.control_inputs = type, list(control)
        self.inputs = [Tensor(op) for op in inputs]
        self.op_def = Def(stateful)


class Def:
    def __init__(self, stateful):
        self.is_stateful = stateful


class Tensor:
    def __init__(self, op, rank=0):
        self.op, self.shape = op, type("S", (), {"rank": rank})


x, queue, mask = Op("Placeholder"), Op("QueueDequeueV2", stateful=True), Op("RandomUniform", stateful=True)
weights = Op("VarHandleOp", stateful=True)
read = Op("ReadVariableOp", weights, stateful=True)
loss = Op("Mean", x, read)
step = Op("VarHandleOp", stateful=True)
gradient = Op("MatMul", x, read)
update = Op("ResourceApplyGradientDescent", weights, gradient, stateful=True)
count = Op("AssignAddVariableOp", step, control=[update], stateful=True)
train = Op("NoOp", control=[update, count])
known = Notes(train=[train], loss=Tensor(loss), step=Tensor(step))


@pytest.mark.parametrize(
    "fetched, is_step",
    [
        ([train], True),
        ([Op("NoOp", control=[train])], True),  # grouped with something else
        ([count], True),
        ([loss], False),
        ([update], False),
        ([step], False),
        ([], False),
    ],
)
def test_a_run_trains_if_it_reaches_the_train_op_or_counts(fetched, is_step):
    assert trains(ancestors(fetched), known, Tensor(step)) is is_step


@pytest.mark.parametrize(
    "what, free",
    [
        (Tensor(loss), True),
        (Tensor(loss, rank=1), False),
        (Tensor(Op("Mean", Op("Placeholder"))), False),  # another input, which this run does not feed
        (Tensor(Op("Mean", x, queue)), False),  # it would eat an example
        (Tensor(Op("Mean", x, mask)), False),
        (Tensor(Op("Identity", loss, control=[Op("AssignSubVariableOp", weights)])), False),
    ],
)
def test_a_loss_is_asked_for_if_it_costs_nothing_and_changes_nothing(what, free):
    assert costs_nothing(what, ancestors([train])) is free


def test_a_graph_with_a_loop_ends():
    first, second = Op("Merge"), Op("Switch")
    first.inputs, second.inputs = [Tensor(second)], [Tensor(first)]
    assert ancestors([first]) == {first, second}


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


@pytest.fixture
def pipe():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, Channel(theirs)
    ours.close()


def judge(fetches):
    return {"step": "S", "loss": "L"} if "train" in fetches else {}


def test_steps_are_asked_for_when_due_and_counted_always(pipe):
    clock = Clock()
    progress = Progress(judge, pipe[1], clock)
    asked = []
    for number in range(10):
        extra = progress.before(["train", "other"])
        asked.append(bool(extra))
        progress.after(["train", "other"], {"step": number, "loss": 0.5} if extra else None)
        clock.now += EVERY / 4
    progress.close(9)
    assert asked == [True, False, False, False] * 2 + [True, False]
    assert b'"step":9,"local":10,"loss":0.5' in pipe[0].recv(4096).splitlines()[-1]


def test_a_run_that_does_not_train_is_neither_touched_nor_counted(pipe):
    progress = Progress(judge, pipe[1], Clock())
    assert progress.before("accuracy") == {}
    progress.after("accuracy", None)
    assert progress.local == 0
    with pytest.raises(BlockingIOError):
        pipe[0].recv(1)


def test_a_session_without_hooks_gives_its_own_results(pipe):
    class Session:
        def close(self):
            pass

        def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
            self.ran = fetches
            return (["trained"], {"step": 5, "loss": 0.1}) if isinstance(fetches, tuple) else ["plain"]

    session = Session()
    warm = []
    follow(session, Progress(judge, pipe[1], Clock(), when_warm=lambda: warm.append(session.ran)))
    assert session.run(["accuracy"]) == ["plain"]
    assert session.run(["train"]) == ["trained"]
    assert session.ran == (["train"], {"step": "S", "loss": "L"})
    assert session.run(["train"]) == ["plain"] and session.ran == ["train"]
    assert session.run(["accuracy"]) == ["plain"] and warm == [["train"]]
