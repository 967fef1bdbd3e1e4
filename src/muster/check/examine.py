"""A plan, examined on the hosts that it names: what each wants, how to ask it, what the answers tell the planner."""

from collections.abc import Callable, Mapping
from typing import Any

from muster.check.channel import Channel, Pipe, local_argv, ssh_argv
from muster.check.findings import Finding, Job, Wanted
from muster.check.probe import VARIABLES
from muster.check.survey import Survey, survey
from muster.check.verdicts import judge
from muster.cluster import Cluster, Host
from muster.launch.jumps import Turns, ways
from muster.launch.ssh import destination, must_be_here, options
from muster.placement import Facts
from muster.plan import PROXIES, Plan, Task

SHARED = tuple(name for name in VARIABLES if name != "CUDA_VISIBLE_DEVICES")  # the same for all tasks of a host


def wanted(plan: Plan) -> list[Wanted]:
    """What ``plan`` puts on each host."""
    rows = []
    for host in plan.hosts:
        tasks = [task for task in plan.tasks.values() if task.host == host.name]
        if tasks:
            rows.append(_wanted(plan, host, tasks))
    return rows


def _wanted(plan: Plan, host: Host, tasks: list[Task]) -> Wanted:
    runs = [t for t in tasks if t.role != "ps" or plan.run.engine == "tensorflow"]
    return Wanted(
        host=host.name,
        address=tasks[0].address,
        python=tasks[0].python,
        cwd=tasks[0].cwd,
        script=plan.script.path if runs else "",
        checkpoints=plan.run.checkpoints,
        ports={t.id: t.port for t in tasks if t.listens},
        bind=tasks[0].bind,
        bound={t.id: t.bind_port for t in tasks if t.listens and t.bind_port},
        gpus=tuple(gpu for t in tasks for gpu in t.gpus),
        tasks=tuple(t.id for t in tasks),
        env={name: tasks[0].env[name] for name in SHARED if name in tasks[0].env},
    )


def job(plan: Plan, parameters: int = 1_000_000) -> Job:
    assert plan.run.engine and plan.run.kind, "a plan is settled"
    return Job(engine=plan.run.engine, kind=plan.run.kind, parameters=parameters)


def examine(
    cluster: Cluster,
    plan: Plan,
    *,
    pairs: bool = True,
    measure: bool = True,
    within: float = 60.0,
    parameters: int = 1_000_000,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Survey, list[Finding]]:
    """Asks every host of ``plan`` alone and in pairs. ``measure=False``: reach only, for the short form of a run;
    ``pairs=False``: not even that."""
    if cluster.launcher == "ssh":
        must_be_here()
    hosts = {host.name: host for host in plan.hosts}
    rows, about = wanted(plan), job(plan, parameters)

    def opener(row: Wanted) -> Channel:
        if cluster.launcher == "local":
            return Pipe(local_argv(row.python))
        return Pipe(ssh_argv(destination(hosts[row.host]), row.python, options(cluster)))

    pairs = pairs and plan.apart
    turns = Turns(ways(cluster, [hosts[row.host] for row in rows]))
    heard = survey(rows, opener, about, pairs=pairs, measure=measure, within=within, progress=progress, turn=turns.take)
    return heard, judge(rows, heard.facts, heard.pairs, about)


def facts(heard: Mapping[str, Any], plan: Plan) -> dict[str, Facts]:
    """What the planner wants to know of each host, from what the hosts answered."""
    return {host.name: _facts(heard.get(host.name) or {}, plan, host.name) for host in plan.hosts}


def _facts(told: Mapping[str, Any], plan: Plan, host: str) -> Facts:
    def section(name: str) -> Mapping[str, Any]:
        found = told.get(name)
        return found if isinstance(found, Mapping) and not {"late", "broken"} & set(found) else {}

    devices = section("gpus").get("devices")
    environment, names = section("environment"), section("names")
    gpus = None if devices is None else tuple(d["index"] for d in devices if "error" not in d)
    own, found = names.get("own", ""), names.get("found", {})
    answer = found.get(own) if isinstance(found, Mapping) else None
    loop = isinstance(answer, list) and bool(answer) and all(str(a).startswith("127.") for a in answer)
    return Facts(
        gpus=gpus,
        busy=frozenset(int(port) for port, row in section("ports").items() if not row.get("free", True)),
        proxies={name: environment[name] for name in PROXIES if environment.get(name)},
        no_proxy=environment.get("no_proxy", ""),
        cores=int(section("machine").get("cores") or 0),
        own_name=f"{own} is {answer[0]} in its own hosts file" if loop and answer else "",
    )
