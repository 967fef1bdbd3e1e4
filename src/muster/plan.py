"""Who runs where, and with what. Pure: the same cluster, script and facts always give the same plan.

A plan is a value: ``muster plan`` prints it, the run folder keeps it, the supervisor carries it out. Nothing is decided
after it, so what it shows is what happens.

Where the file gives exact seats, they are taken as they are. Where it gives counts, tasks are placed: ps first on hosts
without GPUs, since a ps computes little and moves every byte; workers where most GPUs are still free; both spread. The
evaluator comes last and takes what is left. It stands beside the training: it is in no other task's cluster, and nobody
dials it (port 0).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from muster.addresses import Address, is_loopback, key
from muster.bound import apart, bound, candidates, free_ports, own_seat, ports_of
from muster.cluster import ROLES, Cluster, Host, Run, no_evaluator, seats, settled
from muster.errors import Refused

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")  # gRPC reads the lower-case names, for localhost too


class Facts(msgspec.Struct, frozen=True):
    """What is known of a host at planning time. None and empty mean: not asked."""

    gpus: tuple[int, ...] | None = None
    busy: frozenset[int] = frozenset()  # ports that something listens on, or that another run has been given
    proxies: dict[str, str] = {}
    no_proxy: str = ""
    cores: int = 0
    threads: str = ""  # TF_NUM_INTRAOP_THREADS as the user has it
    own_name: str = ""  # set where the machine's own name leads to a loopback address: "gpu-a is 127.0.1.1 here"


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


class Seat(msgspec.Struct, frozen=True):
    role: str
    index: int
    host: Host
    port: int
    gpus: tuple[int, ...]
    why: str


HERE = Host(name="here", address="127.0.0.1")


def make_plan(
    cluster: Cluster, script: Script, cwd: str, facts: Mapping[str, Facts] | None = None, python: str = sys.executable
) -> Plan:
    """Places the tasks of ``script`` on ``cluster``. Raises Refused where they do not fit."""
    facts = facts or {}
    run = settled(cluster.run)
    if run.evaluator and run.engine == "muster":
        raise no_evaluator(f"{cluster.source or 'this machine'}: run.evaluator")
    notes: list[str] = [*cluster.warnings]
    hosts = list(cluster.hosts)
    exact = any(seats(run, job) for job in ("ps", "workers", "chief"))
    placed = list(_exact(run, hosts, cluster, facts) if exact else _placed(run, hosts or [HERE], cluster, facts))
    placed = _deal_gpus(placed, run, facts, cluster, notes)
    if run.evaluator:
        placed = _beside(placed, run, hosts or [HERE], cluster, facts)
    if exact:
        hosts = list({seat.host.name: seat.host for seat in placed}.values())
    chief = "chief/0" if any(seat.role == "chief" for seat in placed) else "worker/0"
    addresses = {
        role: [str(Address(s.host.address, s.port)) for s in placed if s.role == role]
        for role in ("chief", "ps", "worker")
        if any(s.role == role for s in placed)
    }
    _no_loopback_between_hosts([seat for seat in placed if seat.port], cluster)
    notes += _say(placed, run, chief, facts)
    tasks = {}
    many = apart(cluster.launcher, [(seat.host.name, seat.host.address) for seat in placed])
    near = _near(placed, run) if many else None
    for seat in placed:
        known = facts.get(seat.host.name, Facts())
        threads = _threads(seat, placed, run, known)
        task = _task(seat, run, script, chief, addresses, cwd, python, known, many, threads, near)
        tasks[task.id] = task
    name = cluster.name or Path(script.path).stem or "run"
    return Plan(
        name, cluster.launcher, script, run, tuple(hosts) or (HERE,), chief, tasks, tuple(notes), exact, cluster.source
    )


def _near(placed: list[Seat], run: Run) -> dict[str, list[int]] | None:
    """The ps on each host, where the address does not tell: two containers may have the same one."""
    hosts = {(seat.host.name, key(seat.host.address)) for seat in placed}
    if run.engine != "muster" or len({address for _, address in hosts}) == len(hosts):
        return None
    return {name: [s.index for s in placed if s.role == "ps" and s.host.name == name] for name, _ in hosts}


def _count(run: Run, role: str) -> int:
    if role == "chief":
        return int(bool(run.chief) if run.chief is not None else run.kind == "pss" and run.engine == "tensorflow")
    if role == "ps":
        ps = run.ps if run.ps is not None else (0 if run.kind == "mwms" and run.engine == "tensorflow" else 2)
        return ps if isinstance(ps, int) else len(ps)
    return run.workers if isinstance(run.workers, int) else len(run.workers)


def _exact(run: Run, hosts: list[Host], cluster: Cluster, facts: Mapping[str, Facts]) -> Iterator[Seat]:
    strangers: list[Host] = []
    for role, job in ROLES:
        for index, address in enumerate(seats(run, job)):
            at = f"{cluster.source}: run.{job}[{index}]"
            host = next(iter(candidates(address, [*hosts, *strangers], f"{role}/{index}", at)), None)
            if host is None:
                if cluster.hosts:
                    known = ", ".join(h.address for h in cluster.hosts)
                    raise Refused(
                        f"{role}/{index} sits on {address.host}, which is no host of the cluster",
                        at=at,
                        because=f"[[hosts]] has {known}",
                        try_="add a [[hosts]] table for it, or drop all [[hosts]] tables",
                    )
                host = Host(name=address.host, address=address.host)
                strangers.append(host)
            yield Seat(
                role, index, msgspec.structs.replace(host, address=address.host), address.port, (), "the file says so"
            )


def _placed(run: Run, hosts: list[Host], cluster: Cluster, facts: Mapping[str, Facts]) -> Iterator[Seat]:
    at = f"{cluster.source or 'this machine'}: run"
    asked = sum(_count(run, role) for role in ("chief", "ps", "worker"))
    free = free_ports(run, hosts, {name: known.busy for name, known in facts.items()})
    room = {h.name: h.slots if h.slots is not None else len(ports_of(h, run)) for h in hosts}
    if asked > sum(room.values()):
        raise Refused(
            f"{asked} tasks do not fit on {sum(room.values())} seats",
            at=at,
            because=", ".join(f"{h.name} has {room[h.name]}" for h in hosts[:6]) + (" ..." if len(hosts) > 6 else ""),
            try_="fewer tasks, more hosts, more slots, or a wider range of ports",
        )
    used: Counter[str] = Counter()
    gpus_left = {h.name: len(_gpus_of(h, facts) or ()) for h in hosts}

    def take(role: str, index: int, host: Host, why: str) -> Seat:
        used[host.name] += 1
        port = next(free[host.name], None)
        if port is None:
            raise Refused(
                f"no port is free for {role}/{index} on {host.name}",
                at=f"{at}.ports" if not host.ports else f"{cluster.source}: hosts {host.name}.ports",
                because=f"{host.ports or run.ports} is in use",
                try_='a wider range: ports = "20000-29999"',
            )
        return Seat(role, index, host, port, (), why)

    def roomy() -> list[Host]:
        return [h for h in hosts if used[h.name] < room[h.name]]

    def compute(role: str, index: int) -> Seat:
        host = max(roomy(), key=lambda h: (gpus_left[h.name] > 0, -used[h.name], gpus_left[h.name]))
        why = (
            "most GPUs free here"
            if gpus_left[host.name] > 0 and len(hosts) > 1
            else "fewest tasks here"
            if len(hosts) > 1
            else "one host"
        )
        gpus_left[host.name] -= run.gpus_per_worker if run.gpus_per_worker is not None else 1
        return take(role, index, host, why)

    for index in range(_count(run, "ps")):
        host = min(roomy(), key=lambda h: (used[h.name], gpus_left[h.name] > 0))
        spare = (
            "a host without GPUs" if gpus_left[host.name] == 0 and any(gpus_left.values()) else "spread over the hosts"
        )
        yield take("ps", index, host, spare if len(hosts) > 1 else "one host")
    for role in ("chief", "worker"):
        for index in range(_count(run, role)):
            yield compute(role, index)


def _free_ports(ports: range, hosts: list[Host], facts: Mapping[str, Facts]) -> dict[str, Iterator[int]]:
    """By host; hosts that share an address (containers behind several sshd) share its ports."""
    busy: dict[str, set[int]] = {}
    for host in hosts:
        busy.setdefault(key(host.address), set()).update(facts.get(host.name, Facts()).busy)
    of = {address: iter([port for port in ports if port not in taken]) for address, taken in busy.items()}
    return {host.name: of[key(host.address)] for host in hosts}


def _gpus_of(host: Host, facts: Mapping[str, Facts]) -> tuple[int, ...] | None:
    """The GPUs that tasks may have here: those of the file, else those that the host itself shows."""
    found = facts.get(host.name, Facts()).gpus
    if host.gpus is None:
        return found
    if isinstance(host.gpus, list):
        return tuple(host.gpus)
    return found[: host.gpus] if found is not None and len(found) >= host.gpus else tuple(range(host.gpus))


def _deal_gpus(
    placed: list[Seat], run: Run, facts: Mapping[str, Facts], cluster: Cluster, notes: list[str]
) -> list[Seat]:
    dealt: dict[int, tuple[int, ...]] = {}
    for name in dict.fromkeys(seat.host.name for seat in placed):
        rows = [n for n, s in enumerate(placed) if s.host.name == name and _computes(s, run)]
        host = next(seat.host for seat in placed if seat.host.name == name)
        have, found = _gpus_of(host, facts) or (), facts.get(name, Facts()).gpus
        if found is not None and (missing := [g for g in have if g not in found]):
            raise Refused(
                f"{name} has no GPU {', '.join(map(str, missing))}",
                at=f"{cluster.source}: hosts {name}.gpus",
                because=f"it shows {len(found)} GPU(s)" + (f": {', '.join(map(str, found))}" if found else ""),
                try_=f"gpus = {len(found)}",
            )
        each = run.gpus_per_worker
        if each and each * len(rows) > len(have):
            raise Refused(
                f"{len(rows)} workers on {name} want {each * len(rows)} GPUs, and it has {len(have)}",
                at=f"{cluster.source or name}: run.gpus_per_worker",
                because=f"gpus_per_worker is {each}",
                try_=(f"gpus_per_worker = {len(have) // len(rows)}, or " if len(have) >= len(rows) else "")
                + "fewer workers there, or leave it out to share the GPUs that there are",
            )
        if each is None:
            each = len(have) // len(rows) if rows and len(have) >= len(rows) else 0
            if have and 0 < len(have) < len(rows):
                notes.append(
                    f"{len(rows)} workers share {len(have)} GPU(s) on {name}: each gets one, and some get the same one"
                )
                dealt |= {row: (have[n % len(have)],) for n, row in enumerate(rows)}
                continue
        dealt |= {row: have[n * each : (n + 1) * each] for n, row in enumerate(rows)}
    if not any(dealt.values()):
        known = [facts[s.host.name].gpus for s in placed if s.host.name in facts]
        none = known and all(gpus == () for gpus in known)
        notes.append("no GPU here: the workers compute on the CPU" if none else "no GPU is dealt out")
    return [msgspec.structs.replace(seat, gpus=dealt.get(n, ())) for n, seat in enumerate(placed)]


def _beside(
    placed: list[Seat], run: Run, hosts: list[Host], cluster: Cluster, facts: Mapping[str, Facts]
) -> list[Seat]:
    """``placed`` and the evaluator: where the file says, else where a GPU is left over, else where fewest tasks are."""
    named = [seat.host for seat in placed if seat.role == "evaluator"]
    others = [seat for seat in placed if seat.role != "evaluator"]
    used = Counter(seat.host.name for seat in others)
    known = {seat.host.name: seat.host for seat in others} if not cluster.hosts else {h.name: h for h in hosts}
    roomy = named or [h for h in known.values() if h.slots is None or used[h.name] < h.slots]
    if not roomy:
        raise Refused(
            "no host has room for the evaluator",
            at=f"{cluster.source or 'this machine'}: run.evaluator",
            because=", ".join(f"{h.name} has {h.slots}" for h in hosts[:6]) + (" ..." if len(hosts) > 6 else ""),
            try_="one more slot, one more host, or a worker less",
        )
    left = {h.name: _left_over(h, others, run, cluster, facts) for h in roomy}
    host = min(roomy, key=lambda h: (not left[h.name], used[h.name]))
    gpus = left[host.name]
    why = "the file says so" if named else "fewest tasks here" if len(roomy) > 1 else "one host"
    if gpus:
        why = "a GPU that no worker has" if not named else f"{why}; a GPU that no worker has"
    elif any(seat.gpus for seat in others):
        why += "; the workers have the GPUs, so it evaluates on the CPU"
    return [*others, Seat("evaluator", 0, host, 0, gpus, why)]


def _left_over(
    host: Host, others: list[Seat], run: Run, cluster: Cluster, facts: Mapping[str, Facts]
) -> tuple[int, ...]:
    """GPUs for an evaluator on ``host``: as many as a worker has at most, and none that one has."""
    near = [s for s in others if cluster.launcher == "local" or key(s.host.address) == key(host.address)]
    taken = {gpu for seat in near for gpu in seat.gpus}
    there = facts.get(host.name, Facts()).gpus
    free = [g for g in _gpus_of(host, facts) or () if g not in taken and (there is None or g in there)]
    each = run.gpus_per_worker if run.gpus_per_worker is not None else max([1, *(len(s.gpus) for s in others)])
    return tuple(free[:each])


def _computes(seat: Seat, run: Run) -> bool:
    return seat.role == "worker" or (seat.role == "chief" and run.kind != "pss")


def _threads(seat: Seat, placed: list[Seat], run: Run, known: Facts) -> int:
    """Threads of a worker's TensorFlow where several share the cores of a host; 0: TensorFlow's own choice, all.

    Left alone, each of N workers starts a thread for every core, and they spend their time changing places.
    """
    beside = sum(_computes(other, run) for other in placed if other.host.name == seat.host.name)
    if seat.role == "evaluator" and beside:
        beside += 1  # it works now and then, so the workers do not keep cores free for it; it leaves them theirs
    elif not _computes(seat, run):
        return 0
    return max(1, known.cores // beside) if known.cores and not known.threads and beside > 1 else 0


def _no_loopback_between_hosts(placed: list[Seat], cluster: Cluster) -> None:
    hosts = {seat.host.name: seat.host for seat in placed}
    if len(hosts) < 2 or cluster.launcher == "local":
        return
    for host in hosts.values():
        if is_loopback(host.address):
            raise Refused(
                f"{host.name} has a loopback address in a cluster of several hosts",
                at=cluster.source,
                because=f"at {host.address} every other host finds itself",
                try_="the address that the others dial",
            )


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
    gpus = sum(len(seat.gpus) for seat in placed if seat.role != "evaluator")
    if gpus > 1 and run.kind != "mwms":
        yield (
            f"{gpus} GPUs: for a dense model all-reduce (--kind mwms) moves less than parameter servers do; "
            "these are for large embeddings, async training, and machines that come and go"
        )
    names = dict.fromkeys(seat.host.name for seat in placed)
    yield from _say_evaluator(placed, run, chief)
    for seat in {seat.host.name: seat for seat in placed if _computes(seat, run)}.values():
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


def _task(
    seat: Seat,
    run: Run,
    script: Script,
    chief: str,
    addresses: dict[str, list[str]],
    cwd: str,
    python: str,
    facts: Facts,
    many: bool,
    threads: int,
    near: dict[str, list[int]] | None,
) -> Task:
    me = f"{seat.role}/{seat.index}"
    at = bound(seat.host, seat.port)
    moved = bool(seat.port) and at != Address(seat.host.address, seat.port)
    mine = own_seat(addresses, seat.role, seat.index, seat.host, at) if moved else addresses
    role_of: dict[str, Any] = {
        "cluster": addresses if run.engine == "muster" else mine,
        "chief": chief,
        "engine": run.engine,
        "kind": run.kind,
        "mode": run.mode,
        "spare": run.spare,
        "max_staleness": run.max_staleness,
        "checkpoints": run.checkpoints,
        "evaluator": bool(run.evaluator),
    }
    if moved and run.engine == "muster":
        role_of["bind"] = str(at)
    if near is not None:
        role_of["near"] = near.get(seat.host.name, [])
    env = {
        "MUSTER_TASK": me,
        "MUSTER_CLUSTER": json.dumps(role_of),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the driver counts, and so the file; CUDA's own order: the fastest first
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "PYTHONUNBUFFERED": "1",
        # not INTEROP as well: with one such thread, a worker that serves a coordinator locks up
        **({"TF_NUM_INTRAOP_THREADS": str(threads)} if threads else {}),
        **seat.host.env,
    }
    if run.engine == "tensorflow":
        env["TF_CONFIG"] = json.dumps({"cluster": mine, "task": {"type": seat.role, "index": seat.index}})
    if facts.proxies:
        env["no_proxy"] = _no_proxy({**addresses, "own": [str(at)]}, seat.host.env.get("no_proxy", facts.no_proxy))
    interpreter = seat.host.python or python
    return Task(
        id=me,
        role=seat.role,
        index=seat.index,
        host=seat.host.name,
        address=seat.host.address,
        port=seat.port,
        gpus=seat.gpus,
        python=interpreter,
        cwd=seat.host.cwd or cwd,
        argv=_argv(seat, run, script, interpreter),
        env=env,
        why=seat.why,
        bind=at.host if moved else "",
        bind_port=at.port if moved else 0,
        listens=bool(seat.port) and (run.engine == "tensorflow" or (seat.role == "ps" and many)),
    )


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
