"""What to do next: state and time in, actions out. No I/O; the clock is an argument.

Decisions look at what is true, never at what just happened, so a supervisor that died and came back decides exactly as
one that never left.

How far a failure spreads is the heart of parameter-server training, so it is a table. A worker holds nothing that
matters and restarts alone. A ps holds weights and the chief holds the schedule: over TensorFlow's runtime, losing
either sends everyone back to the checkpoint. All-reduce has no bystanders at all.

A run ends for one of the reasons that ``verdict`` gives, in this order: somebody asked for it; it is done; it is lost.
Ending is the same for all: workers first, ps last, since a worker may still be saving what a ps holds.
"""

from collections.abc import Iterator
from enum import Enum

from muster.cluster import Run
from muster.events import Action, Exited, Finish, Mismatch, PortTaken, Release, Start, Stop
from muster.plan import Plan, Task
from muster.state import ALIVE, IDLE, Phase, State, TaskState

ALONE, EVERYONE = "alone", "everyone"
SPREADS = {
    ("v1", "worker"): ALONE,
    ("v1", "ps"): EVERYONE,
    ("v1", "chief"): EVERYONE,
    ("pss", "worker"): ALONE,
    ("pss", "ps"): EVERYONE,
    ("pss", "chief"): EVERYONE,
    ("mwms", "worker"): EVERYONE,
    ("mwms", "chief"): EVERYONE,
    ("muster", "worker"): ALONE,
    ("muster", "chief"): ALONE,
    ("muster", "ps"): EVERYONE,
}

NO_PROGRESS = 3  # failures in a row without the global step growing, once it had grown: more restarts would not help
SAME = 2  # tracebacks of a task in a row that are equal: a bug, not bad luck


class Verdict(Enum):
    """Why a run ends. The value is what the report says."""

    STOPPED = "stopped by the user"
    DONE = "done"
    MISMATCH = "a script claims to be another task"
    PORT = "a port is taken"
    SAME = "the same error twice"
    SPENT = "too many restarts"
    NO_PROGRESS = "restarts bring no progress"


def decide(state: State, now: float, plan: Plan) -> Iterator[Action]:
    """What to do at ``now``. Asked again after every batch of events, so it never repeats what is under way."""
    if (why := verdict(state, now, plan)) is not None:
        yield from _end(state, now, plan, why)
        return
    together = any(state.tasks[t.id].phase is Phase.FAILED and spread(t, plan) is EVERYONE for t in plan.tasks.values())
    alive = {name: t for name, t in state.tasks.items() if t.phase in ALIVE}
    idle = {name: t for name, t in state.tasks.items() if t.phase in IDLE}
    if together:
        cause = next(n for n, t in idle.items() if t.phase is Phase.FAILED and spread(plan.tasks[n], plan) is EVERYONE)
        yield from (
            Stop(n, f"{cause} failed: everyone goes back to the checkpoint", plan.run.grace)
            for n, t in alive.items()
            if t.phase is not Phase.STOPPING
        )
        done = [n for n, t in state.tasks.items() if t.phase is Phase.DONE]
        if alive or now < max(ready_at(t, plan.run) for t in idle.values()):
            return  # everyone out, then everyone in
        yield from (Start(n, state.tasks[n].attempt + 1) for n in [*idle, *done])
        return
    yield from _stalled(state, now, plan)
    yield from (Start(name, t.attempt + 1) for name, t in idle.items() if now >= ready_at(t, plan.run))
    yield from _open_barrier(state, now, plan)


def wake(state: State, now: float, plan: Plan) -> float:
    """The next moment at which ``decide`` could answer differently though nothing happened."""
    run, tasks = plan.run, state.tasks.values()
    moments = [ready_at(t, run) for t in tasks if t.phase in IDLE]
    moments += [t.since + run.barrier for t in tasks if t.phase is Phase.READY]
    if run.stall:
        moments += [max(t.stepped, t.started) + run.stall for t in tasks if t.phase in ALIVE]
    if (ended := done_at(state, plan)) is not None:
        moments.append(ended + run.settle)
    return min((at for at in moments if at > now), default=float("inf"))


def verdict(state: State, now: float, plan: Plan) -> Verdict | None:
    """Why the run is to end, or None while it is to go on."""
    if state.stop is not None:
        return Verdict.STOPPED
    if done_at(state, plan) is not None:
        return Verdict.DONE
    if isinstance(state.cause, Mismatch):
        return Verdict.MISMATCH
    if isinstance(state.cause, PortTaken):
        return Verdict.PORT
    for task in state.tasks.values():
        if task.phase is Phase.FAILED and task.echoes >= SAME:
            return Verdict.SAME
        if task.phase is Phase.FAILED and recent(task, now, plan.run) > plan.run.retries:
            return Verdict.SPENT
    # only while something is down: a task that is back may still make the step grow
    if state.stuck >= NO_PROGRESS and state.high > 0 and any(t.phase is Phase.FAILED for t in state.tasks.values()):
        return Verdict.NO_PROGRESS
    return None


