"""What to do next: state and time in, actions out. No I/O; the clock is an argument.

Decisions look at what is true, never at what just happened, so a supervisor that died and came back decides exactly as
one that never left.

How far a failure spreads is the heart of parameter-server training, so it is a table. A worker holds nothing that
matters and restarts alone. A ps holds weights and the chief holds the schedule: over TensorFlow's runtime, losing
either sends everyone back to the checkpoint. All-reduce has no bystanders at all.

A run ends for one of the reasons that ``verdict`` gives, in this order: somebody asked for it, unless it was lost
already; it is done; it is lost.
Ending is the same for all: workers first, ps last, since a worker may still be saving what a ps holds.

The evaluator stands beside all this. Nobody needs it to train, so it neither goes back with the others nor ends a run
by failing: out of restarts, it is given up, and training goes on. When training has ended well it is told so, and gets
a limited time for the last checkpoint.
"""

from collections.abc import Iterable, Iterator
from enum import Enum

from muster.cluster import Run
from muster.events import Action, Conclude, Exited, Finish, Mismatch, PortTaken, Release, Start, Stop
from muster.plan import Plan, Task
from muster.state import ALIVE, IDLE, Phase, State, TaskState

ALONE, EVERYONE = "alone", "everyone"
SPREADS = {
    ("v1", "worker"): ALONE,
    ("v1", "ps"): EVERYONE,
    ("v1", "chief"): EVERYONE,
    ("v1", "evaluator"): ALONE,
    ("pss", "worker"): ALONE,
    ("pss", "ps"): EVERYONE,
    ("pss", "chief"): EVERYONE,
    ("pss", "evaluator"): ALONE,
    ("mwms", "worker"): EVERYONE,
    ("mwms", "chief"): EVERYONE,
    ("mwms", "evaluator"): ALONE,
    ("muster", "worker"): ALONE,
    ("muster", "chief"): ALONE,
    ("muster", "ps"): EVERYONE,
}

NO_PROGRESS = 3  # failures of a task in a row without the global step growing, once it had: restarts do not help
AWAY = 10.0  # seconds before the first try on a host that was lost: a reboot, a cable, a switch take their time
SAME = 2  # tracebacks of a task in a row, within the window, that are equal: a bug, not bad luck


BAD_REQUEST = 2  # the exit code of a script that was refused (or given bad arguments): the next try gets the same


class Verdict(Enum):
    """Why a run ends. The value is what the report says."""

    STOPPED = "stopped by the user"
    DONE = "done"
    MISMATCH = "a script claims to be another task"
    PORT = "a port is taken"
    UNUSED = "a script that never calls Muster"
    REFUSED = "a request that cannot be met"
    SAME = "the same error twice"
    SPENT = "too many restarts"
    NO_PROGRESS = "restarts bring no progress"


def decide(state: State, now: float, plan: Plan) -> Iterator[Action]:
    """What to do at ``now``. Asked again after every batch of events, so it never repeats what is under way."""
    if (why := verdict(state, plan)) is not None:
        yield from _end(state, now, plan, why)
        return
    over = training_over(state, plan)
    failed = [plan.tasks[name] for name in state.members[Phase.FAILED]]
    causes = [task.id for task in failed if spread(task, plan) is EVERYONE and not (over and task.role == "ps")]
    if causes:
        yield from _together(state, now, plan, causes[0])
        yield from _starts(state, now, plan, [task.id for task in plan.of("evaluator")])
        return
    yield from _stalled(state, now, plan)
    if over:
        yield from (Stop(t.id, "training is finished", plan.run.grace) for t in plan.of("ps") if _may_go(t, state))
    idle = among(state, IDLE)
    yield from _starts(state, now, plan, [name for name in idle if not (over and plan.tasks[name].role == "ps")])
    yield from _open_barrier(state, now, plan)


def _starts(state: State, now: float, plan: Plan, names: Iterable[str]) -> Iterator[Action]:
    for name in names:
        t = state.tasks[name]
        if t.phase in IDLE and now >= ready_at(t, plan.run) and given_up(t, plan.run) is None:
            yield Start(name, t.attempt + 1)


def _together(state: State, now: float, plan: Plan, cause: str) -> Iterator[Action]:
    """Everyone out, then everyone in: those that had ended well too, since the others need them."""
    together = [task.id for task in plan.of("ps", "chief", "worker")]
    alive = [name for name in together if state.tasks[name].phase in ALIVE]
    for name in alive:
        if state.tasks[name].phase is not Phase.STOPPING:
            yield Stop(name, f"{cause} failed: {_all_again(plan)}", plan.run.grace)
    latest = max(ready_at(state.tasks[name], plan.run) for name in together)
    if not alive and now >= latest:
        yield from (Start(name, state.tasks[name].attempt + 1) for name in together)


