"""The loop: what happened -> what is true -> what to do -> do it.

Nothing is decided here. Intent is written (one fsync a batch) before it is carried out, so that a crash in between is
seen on replay; and whatever ends the loop, the launcher is closed, which ends every task.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from muster.events import (
    Action,
    Conclude,
    Concluded,
    Event,
    Exited,
    Finish,
    Release,
    Released,
    RunEnded,
    Start,
    Started,
    Stop,
    Stopping,
    Warned,
)
from muster.idle import idle, shared
from muster.journal import Journal, Logs
from muster.launch import Launcher, Output
from muster.placement import Facts
from muster.plan import Plan
from muster.policy import EVERYONE, decide, spread, stepping, wake
from muster.state import ALIVE, Phase, State, blank
from muster.summary import evaluator_warnings
from muster.waits import Wait, waits

PULSE = 0.25
WAIT_AGAIN = 10.0  # seconds after which a wait that goes on is told again


class Watcher(Protocol):
    """A screen. It sees everything and changes nothing."""

    def output(self, output: Output) -> None: ...
    def event(self, event: Event, state: State) -> None: ...
    def tick(self, state: State, now: float, waiting: Sequence[Wait]) -> None: ...


def supervise(
    plan: Plan,
    launcher: Launcher,
    journal: Journal,
    *,
    logs: Logs | None = None,
    watchers: Sequence[Watcher] = (),
    facts: dict[str, Facts] | None = None,
    first: Sequence[Event] = (),
    connect: Callable[[], Sequence[Event]] = tuple,
) -> State:
    """Carries out ``plan`` and returns how it ended. ``first`` are events to begin the journal with, before hosts are
    dialled, which may take long (``connect``, which says what was heard meanwhile): others see that the run lives."""
    state = blank(plan.tasks)
    notices = Notices(plan, facts or {})

    def note(events: Sequence[Event]) -> None:
        journal.append(events)
        for event in events:
            state.apply(event)
            for watcher in watchers:
                watcher.event(event, state)

    try:
        note(list(first))
        note(list(connect()))
        while True:
            now = launcher.now()
            actions = list(decide(state, now, plan))
            if any(isinstance(action, Finish) for action in actions):
                note([_ended(state, now, actions)])
                return state
            note([intent for action in actions for intent in _intents(action, state, now)])
            for action in actions:
                _act(action, plan, launcher)
            news = launcher.wait(until=min(launcher.now() + PULSE, wake(state, now, plan)))
            for item in news:
                if isinstance(item, Output):
                    notices.heard[item.task] = launcher.now()
                    if logs:
                        logs.write(*item)
                    for watcher in watchers:
                        watcher.output(item)
            note([item for item in news if not isinstance(item, Output)])
            if launcher.now() >= notices.due:
                note(list(notices.news(state, launcher.now(), logs)))
            for watcher in watchers:
                watcher.tick(state, launcher.now(), notices.waiting)
    finally:
        launcher.close()


def _ended(state: State, now: float, actions: Sequence[Action]) -> RunEnded:
    ok = any(action.ok for action in actions if isinstance(action, Finish))
    return RunEnded(now, ok, "" if ok or state.cause is None else state.cause.task)


def _intents(action: Action, state: State, now: float) -> Iterator[Event]:
    match action:
        case Start(task, attempt):
            yield Started(now, task, attempt)
        case Release(task):
            yield Released(now, task, state.tasks[task].attempt)
        case Conclude(task, step):
            yield Concluded(now, task, state.tasks[task].attempt, step)
        case Stop(task, why, _, blame):
            if state.tasks[task].phase is not Phase.STOPPING:
                yield Stopping(now, task, state.tasks[task].attempt, why, blame)


def _act(action: Action, plan: Plan, launcher: Launcher) -> None:
    match action:
        case Start(task, attempt):
            launcher.start(plan.tasks[task], attempt)
        case Release(task):
            launcher.release(plan.tasks[task])
        case Conclude(task, step):
            launcher.conclude(plan.tasks[task], step)
        case Stop(task, _, grace, _):
            launcher.stop(plan.tasks[task], grace)


class Notices:
    """What a person should be told though nobody asked: each thing once, waits again every ten seconds."""

    def __init__(self, plan: Plan, facts: dict[str, Facts]) -> None:
        self.plan, self.facts = plan, facts
        self.heard: dict[str, float] = {}  # when a task last printed something
        self.waiting: list[Wait] = []
        self.due = 0.0
        self._told: dict[object, float] = {}

    def news(self, state: State, now: float, logs: Logs | None) -> Iterator[Event]:
        self.due = now + PULSE
        self.waiting = waits(state, now, self.plan, self.facts)
        for wait in self.waiting:
            if now - self._told.get((wait.whom, wait.who), -WAIT_AGAIN) >= WAIT_AGAIN:
                self._told[wait.whom, wait.who] = now
                yield wait.event(now)
        for key, text, task in self._warnings(state, now, logs):
            if key not in self._told:
                self._told[key] = now
                yield Warned(now, text, task)

    def _warnings(self, state: State, now: float, logs: Logs | None) -> Iterator[tuple[object, str, str]]:
        for setback in state.setbacks:
            said = (
                f"the global step went backwards, {setback.was} -> {setback.now}: the model was made anew or restored"
            )
            yield setback, f"{said}, and what was learned in between is lost", setback.task
        for name, text in evaluator_warnings(state, self.plan):
            yield (name, text), text, name
        if logs and logs.trouble:
            yield "logs", logs.trouble, ""
        cause = state.cause
        if (
            state.high
            and isinstance(cause, Exited)
            and spread(self.plan.tasks[cause.task], self.plan) is EVERYONE
            and state.ended is None
        ):
            yield cause, self._back_to(cause, state), cause.task
        for name, t in state.tasks.items():
            if t.frozen and t.phase in ALIVE:
                yield (
                    (name, "frozen", t.attempt),
                    f"{name} is frozen (SIGSTOP, pid {t.pid}): it lives and does nothing",
                    name,
                )
        for task in stepping(self.plan):
            yield from self._quiet(task.id, state, now)
        for row in idle(state, now, self.plan):
            yield (row.task, "idle", row.gpus), row.text(), row.task
        for name, gpu, who in shared(state):
            yield (name, "shared", gpu, who), f"GPU {gpu} of {name} is used by another process too ({who})", name

    def _back_to(self, cause: Exited, state: State) -> str:
        where = self.plan.run.checkpoints
        if self.plan.run.engine == "muster":
            return (
                f"{cause.task} failed, and its parameters with it: training starts over (it was at step {state.high})"
            )
        if where:
            return f"{cause.task} failed: everyone goes back to the last checkpoint in {where}"
        return (
            f"{cause.task} failed, and no checkpoint folder is set: unless the script has one, training starts over "
            f"at step 0 (it was at {state.high})"
        )

    def _quiet(self, name: str, state: State, now: float) -> Iterator[tuple[object, str, str]]:
        t = state.tasks[name]
        last = max(t.stepped, self.heard.get(name, 0.0), t.started)
        if t.phase in ALIVE and t.phase is not Phase.READY and now - last > self.plan.run.quiet:
            yield (
                (name, "quiet", t.attempt, last),
                f"{name} has neither printed nor made a step for {now - last:.0f} s",
                name,
            )
