"""Where each task sits: its host, its port, its GPUs, and why. Pure.

Where the file gives exact seats, they are taken as they are. Where it gives counts, tasks are placed: ps first on hosts
without GPUs, since a ps computes little and moves every byte; workers where most GPUs are still free; both spread. The
evaluator comes last and takes what is left. It stands beside the training: it is in no other task's cluster, and nobody
dials it (port 0).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from muster.addresses import is_loopback, key
from muster.bound import candidates, free_ports, ports_of
from muster.cluster import ROLES, Cluster, Host, Run, seats
from muster.errors import Refused
from muster.rules import no_evaluator


class Facts(msgspec.Struct, frozen=True):
    """What is known of a host at planning time. None and empty mean: not asked."""

    gpus: tuple[int, ...] | None = None
    busy: frozenset[int] = frozenset()  # ports that something listens on, or that another run has been given
    proxies: dict[str, str] = {}
    no_proxy: str = ""
    cores: int = 0
    threads: str = ""  # TF_NUM_INTRAOP_THREADS as the user has it
    own_name: str = ""  # set where the machine's own name leads to a loopback address: "gpu-a is 127.0.1.1 here"


class Seat(msgspec.Struct, frozen=True):
    role: str
    index: int
    host: Host
    port: int
    gpus: tuple[int, ...]
    why: str


HERE = Host(name="here", address="127.0.0.1")


def place(
    run: Run, cluster: Cluster, facts: Mapping[str, Facts], notes: list[str]
) -> tuple[list[Seat], tuple[Host, ...], bool]:
    """The seats of all tasks, the hosts, and whether the file names the seats. Adds to ``notes`` what a person should
    know. Raises Refused where tasks do not fit."""
    if run.evaluator and run.engine == "muster":
        raise no_evaluator(f"{cluster.source or 'this machine'}: run.evaluator")
    hosts = list(cluster.hosts)
    exact = any(seats(run, job) for job in ("ps", "workers", "chief"))
    placed = list(_exact(run, hosts, cluster) if exact else _placed(run, hosts or [HERE], cluster, facts))
    placed = _deal_gpus(placed, run, facts, cluster, notes)
    if run.evaluator:
        placed = _beside(placed, run, hosts or [HERE], cluster, facts)
    if exact:
        hosts = list({seat.host.name: seat.host for seat in placed}.values())
    _no_loopback_between_hosts([seat for seat in placed if seat.port], cluster)
    return placed, tuple(hosts) or (HERE,), exact


def _count(run: Run, role: str) -> int:
    if role == "chief":
        return int(bool(run.chief) if run.chief is not None else run.kind == "pss" and run.engine == "tensorflow")
    if role == "ps":
        ps = run.ps if run.ps is not None else (0 if run.kind == "mwms" and run.engine == "tensorflow" else 2)
        return ps if isinstance(ps, int) else len(ps)
    return run.workers if isinstance(run.workers, int) else len(run.workers)


def _exact(run: Run, hosts: list[Host], cluster: Cluster) -> Iterator[Seat]:
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
        rows = [n for n, s in enumerate(placed) if s.host.name == name and computes(s, run)]
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


def computes(seat: Seat, run: Run) -> bool:
    return seat.role == "worker" or (seat.role == "chief" and run.kind != "pss")


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