def _all_again(plan: Plan) -> str:
    return "everyone goes back to the checkpoint" if plan.run.engine == "tensorflow" else "everyone starts again"


def among(state: State, phases: Iterable[Phase]) -> list[str]:
    """The tasks that are in one of ``phases``."""
    wanted = set(phases)
    return [name for phase in Phase if phase in wanted for name in state.members[phase]]


def wake(state: State, now: float, plan: Plan) -> float:
    """The next moment at which ``decide`` could answer differently though nothing happened."""
    run = plan.run
    moments = [ready_at(state.tasks[name], run) for name in among(state, IDLE)]
    moments += [state.tasks[name].since + run.barrier for name in state.members[Phase.READY]]
    if run.stall:
        moments += [moved_at(t) + run.stall for t in state.tasks.values() if t.phase in ALIVE]
    if (ended := done_at(state, plan)) is not None:
        moments += [ended + run.settle, *last_words(state, plan)]
    return min((at for at in moments if at > now), default=float("inf"))


def verdict(state: State, plan: Plan) -> Verdict | None:
    """Why the run is to end, or None while it is to go on."""
    done = done_at(state, plan) is not None
    if state.stop is not None:
        return (None if done else _lost(state, plan, state.stop_at)) or Verdict.STOPPED
    if never_joined(state, plan):
        return Verdict.UNUSED
    return Verdict.DONE if done else _lost(state, plan)


def _lost(state: State, plan: Plan, by: float = float("inf")) -> Verdict | None:
    """Why the run cannot go well any more, as things stood at ``by``: what fails later fails of the ending."""
    if isinstance(state.cause, (Mismatch, PortTaken)) and state.cause.at <= by:
        return Verdict.MISMATCH if isinstance(state.cause, Mismatch) else Verdict.PORT
    for name in state.members[Phase.FAILED]:
        task = state.tasks[name]
        if plan.tasks[name].role == "evaluator" or task.since > by:
            continue  # training needs no evaluator
        if (why := given_up(task, plan.run)) is not None:
            return why
        if task.stuck >= NO_PROGRESS and state.high > 0:
            return Verdict.NO_PROGRESS
    return None


def given_up(task: TaskState, run: Run) -> Verdict | None:
    """Why a task that failed is not started again, if it is not. However long ago that was: a reason does not lapse
    while the others end, and an evaluator would fail the same way an hour later."""
    if task.phase is not Phase.FAILED:
        return None
    if task.code == BAD_REQUEST and not task.steps and not task.evaluations:
        return Verdict.REFUSED
    if task.echoes >= SAME and task.failures[-1] - task.failures[-2] <= run.window:
        return Verdict.SAME
    return Verdict.SPENT if recent(task, task.since, run) > run.retries else None


def never_joined(state: State, plan: Plan) -> str:
    """A worker that ended well and had not asked for the parameter servers: all of them have trained alone, or not."""
    if plan.run.engine != "muster":
        return ""
    done = (t.id for t in plan.workers if state.tasks[t.id].phase is Phase.DONE)
    return next((name for name in done if not state.tasks[name].joined), "")


def done_at(state: State, plan: Plan) -> float | None:
    """Since when the run has been done, by its rule; None while it is not."""
    chief = state.tasks[plan.chief]
    if plan.run.done == "chief" or plan.run.kind == "pss":
        return chief.since if chief.phase is Phase.DONE else None
    ended = [state.tasks[t.id].since for t in plan.workers if state.tasks[t.id].phase is Phase.DONE]
    if plan.run.done == "all-workers":
        return max(ended) if len(ended) == len(plan.workers) else None
    return min(ended, default=None)


def ended_at(state: State, plan: Plan) -> float | None:
    """Since when the last checkpoint is there: the run is done, and the chief, who saves, is gone too."""
    done, chief = done_at(state, plan), state.tasks[plan.chief]
    return None if done is None or chief.phase in ALIVE else max(done, chief.since)


def last_words(state: State, plan: Plan) -> list[float]:
    """Until when the evaluator may work on the last checkpoint; nothing while training goes on, or without one."""
    ended = ended_at(state, plan) if plan.run.evaluator else None
    return [] if ended is None else [ended + plan.run.last_evaluation]


def training_over(state: State, plan: Plan) -> bool:
    """Whether the ps may go though the run goes on: all that step have said that they are finished, or have ended."""
    return all(state.tasks[t.id].finished or state.tasks[t.id].phase is Phase.DONE for t in stepping(plan))


