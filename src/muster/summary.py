"""How a run went, as one value: the end table, ``--json`` and ``muster status`` all show it. Pure."""

import math
import signal
from collections.abc import Iterator
from typing import Any

import msgspec

from muster.events import Exited, Mismatch, PortTaken
from muster.idle import idle
from muster.plan import Plan
from muster.policy import BAD_REQUEST, Verdict, given_up, never_joined, verdict
from muster.state import ALIVE, Phase, State, TaskState

EXIT_CODES = {"ctrl-c": 130, "sigterm": 143, "stop": 130, "lease": 1}
NO_PROGRESS_EXIT = 3
LEASE = "its hosts, which had heard nothing from the launcher for too long (was it frozen?)"


class TaskSummary(msgspec.Struct, frozen=True):
    task: str
    host: str
    phase: str
    steps: int
    restarts: int
    exit: str
    log: str
    forced: bool = False
    samples: int | None = None
    staleness: float | None = None  # updates by others between a worker's pull and its push: mean, and largest
    staleness_max: int | None = None
    dropped: int = 0
    evaluations: int = 0  # checkpoints that an evaluator has begun, and the newest of them
    evaluated: str = ""
    gpus: dict[str, int | None] = {}  # bytes held on each GPU that it was given; None: nobody knows (yet)


class Summary(msgspec.Struct, frozen=True):
    run: str
    ok: bool
    result: str  # succeeded, failed, or stopped (by the user)
    cause: str
    because: str
    try_: str
    trace: str
    seconds: float
    steps: int
    steps_per_s: float | None
    metrics: dict[str, float]
    tasks: list[TaskSummary]
    exit_code: int
    logs: str = ""
    samples: int | None = None  # in all gradients that were applied
    samples_repeated: int | None = None
    batches: int = 1  # of a worker's batches in one update: in sync the gradients that close a round
    warnings: list[str] = []

    def as_json(self) -> dict[str, Any]:
        told = msgspec.to_builtins(self)
        told["try"] = told.pop("try_")
        told["metrics"] = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return told  # type: ignore[no-any-return]


def summarise(state: State, plan: Plan, now: float, folder: str = "") -> Summary:
    """The run as it stands at ``now`` (seconds since it began)."""
    why = verdict(state, plan)
    ok = state.ended.ok if state.ended else why is Verdict.DONE
    cause, because, try_ = ("", "", "") if ok else _cause(state, plan, why)
    span = state.high_at - state.low_at
    rate = (state.high - state.low) / span if state.low >= 0 and span > 0 and state.high > state.low else None
    return Summary(
        run=state.run,
        ok=ok,
        result="succeeded" if ok else "stopped" if why is Verdict.STOPPED else "failed",
        cause=cause,
        because=because,
        try_=try_,
        trace="" if ok else _trace(state),
        seconds=round(state.ended_at if state.ended else now, 3),
        steps=state.high,
        steps_per_s=round(rate, 1) if rate else None,
        metrics=dict(state.metrics),
        tasks=[_task(name, t, plan, folder) for name, t in state.tasks.items()],
        logs=f"{folder}/logs" if folder else "",
        exit_code=_exit_code(ok, state, why),
        samples=state.data.samples if state.data else None,
        samples_repeated=max(0, state.data.samples - state.data.planned) if state.data else None,
        batches=len(plan.workers) - plan.run.spare if plan.run.engine == "muster" and plan.run.mode == "sync" else 1,
        warnings=_warnings(state, plan, now),
    )


def _task(name: str, t: TaskState, plan: Plan, folder: str) -> TaskSummary:
    task = plan.tasks[name]
    log = f"{folder}/logs/{task.log}" if folder else task.log
    account = t.account
    return TaskSummary(
        task=name,
        host=task.host,
        phase=phase_word(t, task.role),
        steps=t.steps,
        restarts=max(0, t.attempt - 1),
        exit=ending(t),
        log=log,
        forced=t.forced,
        samples=account.samples if account else None,
        staleness=round(account.staleness, 2) if account else None,
        staleness_max=account.staleness_max if account else None,
        dropped=account.dropped if account else 0,
        evaluations=t.evaluations,
        evaluated=t.evaluated,
        gpus={str(gpu): t.gpus.used.get(str(gpu)) if t.gpus else None for gpu in task.gpus},
    )


