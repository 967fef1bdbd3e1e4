"""Who runs where, and with what. Pure: the same cluster, script and facts always give the same plan.

A plan is a value: ``muster plan`` prints it, the run folder keeps it, the supervisor carries it out. Nothing is decided
after it, so what it shows is what happens.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from muster.addresses import Address, key
from muster.bound import apart, bound, own_seat
from muster.cluster import Cluster, Host, Run, settled
from muster.errors import Refused
from muster.placement import Facts, Seat, computes, place

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")  # gRPC reads the lower-case names, for localhost too


class Script(msgspec.Struct, frozen=True):
    """What the user wants run."""

    path: str
    args: tuple[str, ...] = ()


class Task(msgspec.Struct, frozen=True):
    id: str  # worker/1
    role: str
    index: int
    host: str
    address: str
    port: int
    gpus: tuple[int, ...]
    python: str
    cwd: str
    argv: tuple[str, ...]
    env: dict[str, str]
    why: str
    listens: bool = True  # on its port: tasks of Muster's own engine need none within one host
    bind: str = ""  # where it listens, if that is not what others dial: the address,
    bind_port: int = 0  # and the port

    @property
    def where(self) -> str:
        return str(Address(self.address, self.port)) if self.port else self.address

    @property
    def bound(self) -> Address:
        """Where it listens itself; what others dial leads there."""
        return Address(self.bind or self.address, self.bind_port or self.port)

    @property
    def log(self) -> str:
        return f"{self.role}-{self.index}.log"


class Plan(msgspec.Struct, frozen=True):
    name: str
    launcher: str
    script: Script
    run: Run
    hosts: tuple[Host, ...]
    chief: str
    tasks: dict[str, Task]
    notes: tuple[str, ...] = ()
    exact: bool = False  # the file names the ports, so another free one will not do
    source: str = ""

    def of(self, *roles: str) -> list[Task]:
        return [task for task in self.tasks.values() if task.role in roles]

    @property
    def apart(self) -> bool:
        """Whether tasks reach one another over a network, and not all within one machine."""
        return apart(self.launcher, [(task.host, task.address) for task in self.tasks.values()])

    @property
    def workers(self) -> list[Task]:
        """All that compute: the workers, and the chief where it is one more of them."""
        return self.of("worker") if self.run.kind == "pss" else self.of("chief", "worker")


def make_plan(
    cluster: Cluster, script: Script, cwd: str, facts: Mapping[str, Facts] | None = None, python: str = sys.executable
) -> Plan:
    """Places the tasks of ``script`` on ``cluster``. Raises Refused where they do not fit."""
    facts = facts or {}
    run = settled(cluster.run)
    notes: list[str] = [*cluster.warnings]
    placed, hosts, exact = place(run, cluster, facts, notes)
    chief = "chief/0" if any(seat.role == "chief" for seat in placed) else "worker/0"
    addresses = {
        role: [str(Address(s.host.address, s.port)) for s in placed if s.role == role]
        for role in ("chief", "ps", "worker")
        if any(s.role == role for s in placed)
    }
    notes += _say(placed, run, chief, facts)
    many = apart(cluster.launcher, [(seat.host.name, seat.host.address) for seat in placed])
    job = _Job(run, script, chief, addresses, cwd, python, many, _near(placed, run) if many else None)
    tasks = {}
    for seat in placed:
        known = facts.get(seat.host.name, Facts())
        task = _task(seat, job, known, _threads(seat, placed, run, known))
        tasks[task.id] = task
    name = cluster.name or Path(script.path).stem or "run"
    return Plan(name, cluster.launcher, script, run, hosts, chief, tasks, tuple(notes), exact, cluster.source)


def _near(placed: list[Seat], run: Run) -> dict[str, list[int]] | None:
    """The ps on each host, where the address does not tell: two containers may have the same one."""
    hosts = {(seat.host.name, key(seat.host.address)) for seat in placed}
    if run.engine != "muster" or len({address for _, address in hosts}) == len(hosts):
        return None
    return {name: [s.index for s in placed if s.role == "ps" and s.host.name == name] for name, _ in hosts}


def _threads(seat: Seat, placed: list[Seat], run: Run, known: Facts) -> int:
    """Threads of a worker's TensorFlow where several share the cores of a host; 0: TensorFlow's own choice, all.

    Left alone, each of N workers starts a thread for every core, and they spend their time changing places.
    """
    beside = sum(computes(other, run) for other in placed if other.host.name == seat.host.name)
    if seat.role == "evaluator" and beside:
        beside += 1  # it works now and then, so the workers do not keep cores free for it; it leaves them theirs
    elif not computes(seat, run):
        return 0
    return max(1, known.cores // beside) if known.cores and not known.threads and beside > 1 else 0


def _say(placed: list[Seat], run: Run, chief: str, facts: Mapping[str, Facts]) -> Iterator[str]:
    counts = Counter(seat.role for seat in placed)
    if chief == "worker/0":
        yield "worker/0 is the chief (no separate one is asked for)"
    if counts["ps"] and counts["worker"] + counts["chief"] > 8 * counts["ps"]:
        yield f"{counts['worker']} workers on {counts['ps']} ps: the ps may be the bottleneck; one for four is usual"
    if run.mode != "async" and run.engine == "tensorflow":
        yield f"mode = {run.mode} is for Muster's own engine: how a TensorFlow script updates is written in the script"
    if run.mode == "sync" and run.spare:
        yield f"sync with spare = {run.spare}: up to {run.spare} gradient(s) a round come late and are dropped"
    gpus = len({(seat.host.name, gpu) for seat in placed if seat.role != "evaluator" for gpu in seat.gpus})
    if gpus > 1 and run.kind != "mwms":
        yield (
            f"{gpus} GPUs: for a dense model all-reduce (--kind mwms) moves less than parameter servers do; "
            "these are for large embeddings, async training, and machines that come and go"
        )
    names = dict.fromkeys(seat.host.name for seat in placed)
    yield from _say_evaluator(placed, run, chief)
    for seat in {seat.host.name: seat for seat in placed if computes(seat, run)}.values():
        known = facts.get(seat.host.name, Facts())
        if threads := _threads(seat, placed, run, known):
            yield f"workers share {known.cores} cores of {seat.host.name}: TensorFlow gets {threads} thread(s) in each"
    if run.engine == "tensorflow" and len({seat.host.address for seat in placed}) > 1:
        yield "TensorFlow's ports take any graph from anybody who reaches them: keep this network closed"
    for name in names if run.engine == "tensorflow" else ():
        known = facts.get(name, Facts())
        if known.proxies:
            yield (
                f"{', '.join(known.proxies)} is set on {name}, and gRPC would send cluster traffic there: "
                "the cluster's addresses are added to no_proxy"
            )


def _say_evaluator(placed: list[Seat], run: Run, chief: str) -> Iterator[str]:
    host = {f"{seat.role}/{seat.index}": seat.host.name for seat in placed}
    if host.get("evaluator/0", host[chief]) != host[chief] and not run.checkpoints:
        yield (
            f"evaluator/0 on {host['evaluator/0']} reads what {chief} on {host[chief]} saves: the folder must be one "
            'that both see (with checkpoints = "...", muster check looks at it)'
        )


class _Job(msgspec.Struct, frozen=True):
    """What the tasks of a plan have in common. ``many``: they reach one another over a network."""

    run: Run
    script: Script
    chief: str
    addresses: dict[str, list[str]]
    cwd: str
    python: str
    many: bool
    near: dict[str, list[int]] | None


def _task(seat: Seat, job: _Job, facts: Facts, threads: int) -> Task:
    at = bound(seat.host, seat.port)
    moved = bool(seat.port) and at != Address(seat.host.address, seat.port)
    mine = own_seat(job.addresses, seat.role, seat.index, seat.host, at) if moved else job.addresses
    env = _environment(seat, job, threads)
    env["MUSTER_CLUSTER"] = json.dumps(_role(seat, job, mine, str(at) if moved else ""))
    if job.run.engine == "tensorflow":
        env["TF_CONFIG"] = json.dumps({"cluster": mine, "task": {"type": seat.role, "index": seat.index}})
    if facts.proxies:
        env["no_proxy"] = _no_proxy({**job.addresses, "own": [str(at)]}, seat.host.env.get("no_proxy", facts.no_proxy))
    interpreter = seat.host.python or job.python
    return Task(
        id=f"{seat.role}/{seat.index}",
        role=seat.role,
        index=seat.index,
        host=seat.host.name,
        address=seat.host.address,
        port=seat.port,
        gpus=seat.gpus,
        python=interpreter,
        cwd=seat.host.cwd or job.cwd,
        argv=_argv(seat, job.run, job.script, interpreter),
        env=env,
        why=seat.why,
        bind=at.host if moved else "",
        bind_port=at.port if moved else 0,
        listens=bool(seat.port) and (job.run.engine == "tensorflow" or (seat.role == "ps" and job.many)),
    )


def _environment(seat: Seat, job: _Job, threads: int) -> dict[str, str]:
    """What any task gets; what the file says for its host comes last, and wins."""
    return {
        "MUSTER_TASK": f"{seat.role}/{seat.index}",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the driver counts, and so the file; CUDA's own order: the fastest first
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "PYTHONUNBUFFERED": "1",
        # not INTEROP as well: with one such thread, a worker that serves a coordinator locks up
        **({"TF_NUM_INTRAOP_THREADS": str(threads)} if threads else {}),
        **seat.host.env,
    }


def _role(seat: Seat, job: _Job, mine: dict[str, list[str]], bind: str) -> dict[str, Any]:
    """MUSTER_CLUSTER: what a task has to know of the job and of its own place in it."""
    run = job.run
    told: dict[str, Any] = {
        "cluster": job.addresses if run.engine == "muster" else mine,
        "chief": job.chief,
        "engine": run.engine,
        "kind": run.kind,
        "mode": run.mode,
        "spare": run.spare,
        "max_staleness": run.max_staleness,
        "checkpoints": run.checkpoints,
        "evaluator": bool(run.evaluator),
    }
    if bind and run.engine == "muster":
        told["bind"] = bind
    if job.near is not None:
        told["near"] = job.near.get(seat.host.name, [])
    return told


def _argv(seat: Seat, run: Run, script: Script, python: str) -> tuple[str, ...]:
    if run.engine == "muster" and seat.role == "ps":
        return (python, "-m", "muster.ps")
    flags = (f"--job_name={seat.role}", f"--task_index={seat.index}") if run.role_flags or run.tf1 else ()
    if not script.path.endswith(".py"):
        return (script.path, *flags, *script.args)
    start = (python, "-m", "muster.train.start", *(["--tf1"] if run.tf1 else []))
    return (*start, script.path, *flags, *script.args)


def _no_proxy(addresses: dict[str, list[str]], before: str) -> str:
    """gRPC matches exact spellings only: every host as the cluster spells it, and this machine's own names."""
    hosts = [address.rpartition(":")[0].strip("[]") for row in addresses.values() for address in row]
    parts = [p for p in before.split(",") if p.strip()] + ["localhost", "127.0.0.1", "::1"] + hosts
    return ",".join(dict.fromkeys(parts))


def check_task_name(name: str, plan: Plan) -> Task:
    """The task called ``name``. Raises Refused, with the size of the job and its addresses."""
    if name in plan.tasks:
        return plan.tasks[name]
    role, slash, _ = name.partition("/")
    peers = plan.of(role)
    if slash and peers:
        raise Refused(
            f"there is no {name}",
            at=plan.source or plan.name,
            because=f"{role} has {len(peers)} task(s), 0 to {len(peers) - 1}: " + ", ".join(p.where for p in peers[:8]),
            try_=", ".join(p.id for p in peers[:8]),
        )
    raise Refused(
        f"there is no task {name!r}", at=plan.source or plan.name, try_="one of: " + ", ".join(list(plan.tasks)[:12])
    )