def stepping(plan: Plan) -> list[Task]:
    """The tasks that make steps: the coordinator of a ParameterServerStrategy makes those of its workers."""
    return [plan.tasks[plan.chief]] if plan.run.kind == "pss" else plan.workers


def _end(state: State, now: float, plan: Plan, why: Verdict) -> Iterator[Action]:
    alive = [plan.tasks[name] for name in among(state, ALIVE)]
    to_come = why is Verdict.DONE and evaluation_to_come(state, now, plan)
    if not alive and not to_come:
        yield Finish(why is Verdict.DONE)
        return
    said = "the run is done" if why is Verdict.DONE else why.value
    grace = plan.run.grace
    late = why is not Verdict.DONE or now >= (done_at(state, plan) or 0.0) + plan.run.settle
    computing = [task for task in alive if task.role not in ("ps", "evaluator")]
    if state.stop is not None and state.stop.now:
        yield from (Stop(task.id, said, 0.0) for task in alive)
        return
    yield from _last_evaluation(state, now, plan) if to_come else _end_evaluator(alive, state, plan, why)
    if computing:
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
        yield from (Stop(task.id, said, grace) for task in alive if _may_go(task, state))


def evaluation_to_come(state: State, now: float, plan: Plan) -> bool:
    """Whether a run that is done waits for its evaluator."""
    rest = [state.tasks[task.id] for task in plan.of("evaluator")] if plan.run.evaluator else []
    rest = [t for t in rest if t.phase not in (Phase.DONE, Phase.STOPPED) and given_up(t, plan.run) is None]
    return bool(rest) and all(now < until for until in last_words(state, plan))


def _last_evaluation(state: State, now: float, plan: Plan) -> Iterator[Action]:
    names = [task.id for task in plan.of("evaluator")]
    yield from _starts(state, now, plan, names)
    if ended_at(state, plan) is not None:
        told = [name for name in names if state.tasks[name].concluded is not None]
        running = [name for name in names if state.tasks[name].phase is Phase.RUNNING]
        yield from (Conclude(name, state.high) for name in running if name not in told)


def _end_evaluator(alive: Iterable[Task], state: State, plan: Plan, why: Verdict) -> Iterator[Action]:
    said = why.value
    if why is Verdict.DONE:
        said = f"training ended {plan.run.last_evaluation:g} s ago, and it has not ended by itself"
    for task in alive:
        if task.role == "evaluator" and state.tasks[task.id].phase is not Phase.STOPPING:
            yield Stop(task.id, said, plan.run.grace)


def _may_go(task: Task, state: State) -> bool:
    return task.role == "ps" and state.tasks[task.id].phase in ALIVE - {Phase.STOPPING}


def _stalled(state: State, now: float, plan: Plan) -> Iterator[Action]:
    if not plan.run.stall:
        return
    for task in stepping(plan):
        t = state.tasks[task.id]
        if t.phase in ALIVE - {Phase.STOPPING, Phase.READY} and now >= moved_at(t) + plan.run.stall:
            yield Stop(task.id, f"no step for {plan.run.stall:g} s", plan.run.grace, blame=True)


def moved_at(task: TaskState) -> float:
    """Since when a task owes a step: its last one, or when it came up, or when the start barrier let it go."""
    return max(task.stepped, task.started, task.since)


def _open_barrier(state: State, now: float, plan: Plan) -> Iterator[Action]:
    """Lets ready workers go once nobody else is still to come, or after the time limit.

    On the first start everybody is waited for: else the first worker up does all the steps. One that comes back finds
    the others at work, which is to say released or gone, and goes at once. The evaluator is neither held nor counted.
    """
    at_door = [plan.tasks[name] for name in state.members[Phase.READY] if plan.tasks[name].role != "ps"]
    yield from (Release(task.id) for task in at_door if task.role == "evaluator")
    ready = [task.id for task in at_door if task.role != "evaluator"]
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
    kind = plan.run.kind or "v1" if plan.run.engine == "tensorflow" else "muster"
    role = "chief" if task.id == plan.chief and kind != "muster" else task.role
    return SPREADS[kind, role]


def ready_at(task: TaskState, run: Run) -> float:
    """When an idle task may be started: failed ones wait longer each time, and longer still for a host that is away."""
    if task.phase is not Phase.FAILED:
        return 0.0
    first = max(run.backoff, AWAY) if task.host_lost else run.backoff
    return task.since + first * 2.0 ** (recent(task, task.since, run) - 1)


def recent(task: TaskState, now: float, run: Run) -> int:
    return sum(1 for at in task.failures if at > now - run.window)


def failed(state: State) -> Exited | None:
    """The failure that is the cause of the trouble, if it was an exit."""
    return state.cause if isinstance(state.cause, Exited) else None