def phase_word(t: TaskState, role: str) -> str:
    """The phase as the tables show it: a ps at work serves, and what is frozen does not run."""
    if t.frozen and t.phase in ALIVE:
        return "frozen"
    if role == "ps" and (t.phase is Phase.READY or (t.phase is Phase.RUNNING and t.listening)):
        return "serving"
    if role == "evaluator" and t.phase is Phase.RUNNING and t.checkpoint is not None:
        return "evaluating" if t.checkpoint else "waits for a checkpoint"
    return t.phase.value


def ending(t: TaskState) -> str:
    """How a task ended, in a few words."""
    if t.phase is Phase.STOPPED or (t.phase is Phase.STOPPING and t.code is not None):
        return "ended"
    return said_code(t.code) if t.code is not None else ""


def said_code(code: int) -> str:
    """An exit code or a signal, told apart: ``exit 3``, ``SIGSEGV``."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _cause(state: State, plan: Plan, why: Verdict | None) -> tuple[str, str, str]:
    if why is Verdict.STOPPED:
        assert state.stop is not None
        how = {"ctrl-c": "Ctrl-C", "sigterm": "a SIGTERM to the launcher", "stop": "muster stop", "lease": LEASE}
        return f"stopped by {how[state.stop.how]}", "", ""
    if why is Verdict.UNUSED:
        return _unused(never_joined(state, plan), plan)
    event = state.cause
    if event is None:
        return (why.value if why else "not ended"), "", ""
    task = plan.tasks[event.task]
    if isinstance(event, Mismatch):
        return (
            f"{task.id} on {task.host} claims to be {event.claims}",
            f"its script makes Server(job_name, task_index) of {event.claims}, and Muster started it as {task.id}",
            "take job_name and task_index from the command line (--role-flags gives them), not from the file",
        )
    if isinstance(event, PortTaken):
        return (
            f"port {event.port} of {task.id} on {task.host} is taken",
            f"{event.holder} holds it",
            "end that process, or give the task another port",
        )
    assert isinstance(event, Exited)
    if why is Verdict.REFUSED and (rows := _rows(event.tail)):
        return f"{task.id} on {task.host}: {rows[0]}", *rows[1:]
    lived = max(0.0, event.at - state.cause_from)
    what = f"{task.id} on {task.host} ended {lived:.0f} s after it started ({said_code(event.code)})"
    if why in (Verdict.SAME, Verdict.SPENT, Verdict.NO_PROGRESS):
        what += f"; {why.value}"
    return what, _because(event, task.log), _advice(event, plan)


def _unused(name: str, plan: Plan) -> tuple[str, str, str]:
    task, many = plan.tasks[name], len(plan.workers)
    return (
        f"{task.id} on {task.host} ended without having called muster.fit or muster.connect",
        f"so nothing went to the parameter servers: each of the {many} workers trained alone, if it trained",
        "muster.fit(model, ...) in place of model.fit(...); --tf1 for a script of TensorFlow 1; "
        "--engine tensorflow --kind v1 | pss | mwms for TensorFlow's own strategies",
    )


def _rows(tail: str) -> tuple[str, str, str] | None:
    """What an error of ours said at the end of a log: what, because, try."""
    lines = tail.rstrip().splitlines()
    first = next((i for i in range(len(lines) - 1, -1, -1) if not lines[i].startswith("  ")), None)
    if first is None or first == len(lines) - 1:
        return None
    found: dict[str, list[str]] = {}
    for line in lines[first + 1 :]:
        label, text = line[2:12].strip(), line[12:]
        found.setdefault(label or next(reversed(found), ""), []).append(text)
    return lines[first], "\n".join(found.get("because", found.get("at", []))), "\n".join(found.get("try", []))


def _because(event: Exited, log: str) -> str:
    if event.oom:
        return f"the kernel was out of memory and killed it (last lines in {log})"
    if event.error:
        return f"{event.error}   (last lines of {log})"
    if event.code < 0:
        return (
            f"it was killed by {said_code(event.code)} from outside of Muster"
            if event.code in (-9, -15)
            else f"it died of {said_code(event.code)}"
        )
    last = [line for line in event.tail.splitlines() if line.strip()]
    return f"{last[-1][:300]}   (last line of {log})" if last else f"it said nothing; see {log}"


ADVICE = (
    (
        "No module named 'tensorflow'",
        'install TensorFlow for {python}, or name another interpreter: python = "..." in the cluster file',
    ),
    ("No module named 'tf_keras'", "pip install tf_keras for {python}: Keras 3 cannot do this"),
    ("No module named", 'install it for {python}, or name another interpreter: python = "..." in the cluster file'),
    ("Could not start gRPC server", "another process holds its port; give the task another one"),
    ("Address already in use", "another process holds its port; give the task another one"),
    ("ResourceExhausted", "it ran out of memory: a smaller batch, or fewer workers on that host"),
    ("Too many pings", "keep-alive settings of the peers disagree: set GRPC_ARG_KEEPALIVE_TIME_MS alike in env"),
    ("has no attribute 'placeholder'", "this is a TensorFlow 1 script: muster run --tf1"),
    ("has no attribute 'Session'", "this is a TensorFlow 1 script: muster run --tf1"),
    ("module 'tensorflow._api.v2.train' has no attribute", "this is a TensorFlow 1 script: muster run --tf1"),
    ("Collective ops must be configured at program startup", "make the strategy before any other use of TensorFlow"),
)


def _advice(event: Exited, plan: Plan) -> str:
    if event.lost:
        host = plan.tasks[event.task].host
        return f"is {host} up? muster check says; --retries and --window say how long a run waits for a host to return"
    said = event.error + event.trace + event.tail
    for sign, advice in ADVICE:
        if sign in said:
            return advice.format(python=plan.tasks[event.task].python)
    return f"muster logs {event.task}"


def _trace(state: State) -> str:
    return state.cause.trace if isinstance(state.cause, Exited) else ""


def _warnings(state: State, plan: Plan, now: float) -> list[str]:
    told = [
        f"the global step went backwards, {s.was} -> {s.now} ({s.task}, at {s.at:.0f} s): what it had learned is lost"
        for s in state.setbacks[:5]
    ]
    told += [text for _, text in evaluator_warnings(state, plan)]
    return told + [row.text() for row in idle(state, now, plan)]


def evaluator_warnings(state: State, plan: Plan) -> Iterator[tuple[str, str]]:
    """(task, sentence) for what has gone wrong beside a training that goes on, or went well, all the same."""
    for task in plan.of("evaluator"):
        t, over = state.tasks[task.id], state.ended is not None and state.ended.ok
        if (why := given_up(t, plan.run)) is not None:
            said = t.error or said_code(t.code or 0)
            yield task.id, f"{task.id} is given up, and training goes on without it: {why.value} ({said}; {task.log})"
        elif over and t.forced:
            last = f"; the last that it began: {t.evaluated}" if t.evaluated else ""
            if t.checkpoint is None:
                last = " (a loop of one's own asks muster.training_ended(), as tf.train.checkpoints_iterator does)"
            limit = f"{plan.run.last_evaluation:g} s after training (last_evaluation)"
            yield task.id, f"{task.id} was ended {limit}, since it had not ended by itself{last}"
        elif over and t.phase is Phase.DONE and t.checkpoint is not None and not t.evaluations:
            yield task.id, f"{task.id} found no checkpoint to evaluate: does it look where {plan.chief} saves?"


def _exit_code(ok: bool, state: State, why: Verdict | None) -> int:
    if ok:
        return 0
    if why is Verdict.STOPPED and state.stop is not None:
        return EXIT_CODES[state.stop.how]
    return {Verdict.NO_PROGRESS: NO_PROGRESS_EXIT, Verdict.REFUSED: BAD_REQUEST}.get(why, 1) if why else 1
