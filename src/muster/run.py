"""One run from request to summary: check, place, reserve ports, start, supervise, show, leave nothing behind."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from muster.check.examine import examine
from muster.check.examine import facts as found_facts
from muster.check.findings import Finding
from muster.cluster import Cluster
from muster.errors import RunFailed
from muster.events import Event, PortTaken, RunEnded, RunStarted, Warned
from muster.journal import Journal, Logs, RunFolder, born, create, planning_lock, ports_in_use
from muster.launch import local
from muster.launch.bundle import bundle
from muster.launch.jumps import room, ways
from muster.launch.pipe import AgentLauncher, Doorbell, HostsUnreached
from muster.launch.ssh import Ssh, verdict
from muster.launch.sweep import sweep_run
from muster.placement import Facts
from muster.plan import Plan, Script, Task, check_task_name, make_plan
from muster.planning import check_here, plan_here
from muster.policy import Verdict
from muster.policy import verdict as verdict_of
from muster.ps.wire import task_key
from muster.signals import signals
from muster.state import State
from muster.summary import Summary, summarise
from muster.supervise import Watcher, supervise

OURS = ("TF_CONFIG", "MUSTER_TASK", "MUSTER_CLUSTER", "MUSTER_ATTEMPT", "MUSTER_RUN", "MUSTER_FD")  # never inherited
PORT_TRIES = 3
LEASE, DETACHED_LEASE = 10.0, 120.0  # seconds without a heartbeat after which a remote agent ends its tasks

Watchers = Callable[[Plan, RunFolder], Sequence[Watcher]]


@dataclass(frozen=True)
class Request:
    """What the user asked for. ``passed`` are variables that travel to the tasks, ``only`` has the terminal."""

    cluster: Cluster
    script: Script
    only: str = ""
    passed: dict[str, str] = field(default_factory=dict)
    check: bool = True
    detached: bool = False
    tell: Callable[[str], None] = lambda text: None  # what happens before there is a screen


class CheckFailed(Exception):
    """The short check found errors, so nothing was started."""

    def __init__(self, plan: Plan, findings: list[Finding]) -> None:
        super().__init__(f"{len(findings)} finding(s)")
        self.plan, self.findings = plan, findings


def run(request: Request, watchers: Watchers, bells: Sequence[Doorbell] = ()) -> tuple[Plan, Summary, RunFolder]:
    """Runs a script to its end. A port taken meanwhile is replaced where the plan had chosen it.

    Raises Refused for what cannot be, CheckFailed for what the hosts answered, RunFailed for hosts out of reach.
    """
    avoid: frozenset[int] = frozenset()
    for tried in range(PORT_TRIES):
        plan, facts, folder = _prepare(request, avoid)
        state = carry_out(request, plan, folder, facts, watchers, bells)
        port = lost_port(state, plan)
        if not port or tried + 1 == PORT_TRIES:
            break
        avoid |= {port}
        request.tell(f"port {port} was taken meanwhile; the next plan goes round it")
    return plan, summarise(state, plan, state.now, str(folder.path)), folder


def lost_port(state: State, plan: Plan) -> int:
    """The port for want of which a run ended before its first step, where another one would do; else 0."""
    anew = verdict_of(state, plan) is Verdict.PORT and state.stop is None and not plan.exact and state.high == 0
    return state.cause.port if anew and isinstance(state.cause, PortTaken) else 0


def _prepare(request: Request, avoid: frozenset[int]) -> tuple[Plan, dict[str, Facts], RunFolder]:
    there = None if request.cluster.launcher == "local" else ask_hosts(request, avoid)
    with planning_lock(request.tell) as root:
        busy = avoid | ports_in_use(root)
        if there is None:
            plan, facts = plan_here(request.cluster, request.script, busy)
            check_here(plan)
            plan = _strategy_here(request, plan)
        else:
            plan, facts = plan_there(request, busy, *there)
        if request.only:
            check_task_name(request.only, plan)
        plan = _with_passed(request, plan)
        # On disk the cluster file has its full path: muster fetch reads it again, from wherever.
        return plan, facts, create(root, replace(plan, source=plan.source and os.path.abspath(plan.source)))


def _with_passed(request: Request, plan: Plan) -> Plan:
    tasks = {name: replace(task, env={**request.passed, **task.env}) for name, task in plan.tasks.items()}
    return replace(plan, tasks=tasks)


def _strategy_here(request: Request, plan: Plan) -> Plan:
    """A strategy that cannot train with the TensorFlow and Keras of this machine is refused, or noted where that is not
    sure. Other scripts need no check here: what they lack they say themselves, once. Raises CheckFailed."""
    if not request.check or plan.run.engine != "tensorflow" or plan.run.kind == "v1":
        return plan
    _, found = examine(request.cluster, plan, pairs=False, measure=False, within=10.0)
    found = [finding for finding in found if finding.kind in ("legacy keras", "kind")]
    if any(finding.severity == "error" for finding in found):
        raise CheckFailed(plan, found)
    return replace(plan, notes=(*plan.notes, *(f"{f.what} ({f.because}); {f.try_}" for f in found)))


def ask_hosts(request: Request, avoid: frozenset[int]) -> tuple[dict[str, Facts], list[str]]:
    """What the hosts of a first plan answer, and what of it a person should know. Raises CheckFailed."""
    known = {host.name: Facts(busy=avoid) for host in request.cluster.hosts}
    plan = make_plan(request.cluster, request.script, os.getcwd(), known, python="python3")
    if not request.check:
        return known, []
    request.tell(f"asking {len({task.host for task in plan.tasks.values()})} hosts over ssh whether they are fit")
    heard, findings = examine(request.cluster, _with_passed(request, plan), measure=False, within=30.0)
    # The plan itself goes round a proxy, and round a port that is taken unless the file names that port.
    mended = {"proxy"} if plan.exact else {"proxy", "port"}
    if any(f.severity != "warning" and f.kind not in mended for f in findings):
        raise CheckFailed(plan, findings)
    notes = [f"{f.host}: {f.what} ({f.because})" for f in findings if f.kind not in mended]
    return found_facts(heard.facts, plan), notes


def plan_there(
    request: Request, busy: frozenset[int], known: dict[str, Facts], notes: list[str]
) -> tuple[Plan, dict[str, Facts]]:
    """The plan over ssh, with what the hosts have answered. ``busy``: ports to leave alone besides."""
    facts = {name: replace(fact, busy=fact.busy | busy) for name, fact in known.items()}
    plan = make_plan(request.cluster, request.script, os.getcwd(), facts, python="python3")
    return replace(plan, notes=(*plan.notes, *notes)), facts


def carry_out(
    request: Request,
    plan: Plan,
    folder: RunFolder,
    facts: dict[str, Facts],
    watchers: Watchers,
    bells: Sequence[Doorbell],
) -> State:
    """Supervises ``plan`` to its end and makes sure that nothing of the run is alive afterwards."""
    journal, logs = Journal(folder.journal), Logs(folder.logs, plan)
    watching = list(watchers(plan, folder))
    first: list[Event] = [RunStarted(0.0, folder.id, time.time(), os.getpid(), born(os.getpid()))]
    with signals() as bell:
        try:
            launcher = _launcher(request, plan, folder, [bell, *bells])

            def connect() -> list[Event]:
                heard = _opened(launcher, plan) if plan.launcher != "local" else []
                for key in bells:
                    if hasattr(key, "attach"):
                        key.attach(launcher, plan.tasks[request.only])
                return heard

            try:
                return supervise(
                    plan, launcher, journal, logs=logs, watchers=watching, facts=facts, first=first, connect=connect
                )
            except RunFailed as failed:
                with contextlib.suppress(RunFailed):  # it may be the journal itself that has no room
                    journal.append([Warned(launcher.now(), str(failed)), RunEnded(launcher.now(), False)])
                raise
        finally:
            for watcher in watching:
                if hasattr(watcher, "close"):
                    watcher.close()
            sweep_run(folder.id)
            journal.close()
            logs.close()


def _launcher(request: Request, plan: Plan, folder: RunFolder, bells: Sequence[Doorbell]) -> AgentLauncher:
    hello = Keys(plan, folder.id)
    if plan.launcher == "local":
        code = folder.path / "code.zip"
        code.write_bytes(bundle())
        return AgentLauncher(
            plan.hosts[:1], local.connect, run=folder.id, path=str(code), hello=hello, drop=OURS,
            foreground=request.only, doorbells=bells, one_for_all=True, gpu_idle=plan.run.gpu_idle,
        )  # fmt: skip
    used = {task.host for task in plan.tasks.values()}
    hosts = [host for host in plan.hosts if host.name in used]
    return AgentLauncher(
        hosts, Ssh(request.cluster, "python3"), run=folder.id,
        may_dial=partial(room, ways(request.cluster, hosts)),
        code=bundle(), hello=hello, lease=DETACHED_LEASE if request.detached else LEASE, drop=OURS,
        foreground=request.only, doorbells=bells, remote=True, gpu_idle=plan.run.gpu_idle,
    )  # fmt: skip


class Keys:
    """What each task is told first: a ps the secret of the run, a worker only its own key; and their certificates.

    Certificates are made where ps and workers sit on different hosts and ``encrypt`` is on.
    """

    def __init__(self, plan: Plan, run: str) -> None:
        self._secret = os.urandom(32)
        self._authority = None
        if plan.run.engine == "muster" and plan.run.encrypt and plan.apart:
            from muster.launch.authority import Authority

            self._authority = Authority(run)

    def __call__(self, task: Task) -> dict[str, Any]:
        told: dict[str, Any] = {"key": task_key(self._secret, task.id).hex()}
        if task.role == "ps":
            told = {"secret": self._secret.hex()}
        if self._authority is not None:
            told["tls"] = self._authority.papers(task.id)
        return told


def _opened(launcher: AgentLauncher, plan: Plan) -> list[Event]:
    try:
        return launcher.open()
    except HostsUnreached as lost:
        hosts = {host.name: host for host in plan.hosts}
        told = [verdict(hosts[name], said, code) for name, (said, code) in lost.failures.items()]
        what, because, try_, _ = told[0]
        if len(told) > 1:  # each for its own reason, perhaps
            because = "\n".join(f"{what}: {because}" for what, because, _, _ in told)
            what = f"{len(told)} hosts are out of reach: {', '.join(lost.failures)}"
        raise RunFailed(what, at=plan.source, because=because, try_=try_) from None
