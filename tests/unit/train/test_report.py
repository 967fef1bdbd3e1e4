import json
import os
import socket
import threading

import pytest

from muster import events
from muster.train.report import EVERY, KEPT, Channel, _inherited


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Agent:
    """The other end of the pipe."""

    def __init__(self):
        self.pipe, theirs = socket.socketpair()
        self.clock = Clock()
        self.channel = Channel(theirs, self.clock)

    def reports(self):
        self.pipe.setblocking(False)
        try:
            data = self.pipe.recv(1 << 20)
        except BlockingIOError:
            return []
        return [json.loads(line) for line in data.splitlines()]

    def tell(self, **note):
        self.pipe.sendall(json.dumps(note).encode() + b"\n")


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.pipe.close()


def test_every_report_is_an_event_less_what_the_agent_adds(agent):
    say = agent.channel
    say.say("x")
    say.metrics({"accuracy": 0.5})
    say.flush()
    say.step(3, 1, 0.5)
    for kind, fields in [("Ready", {}), ("Total", {"steps": 9}), ("Mismatch", {"claims": "ps/0"}), ("Finished", {})]:
        say.tell(kind, **fields)
    reports = agent.reports()
    assert {report["kind"] for report in reports} <= {kind.__name__ for kind in events.REPORTS}
    for report in reports:
        event = events.parse(json.dumps({"at": 0.0, "task": "worker/0", "attempt": 1, **report}))
        assert set(report) - {"kind"} <= set(events.report_fields(type(event)))


def test_steps_go_out_four_times_a_second_and_the_newest_of_the_rest_is_sent_with_the_flush(agent):
    for step in range(1, 101):
        agent.clock.now += 0.01
        agent.channel.step(step)
    agent.channel.flush()
    steps = [report["step"] for report in agent.reports()]
    assert steps[0] == 1 and steps[-1] == 100 and 5 <= len(steps) <= 6


def test_what_was_held_back_follows_by_itself():
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    channel.step(1)
    channel.step(2)
    channel.step(3)
    ours.settimeout(5 * EVERY)
    lines = b""
    while lines.count(b"\n") < 2:
        lines += ours.recv(4096)
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1, 3]


def test_a_report_that_matters_pushes_out_what_was_held_back(agent):
    agent.channel.step(1)
    agent.channel.step(2)
    agent.channel.tell("Finished")
    assert [report["kind"] for report in agent.reports()] == ["Step", "Step", "Finished"]


def test_each_call_counts_as_a_step_of_this_task_unless_it_says_otherwise(agent):
    agent.channel.step(10)
    agent.channel.step(20)
    agent.channel.flush()
    agent.channel.step(30, local=7)
    agent.channel.flush()
    assert [report["local"] for report in agent.reports()] == [1, 2, 7]


def test_metrics_that_are_held_back_are_merged(agent):
    agent.channel.metrics({"a": 1})
    agent.channel.metrics({"a": 2, "b": 1})
    agent.channel.metrics({"a": 3})
    agent.channel.flush()
    assert [report["values"] for report in agent.reports()] == [{"a": 1.0}, {"a": 3.0, "b": 1.0}]


def test_a_loss_that_is_no_number_is_said_once_and_left_out(agent):
    agent.channel.step(1, loss=float("nan"))
    agent.channel.step(2, loss=float("nan"))
    agent.channel.flush()
    said, *steps = agent.reports()
    assert said == {"kind": "Said", "text": "loss is nan"}
    assert all("loss" not in report for report in steps)


def test_the_same_notice_is_sent_once(agent):
    agent.channel.say("x")
    agent.channel.say("x")
    assert len(agent.reports()) == 1


def test_the_barrier_holds_until_go_and_is_open_from_then_on(agent):
    agent.tell(kind="Hello", secret="s")
    waiting = threading.Thread(target=agent.channel.ready)
    waiting.start()
    agent.pipe.settimeout(5)
    assert json.loads(agent.pipe.recv(4096)) == {"kind": "Ready"}
    assert waiting.is_alive()
    agent.tell(kind="Go")
    waiting.join(5)
    assert not waiting.is_alive()
    agent.channel.ready()
    assert agent.reports() == []
    assert agent.channel.hello()["secret"] == "s"


def test_a_barrier_that_stays_shut_is_passed_with_a_word():
    ours, theirs = socket.socketpair()
    Channel(theirs).ready(limit=0.01)
    ready, said = (json.loads(line) for line in ours.recv(4096).splitlines())
    assert ready["kind"] == "Ready" and "barrier" in said["text"]


def test_an_agent_that_is_gone_is_no_error(agent):
    agent.pipe.close()
    agent.channel.tell("Ready")
    agent.channel.step(1)
    agent.channel.ready()
    assert agent.channel.hello() == {}
    agent.channel.close()


def test_without_a_pipe_every_report_is_a_no_op():
    channel = Channel(None)
    channel.step(1)
    channel.metrics({"a": 1})
    channel.ready()
    channel.say("x")
    assert channel.hello() == {}
    channel.close()


def test_an_agent_that_does_not_read_holds_up_nobody_and_costs_no_memory(agent):
    for number in range(100_000):
        agent.channel.tell("Total", steps=number)
    assert len(agent.channel._unsent) <= KEPT + 100


def test_lines_stay_whole_when_the_pipe_was_full(agent):
    for number in range(20_000):
        agent.channel.tell("Total", steps=number)
    received = b""
    agent.pipe.settimeout(0.2)
    try:
        while True:
            received += agent.pipe.recv(1 << 16)
            agent.channel.flush()
    except TimeoutError:
        pass
    numbers = [json.loads(line)["steps"] for line in received.splitlines()]
    assert numbers == list(range(len(numbers))) and len(numbers) > 1000


def test_a_forked_child_is_silent(agent):
    child = os.fork()
    if child == 0:
        agent.channel.tell("Finished")
        os._exit(0)
    os.waitpid(child, 0)
    assert agent.reports() == []


def test_the_pipe_is_taken_once_and_closed_on_exec(monkeypatch):
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    monkeypatch.setenv("MUSTER_FD", str(theirs.detach()))
    pipe = _inherited()
    assert pipe is not None and not pipe.get_inheritable() and "MUSTER_FD" not in os.environ
    pipe.sendall(b"x")
    assert ours.recv(1) == b"x"


@pytest.mark.parametrize("number", ["", "x", "9999"])
def test_a_number_that_is_no_pipe_means_alone(monkeypatch, number):
    monkeypatch.setenv("MUSTER_FD", number)
    assert _inherited() is None


def test_a_number_that_has_become_a_file_means_alone(monkeypatch, tmp_path):
    with (tmp_path / "x").open("w") as file:
        monkeypatch.setenv("MUSTER_FD", str(file.fileno()))
        assert _inherited() is None
