"""The evaluator's loop over checkpoints, and what the agent tells it. A folder is a list here."""

import json
import socket
import threading

import pytest

from muster.errors import MusterError
from muster.train import evaluator, roles
from muster.train.evaluator import checkpoints
from muster.train.report import Channel


class Evaluator:
    """A task of that role: ``folder`` holds what the chief has saved, the newest last."""

    def __init__(self):
        self.agent, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.folder = []

    def over(self, step=300):
        self.agent.sendall(json.dumps({"kind": "Over", "step": step}).encode() + b"\n")

    def loop(self, latest=None, **more):
        newest = latest or (lambda: self.folder[-1] if self.folder else None)
        return checkpoints(self.channel, newest, every=0.001, **more)

    def reports(self):
        self.channel.flush()
        return [json.loads(line)["checkpoint"] for line in self.agent.recv(1 << 16).splitlines()]


@pytest.fixture
def task():
    made = Evaluator()
    yield made
    made.agent.close()


def test_a_checkpoint_is_given_once_however_often_it_is_looked_for(task):
    looks = iter(["a", "a", None, "a", "b"])
    loop = task.loop(lambda: next(looks))
    assert [next(loop), next(loop)] == ["a", "b"]


def test_when_training_has_ended_the_last_one_is_given_once_and_the_loop_ends(task):
    """SD-03."""
    task.folder.append("model.ckpt-100")
    loop, seen = task.loop(), []
    for path in loop:
        seen.append(path)
        if len(seen) == 1:  # it is at work while the last one is saved and training ends
            task.folder += ["model.ckpt-200", "model.ckpt-300"]
            task.over()
    assert seen == ["model.ckpt-100", "model.ckpt-300"]
    assert task.reports() == ["", "model.ckpt-100", "", "model.ckpt-300", ""]


def test_the_last_one_is_not_given_again(task):
    task.folder.append("model.ckpt-300")
    loop = task.loop()
    assert next(loop) == "model.ckpt-300"
    task.over()
    assert list(loop) == []


def test_a_loop_that_never_saw_a_checkpoint_ends_with_the_training(task):
    task.over()
    assert list(task.loop()) == []


def test_it_asks_before_it_looks(task):
    """Training ends between the look and the question: what was saved meanwhile is still given."""

    def latest():
        found = task.folder[-1] if task.folder else None
        if not task.folder:
            task.folder.append("model.ckpt-300")
            task.over()
        return found

    assert list(task.loop(latest)) == ["model.ckpt-300"]


def test_a_loop_that_waits_is_woken_by_the_end(task):
    seen = []
    loop = checkpoints(task.channel, lambda: None, every=600.0)
    thread = threading.Thread(target=lambda: seen.extend(loop), daemon=True)
    thread.start()
    task.agent.recv(4096)  # it says that it waits
    task.over()
    thread.join(10)
    assert not thread.is_alive()


def test_the_interval_of_the_user_does_not_hold_up_the_end(task):
    task.folder.append("a")
    loop = task.loop(min_interval=600.0)
    assert next(loop) == "a"
    task.folder.append("b")
    task.over()
    assert list(loop) == ["b"]


def test_before_the_end_a_timeout_means_what_tensorflow_means_by_it(task):
    task.folder.append("a")
    assert list(task.loop(timeout=0.0)) == ["a"]
    asked = []

    def enough():
        asked.append(len(asked))
        return len(asked) == 3

    assert list(task.loop(timeout=0.0, timeout_fn=enough)) == ["a"] and asked == [0, 1, 2]


def test_a_loop_that_would_wait_for_ever_ends_with_the_training(task):
    """What SidecarEvaluator has: 30 s, and a function that says to go on whatever happens."""
    task.over()
    assert list(task.loop(timeout=0.0, timeout_fn=lambda: False)) == []


def test_without_an_agent_it_goes_on_as_tensorflow_does():
    looks = iter(["a", None, None, "b"])
    loop = checkpoints(Channel(None), lambda: next(looks), every=0.001)
    assert [next(loop), next(loop)] == ["a", "b"]


def test_the_final_step_is_known_once_it_is_told(task):
    assert task.channel.over() is None
    task.over(step=0)
    assert task.channel.over() == 0 and task.channel.over(1.0) == 0


def test_alone_nobody_trains():
    assert evaluator.training_ended() is True and evaluator.final_step() is None


def test_a_cluster_spec_that_lists_the_evaluator_is_that_of_the_plan_without_it():
    plan = {"ps": ("10.0.0.1:1",), "worker": ("10.0.0.1:2",)}
    written = {"ps": {0: "x:1"}, "worker": {0: "y:1"}, "evaluator": {0: "z:1"}}
    planned = roles.replaced(written, plan, beside=True)
    assert planned == {"ps": {0: "10.0.0.1:1"}, "worker": {0: "10.0.0.1:2"}}
    assert "evaluator" not in roles._difference(written, planned)
    with pytest.raises(MusterError) as caught:
        roles.replaced(written, plan)
    assert "--evaluator" in caught.value.try_
