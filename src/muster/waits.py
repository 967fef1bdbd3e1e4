"""Silence has words: who waits for whom, where, since when, and the likeliest reason.

The commonest report of this field is that everybody waits and nobody says for whom. A worker over TensorFlow's runtime
needs every ps, and the chief's initial values; all-reduce needs every worker; a coordinator needs everybody. A task is
at the bottom of a wait if it is needed and is not there yet. Pure: state, time and plan in, rows out; the screen and
``muster status`` both show exactly these rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.events import Waiting
from muster.placement import Facts
from muster.plan import PROXIES, Plan, Task
from muster.policy import ended_at, given_up, ready_at
from muster.state import ALIVE, Phase, State, TaskState

PATIENCE = 5.0  # seconds of silence before we speak


@dataclass(frozen=True)
class Wait:
    who: tuple[str, ...]
    whom: tuple[str, ...]
    where: tuple[str, ...]  # host and address of each of whom
    since: float
    why: str

    def text(self, now: float) -> str:
        """One sentence: who waits, for whom and where, since when, and most likely why."""
        verb = "waits" if len(self.who) == 1 else "wait"
        named = list(self.whom)
        if len(named) <= 2:
            named = [f"{whom} ({where})" for whom, where in zip(self.whom, self.where, strict=True)]
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        whom = f"{', '.join(named[:5])}{more}"
        return f"{', '.join(self.who)} {verb} for {whom}, {now - self.since:.0f} s so far: {self.why}"

    def event(self, now: float) -> Waiting:
        return Waiting(now, ", ".join(self.who), ", ".join(self.whom), ", ".join(self.where), self.since, self.why)


def waits(state: State, now: float, plan: Plan, facts: dict[str, Facts] | None = None) -> list[Wait]:
    """Every wait longer than PATIENCE, one row for each task that is waited for."""
    rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for task in plan.tasks.values():
        mine = state.tasks[task.id]
        if mine.phase not in ALIVE or mine.phase is Phase.STOPPING or mine.step >= 0:
            continue
        if not _up(mine) or task.role == "evaluator":
            continue  # it is not waiting for others: it has not come up itself, or needs none of them
        for whom, since, why in _missing(task, state, now, plan, facts or {}):
            rows.setdefault((whom.id, why), []).append((task.id, max(since, mine.started)))
    found = []
    for (whom_id, why), who in rows.items():
        since = min(at for _, at in who)
        if now - since >= PATIENCE:
            found.append(_wait(tuple(name for name, _ in who), plan.tasks[whom_id], since, why))
    late = [*_absent(state, now, plan, {wait.whom[0] for wait in found}), *_last_evaluation(state, now, plan)]
    return _merged(found + late)


def _wait(who: tuple[str, ...], task: Task, since: float, why: str) -> Wait:
    return Wait(who, (task.id,), (f"{task.host}, {task.where}",), since, why)


def _merged(rows: list[Wait]) -> list[Wait]:
    """Rows of the same waiters for the same reason as one."""
    by: dict[tuple[tuple[str, ...], str], Wait] = {}
    for row in rows:
        if other := by.get((row.who, row.why)):
            row = Wait(row.who, other.whom + row.whom, other.where + row.where, min(other.since, row.since), row.why)
        by[row.who, row.why] = row
    return list(by.values())


def _absent(state: State, now: float, plan: Plan, told: set[str]) -> list[Wait]:
    """Tasks that nobody is up to wait for yet, and that are late themselves: the run waits for them."""
    rows = []
    others = state.tasks.values() if plan.run.engine == "muster" else ()
    for task in plan.tasks.values():
        mine = state.tasks[task.id]
        coming = mine.phase in (Phase.STARTING, Phase.RUNNING) and not (_up(mine) or mine.step >= 0)
        if task.role == "evaluator":
            continue  # nobody needs it, and it has no port to show that it is up
        if coming and task.id not in told and now - mine.started >= PATIENCE and not any(t.step >= 0 for t in others):
            rows.append(_wait(("the run",), task, mine.started, _why_down(task, state, now, plan)))
    return rows


def _last_evaluation(state: State, now: float, plan: Plan) -> Iterator[Wait]:
    """Training has ended, and the run goes on for its evaluator alone."""
    ended = ended_at(state, plan) if plan.run.evaluator else None
    if ended is None or now - ended < PATIENCE or state.ended is not None:
        return
    for task in plan.of("evaluator"):
        t = state.tasks[task.id]
        if t.phase in ALIVE or (t.phase is Phase.FAILED and given_up(t, plan.run) is None):
            told = what_it_evaluates(t, ready_at(t, plan.run) - now)
            limit = f"it gets {plan.run.last_evaluation:g} s (last_evaluation)"
            yield _wait(("the run",), task, ended, f"training has ended; {told}; {limit}")


def what_it_evaluates(t: TaskState, again: float = 0.0) -> str:
    """What an evaluator is about, as a part of a sentence. ``again``: seconds until a failed one is started again."""
    if t.phase is Phase.FAILED:
        return f"it ended ({t.error or _code(t.code)}) and is started again in {max(0.0, again):.0f} s"
    if t.phase is Phase.STOPPING:
        return "it is being ended"
    if t.checkpoint is None:
        return "it has not said yet what it evaluates"
    if t.checkpoint:
        return f"it evaluates {t.checkpoint.rpartition('/')[2]}"
    return "it waits for the next checkpoint" if t.evaluations else "it waits for the first checkpoint"


def _missing(
    task: Task, state: State, now: float, plan: Plan, facts: dict[str, Facts]
) -> Iterator[tuple[Task, float, str]]:
    me = state.tasks[task.id]
    needed = [peer for peer in _needs(task, plan) if peer.id != task.id]
    down = [peer for peer in needed if not _up(state.tasks[peer.id]) and state.tasks[peer.id].phase is not Phase.DONE]
    for peer in down:
        yield peer, _down_since(peer, state), _why_down(peer, state, now, plan)
    if down or task.role == "ps":
        return
    if me.phase is Phase.READY:
        for peer in plan.workers:
            other = state.tasks[peer.id]
            if other.phase in (Phase.STARTING, Phase.RUNNING) and not other.released:
                yield peer, me.since, "it has not reached the start barrier: " + _what_it_does(peer, state, now, plan)
        return
    if plan.run.engine == "muster":
        yield from _not_joined(me, state, now, plan)
        return
    if me.released or plan.run.kind != "v1":
        return
    chief = state.tasks[plan.chief]
    if (
        task.id != plan.chief
        and chief.phase in ALIVE
        and chief.phase is not Phase.READY
        and not chief.released
        and chief.step < 0
    ):
        yield plan.tasks[plan.chief], me.started, "it is up and has not initialised the variables yet"
    elif needed and now - me.started > 3 * PATIENCE:
        yield needed[0], me.started, _why_unreached(task, needed[0], plan, facts)


def _not_joined(me: TaskState, state: State, now: float, plan: Plan) -> Iterator[tuple[Task, float, str]]:
    """Over our own parameter servers a worker waits for the chief to declare, and for all at the start barrier."""
    for peer in plan.workers if not me.released else ():
        other = state.tasks[peer.id]
        if other.phase in (Phase.STARTING, Phase.RUNNING) and not (other.joined or other.released):
            yield peer, other.started, _what_it_does(peer, state, now, plan)


def _up(task: TaskState) -> bool:
    """It can be reached, as far as its agent or the task itself says."""
    return task.listening or task.released or task.joined or task.phase is Phase.READY


def _needs(task: Task, plan: Plan) -> list[Task]:
    """The tasks whose servers ``task`` must reach before it can take a step."""
    if plan.run.engine != "tensorflow":
        return plan.of("ps") if task.role != "ps" else []
    if plan.run.kind == "mwms":
        return plan.workers
    if plan.run.kind == "pss":
        return plan.of("ps", "worker") if task.role == "chief" else []
    return [] if task.role == "ps" else plan.of("ps") + ([plan.tasks[plan.chief]] if task.id != plan.chief else [])


def _down_since(task: Task, state: State) -> float:
    t = state.tasks[task.id]
    return t.started if t.phase in ALIVE else t.since


def _why_down(task: Task, state: State, now: float, plan: Plan) -> str:
    t = state.tasks[task.id]
    if t.taken is not None:
        return f"port {t.taken.port} is held by {t.taken.holder}"
    if t.phase is Phase.FAILED:
        again = max(0.0, ready_at(t, plan.run) - now)
        return f"it ended ({t.error or _code(t.code)}); it is started again in {again:.0f} s"
    if t.phase is Phase.DONE:
        return "it has ended well"
    if t.phase is Phase.STOPPING or t.phase is Phase.STOPPED:
        return "it is being ended"
    if t.phase is Phase.WAITING:
        return "it has not been started"
    return _what_it_does(task, state, now, plan)


def _what_it_does(task: Task, state: State, now: float, plan: Plan) -> str:
    t = state.tasks[task.id]
    if t.frozen:
        return f"it is frozen (SIGSTOP, pid {t.pid})"
    age = now - t.started
    if plan.run.engine == "muster":
        if task.role == "ps":
            return f"started {age:.0f} s ago and not ready yet"
        guess = "; importing TensorFlow takes a few seconds" if age < 20 else ""
        return f"started {age:.0f} s ago and has not come to muster.fit or muster.connect yet{guess}"
    if not t.listening:
        guess = "importing TensorFlow takes a few seconds" if age < 20 else "does its script make a Server?"
        return f"started {age:.0f} s ago and not listening yet; {guess}"
    return f"it listens, and has made no session in {age:.0f} s"


def _why_unreached(task: Task, peer: Task, plan: Plan, facts: dict[str, Facts]) -> str:
    known = facts.get(task.host, Facts())
    covered = task.env.get("no_proxy", "").split(",")
    set_here = [name for name in PROXIES if task.env.get(name) or known.proxies.get(name)]
    if set_here and peer.address not in covered:
        return f"{set_here[0]} is set for {task.id}, and gRPC sends cluster traffic to that proxy"
    peers_facts = facts.get(peer.host, Facts())
    if peers_facts.own_name and peer.host != task.host:
        return peers_facts.own_name
    return "both are up and do not reach each other: a firewall, or an address that leads elsewhere"


def _code(code: int | None) -> str:
    return "no exit code" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
