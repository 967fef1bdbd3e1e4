"""What a run does once its tasks have ended: only a port taken in between is worth another plan."""

import pytest
from making import after, make, started, stepping

from muster.events import Exited, PortTaken, StopAsked
from muster.run import lost_port

PLAN = make(ps=1, workers=2)
TAKEN = PortTaken(3.0, "worker/1", 1, 20002, 7, "a stranger")


@pytest.mark.parametrize(
    ("events", "port"),
    [
        ([TAKEN], 20002),
        ([], 0),
        ([stepping(PLAN), TAKEN], 0),
        ([TAKEN, StopAsked(4.0, "ctrl-c")], 0),  # nobody wants it any more
        ([Exited(2.0, "worker/0", 1, 0), TAKEN], 0),  # it went well without that one
    ],
    ids=["before the first step", "no port", "later", "stopped", "done"],
)
def test_a_port_that_was_taken_is_worth_another_plan(events, port):
    assert lost_port(after(PLAN, started(PLAN), *events), PLAN) == port


def test_a_port_that_the_file_names_is_not_gone_round():
    exact = make(ps=["127.0.0.1:20000"], workers=["127.0.0.1:20001", "127.0.0.1:20002"])
    assert lost_port(after(exact, started(exact), TAKEN), exact) == 0
