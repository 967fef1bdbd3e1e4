"""A run that somebody else supervises, shown from its folder: the journal's events and the logs' lines as they come."""

import time
from collections.abc import Sequence

from muster.events import parse
from muster.journal import RunFolder
from muster.launch import Output
from muster.plan import Plan
from muster.state import State, blank
from muster.waits import Wait, waits
from muster.watch.tail import Tail
from muster.watch.terminal import Screen

EVERY = 0.1


def follow(folder: RunFolder, plan: Plan, screen: Screen) -> State:
    """Feeds ``screen`` until the run has ended or its launcher is gone. Returns the last state."""
    state = blank(plan.tasks)
    tails = {name: Tail(folder.logs / task.log) for name, task in plan.tasks.items()}
    with folder.journal.open("rb") as journal:
        held = b""
        while True:
            alive = folder.launcher() != 0
            *lines, held = (held + journal.read()).split(b"\n")
            for line in lines:
                event = parse(line)
                state.apply(event)
                screen.event(event, state)
            for name, tail in tails.items():
                if data := tail.more():
                    screen.output(Output(name, 1, data))
            now = max(state.now, time.time() - state.wall)
            waiting: Sequence[Wait] = waits(state, now, plan)
            screen.tick(state, now, waiting)
            if state.ended or not alive:
                return state
            time.sleep(EVERY)