def done_at(state: State, plan: Plan) -> float | None:
    """Since when the run has been done, by its rule; None while it is not."""
    ended = {t.id: state.tasks[t.id].since for t in plan.workers if state.tasks[t.id].phase is Phase.DONE}
    if plan.run.kind == "pss" and state.tasks[plan.chief].phase is Phase.DONE:
        return state.tasks[plan.chief].since
    if plan.run.done == "all-workers":
        return max(ended.values()) if len(ended) == len(plan.workers) else None
    if plan.run.done == "first-worker":
        return min(ended.values(), default=None)
    return ended.get(plan.chief)


def _end(state: State, now: float, plan: Plan, why: Verdict) -> Iterator[Action]:
    alive = [plan.tasks[name] for name, t in state.tasks.items() if t.phase in ALIVE]
    if not alive:
        yield Finish(why is Verdict.DONE)
        return
    said = "the run is done" if why is Verdict.DONE else why.value
    grace = 0.0 if state.stop is not None and state.stop.now else plan.run.grace
    late = why is not Verdict.DONE or now >= (done_at(state, plan) or 0.0) + plan.run.settle
    computing = [task for task in alive if task.role != "ps"]
    if computing and not grace:
        yield from (Stop(task.id, said, 0.0) for task in alive)
    elif computing:
        # A ps serves until the last worker is gone; the others get the time to end by themselves.
        serving = plan.run.kind == "pss"
        yield from (
            Stop(task.id, said, grace)
            for task in computing
            if (late or serving) and state.tasks[task.id].phase is not Phase.STOPPING
        )
        if any(t.finished for t in state.tasks.values()):
            yield from (Stop(t.id, "training is finished", grace) for t in alive if _may_go(t, state))
    else:
        yield from (Stop(task.id, said, grace) for task in alive if state.tasks[task.id].phase is not Phase.STOPPING)


def _may_go(task: Task, state: State) -> bool:
    return task.role == "ps" and state.tasks[task.id].phase is not Phase.STOPPING


def _stalled(state: State, now: float, plan: Plan) -> Iterator[Action]:
    if not plan.run.stall:
        return
    for task in plan.workers:
        t = state.tasks[task.id]
        if t.phase in ALIVE - {Phase.STOPPING, Phase.READY} and now >= max(t.stepped, t.started) + plan.run.stall:
            yield Stop(task.id, f"no step for {plan.run.stall:g} s", plan.run.grace)


def _open_barrier(state: State, now: float, plan: Plan) -> Iterator[Action]:
    """Lets ready workers go once nobody else is still to come, or after the time limit.

    On the first start everybody is waited for: else the first worker up does all the steps. One that comes back finds
    the others at work, which is to say released or gone, and goes at once.
    """
    ready = [task.id for task in plan.workers if state.tasks[task.id].phase is Phase.READY]
    if not ready:
        return
    started = any(state.tasks[t.id].released for t in plan.workers)
    missing = [
        t.id
        for t in plan.workers
        if state.tasks[t.id].phase in (Phase.STARTING, Phase.RUNNING) and not state.tasks[t.id].released
    ]
    waited = now - min(state.tasks[name].since for name in ready)
    if started or not missing or waited >= plan.run.barrier:
        yield from (Release(name) for name in ready)


def spread(task: Task, plan: Plan) -> str:
    """How far a failure of ``task`` spreads: ``alone`` or ``everyone``."""
    kind = plan.run.kind if plan.run.engine == "tensorflow" else "muster"
    role = "chief" if task.id == plan.chief and kind != "muster" else task.role
    return SPREADS[kind, role]


def ready_at(task: TaskState, run: Run) -> float:
    """When an idle task may be started: failed ones wait longer each time."""
    if task.phase is not Phase.FAILED:
        return 0.0
    return task.since + run.backoff * 2.0 ** (recent(task, task.since, run) - 1)


def recent(task: TaskState, now: float, run: Run) -> int:
    return sum(1 for at in task.failures if at > now - run.window)


def failed(state: State) -> Exited | None:
    """The failure that is the cause of the trouble, if it was an exit."""
    return state.cause if isinstance(state.cause, Exited) else None
