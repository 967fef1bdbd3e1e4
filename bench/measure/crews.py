"""Who is measured: the processes of one engine, and how a window of them is taken.

All crews of a block are started once and stay; between its windows a crew costs nothing. Two ways to get there. A
*driven* crew waits for orders: each window begins with the start weights, at one moment for all workers, and ends after
so many seconds (async) or rounds (sync). A *held* crew runs for ever and is stopped and continued by signals: for
scripts that cannot pause by themselves.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import figures, meter
from bench.measure.figures import Curve
from bench.measure.tasks import START, Died, Task, ports
from bench.measure.workloads import Workload
from muster.launch.authority import Authority
from muster.ps import wire


@dataclass
class Window:
    """What one side did in one window. ``cpu`` and ``bytes``: per update, seconds of processor and bytes over TCP.

    ``others``: cores that were busy with something else meanwhile.
    ``busy``: the processor seconds of the workers and of the ps per update. ``phases``: ms of a worker's step.
    """

    side: str
    rate: float
    steps: int
    cpu: float
    busy: dict[str, float]
    bytes: float | None
    others: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    curve: Curve = field(default_factory=lambda: figures.curve([]))


class Crew:
    """``sides``: what can be measured of it. ``servers`` are ps that must be up first."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self.work, self.folder = work, folder
        self.sides: list[str] = []
        self.workers: list[Task] = []
        self.servers: dict[str, list[Task]] = {}  # ps, by side

    def window(self, side: str, seconds: float) -> Window:
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until every worker can step."""

    def end(self) -> None:
        for task in [*self.workers, *(task for tasks in self.servers.values() for task in tasks)]:
            task.end()

    def _measured(self, side: str, act: Callable[[], tuple[float, int, dict[str, float], Curve]]) -> Window:
        ps, workers = [t.pid for t in self.servers.get(side, ())], [t.pid for t in self.workers]
        before = [meter.cpu(ps), meter.cpu(workers), meter.sent([*ps, *workers])]
        began, all_before = time.monotonic(), meter.all_work()
        rate, steps, phases, curve = act()
        seconds, all_work = time.monotonic() - began, meter.all_work() - all_before
        after = [meter.cpu(ps), meter.cpu(workers), meter.sent([*ps, *workers])]
        used = [float(b - a) / max(steps, 1) if a is not None and b is not None else None
                for a, b in zip(before, after, strict=True)]  # fmt: skip
        busy = {"ps": used[0] or 0.0, "workers": used[1] or 0.0}
        others = max(0.0, all_work - sum(busy.values()) * max(steps, 1)) / seconds
        return Window(side, rate, steps, sum(busy.values()), busy, used[2], others, phases, curve)


class Driven(Crew):
    """``sync``: windows are counted in rounds, since nobody may leave before the others."""

    def __init__(self, work: Workload, folder: Path, sync: Collection[str] = ()) -> None:
        super().__init__(work, folder)
        self.sync = set(sync)
        self.seen: dict[str, float] = {}  # rounds per second, from the last window

    def ready(self) -> None:
        for worker in self.workers:
            self.sides = list(worker.hear(START)["ready"])

    def window(self, side: str, seconds: float) -> Window:
        steps = 0
        if side in self.sync:
            if side not in self.seen:
                self._run(side, 0.0, self._reset(side), 5)  # the first round of all builds functions
                self._run(side, 0.0, self._reset(side), 30)
            steps = max(10, int(self.seen[side] * seconds))
        begun = self._reset(side)
        return self._measured(side, lambda: self._run(side, seconds, begun, steps))

    def rounds(self, side: str, steps: int) -> Window:
        """A window of so many steps, whatever time they take."""
        begun = self._reset(side)
        return self._measured(side, lambda: self._run(side, 0.0, begun, steps))

    def _reset(self, side: str) -> int:
        first, *others = self.workers
        first.tell({"do": "reset", "side": side, "first": True})
        begun = int(first.hear(START)["step"])
        for worker in others:
            worker.tell({"do": "reset", "side": side, "first": False})
        for worker in others:
            worker.hear(START)
        return begun

    def _run(self, side: str, seconds: float, begun: int, steps: int = 0) -> Any:
        logs = [self.folder / f"log-{n}.npy" for n in range(len(self.workers))]
        at = time.monotonic() + 0.05
        for worker, log in zip(self.workers, logs, strict=True):
            order = {"do": "run", "side": side, "at": at, "seconds": seconds, "log": str(log)}
            worker.tell(order | ({"steps": steps} if steps else {}))
        told = [worker.hear(seconds + START) for worker in self.workers]
        counts, spent = [t["steps"] for t in told], [t["seconds"] for t in told]
        calls = max(sum(counts), 1)
        phases = {name: 1000 * sum(t["phases"][name] for t in told) / calls for name in told[0]["phases"]}
        rows = [np.load(log) - [at, begun, 0.0] for log, n in zip(logs, counts, strict=True) if n]
        sync = side in self.sync
        rate = figures.rate(counts, spent, sync)
        if sync:
            self.seen[side] = rate
        return rate, max(counts) if sync else sum(counts), phases, figures.curve(rows)


class Held(Crew):
    """Counts what the tasks report (``from_reports``), or rows that they append to files."""

    def __init__(self, work: Workload, folder: Path, side: str, from_reports: bool) -> None:
        super().__init__(work, folder)
        self.sides, self.from_reports = [side], from_reports
        self.logs: list[Path] = []

    def ready(self) -> None:
        end = time.monotonic() + START
        while not all(len(rows) > 2 for rows in self._rows()):
            for worker in self.workers:
                if worker.process.poll() is not None or time.monotonic() > end:
                    raise Died(worker._last("made no step"))
            time.sleep(0.2)
        for worker in self.workers:
            worker.hold()

    def _rows(self) -> list[Any]:
        """(time, step, loss) per worker, since it began."""
        if not self.from_reports:
            raw = [log.read_bytes() if log.exists() else b"" for log in self.logs]
            return [np.frombuffer(data[: len(data) // 24 * 24]).reshape(-1, 3) for data in raw]
        made = []
        for worker in self.workers:
            told = [(at, r["step"], r.get("loss", np.nan)) for at, r in list(worker.reports) if r["kind"] == "Step"]
            made.append(np.array(told, float).reshape(-1, 3))
        return made

    def history(self) -> Curve:
        """All that was seen since the first step; its times are not those of windows."""
        return figures.curve([rows[np.isfinite(rows[:, 2])] for rows in self._rows()])

    def window(self, side: str, seconds: float) -> Window:
        return self._measured(side, lambda: self._run(seconds))

    def _run(self, seconds: float) -> Any:
        began = time.monotonic()
        for worker in self.workers:
            worker.go_on()
        time.sleep(seconds)
        for worker in self.workers:
            worker.hold()
        ended = time.monotonic()
        time.sleep(0.05)  # what they have reported arrives
        found = [rows[(rows[:, 0] >= began) & (rows[:, 0] <= ended)] for rows in self._rows()]
        whole = np.concatenate(found) if found else np.zeros((0, 3))
        whole = whole[np.argsort(whole[:, 0], kind="stable")]
        rate = figures.slope(whole[:, 0].tolist(), whole[:, 1].tolist())
        clean = [rows[np.isfinite(rows[:, 2])] - [began, 0.0, 0.0] for rows in found]
        return rate, max(1, round(rate * (ended - began))), {}, figures.curve(clean)


# --- ours


class Run:
    """What ps and workers of one run of ours are told. ``transport``: unix, shm, tcp or tls."""

    def __init__(self, transport: str, ps: int, workers: int, mode: str = "async") -> None:
        self.run, self.secret, self.transport = f"bench-{secrets.token_hex(4)}", secrets.token_bytes(32), transport
        self.authority = Authority(self.run) if transport == "tls" else None
        seats = {
            "ps": [f"127.0.0.1:{port}" for port in ports(ps)],
            "worker": [f"127.0.0.1:{index}" for index in range(workers)],
        }
        told: dict[str, Any] = {"cluster": seats, "chief": "worker/0", "engine": "muster", "mode": mode}
        if transport in ("tcp", "tls"):
            told["local"] = False
        self.cluster = json.dumps(told)

    def env(self, task: str) -> dict[str, str]:
        return {
            "MUSTER_RUN": self.run,
            "MUSTER_TASK": task,
            "MUSTER_ATTEMPT": "1",
            "MUSTER_CLUSTER": self.cluster,
        }

    def hello(self, task: str) -> dict[str, Any]:
        papers = self.authority.papers(task) if self.authority else None
        if task.startswith("ps/"):
            return {"secret": self.secret.hex(), "tls": papers}
        return {"key": wire.task_key(self.secret, task).hex(), "tls": papers}

    def servers(self, ps: int, folder: Path) -> list[Task]:
        names = [f"ps/{index}" for index in range(ps)]
        tasks = [Task("muster.ps", [], folder, self.env(name), self.hello(name)) for name in names]
        end = time.monotonic() + 30
        while not all(any(r["kind"] == "Ready" for _, r in task.reports) for task in tasks):
            if time.monotonic() > end:
                raise Died("a ps did not come up")
            time.sleep(0.02)
        return tasks


# ``share``: always, never, or (None) where Muster itself does
SHARE = {"sync": None, "unix": False, "shm": True, "shm threads": True}


def ours(
    work: Workload, folder: Path, ps: int, workers: int, transports: Sequence[str], flags: Sequence[str] = ()
) -> Driven:
    """Workers with a loop of their own over each of ``transports``; "sync" is sync mode, within this host."""
    crew = Driven(work, folder, sync=[t for t in transports if t == "sync"])
    told: list[list[dict[str, Any]]] = [[] for _ in range(workers)]
    for transport in transports:
        if transport in ("zmq", "grpc"):
            crew.servers[transport], addresses = variant(transport, work, folder, ps)
            for worker in told:
                worker.append({"name": transport, "kind": transport, "addresses": addresses})
            continue
        way = "unix" if transport in SHARE else transport
        run = Run(way, ps, workers, "sync" if transport == "sync" else "async")
        crew.servers[transport] = run.servers(ps, folder)
        for index, worker in enumerate(told):
            task = f"worker/{index}"
            same = {"name": transport, "kind": "muster", "share": SHARE.get(transport)}
            worker.append({**same, "env": run.env(task), "hello": run.hello(task)})
    for index, sides in enumerate(told):
        env = {"BENCH_SIDES": json.dumps(sides), "BENCH_WORKER": str(index)}
        crew.workers.append(Task("bench.peers.ours", [work.name, *flags], folder, env, {"key": ""}))
    return crew


def variant(kind: str, work: Workload, folder: Path, ps: int) -> tuple[list[Task], list[str]]:
    place = tempfile.mkdtemp(prefix="muster-bench-", dir=folder)
    scheme = "ipc://" if kind == "zmq" else "unix:"
    addresses = [f"{scheme}{place}/{index}" for index in range(ps)]
    tasks = [
        Task("bench.peers.exchange", [kind, work.name, str(index), str(ps), address], folder)
        for index, address in enumerate(addresses)
    ]
    for task in tasks:
        task.hear(30)
    return tasks, addresses


def fit(work: Workload, folder: Path, ps: int, workers: int, mode: str = "async") -> Held:
    crew = Held(work, folder, "fit" if mode == "async" else f"fit {mode}", from_reports=True)
    run = Run("unix", ps, workers, mode)
    crew.servers[crew.sides[0]] = run.servers(ps, folder)
    for index in range(workers):
        task = f"worker/{index}"
        crew.workers.append(Task("bench.peers.fit", [work.name], folder, run.env(task), run.hello(task)))
        crew.workers[-1].drain()
    return crew


def keras(work: Workload, folder: Path) -> Held:
    crew = Held(work, folder, "t0 fit", from_reports=False)
    crew.logs = [folder / "keras.rows"]
    crew.workers = [Task("bench.peers.fit", [work.name, str(crew.logs[0])], folder)]
    crew.workers[0].drain()
    return crew


# --- the others


def alone(work: Workload, folder: Path) -> Driven:
    crew = Driven(work, folder)
    crew.workers = [Task("bench.peers.alone", [work.name], folder)]
    return crew


def plain(work: Workload, folder: Path, ps: int, workers: int, flags: Sequence[str] = ()) -> Driven:
    crew = Driven(work, folder)
    seats = json.dumps(_seats(ps, workers))
    crew.servers["plain threads" if flags else "plain"] = [
        Task("bench.peers.plain", [work.name, "ps", str(index), seats, *flags], folder) for index in range(ps)
    ]
    crew.workers = [
        Task("bench.peers.plain", [work.name, "worker", str(index), seats, *flags], folder) for index in range(workers)
    ]
    return crew


def plain_alone(work: Workload, folder: Path) -> Driven:
    crew = Driven(work, folder)
    crew.workers = [Task("bench.peers.plain", [work.name, "worker", "0", "{}"], folder)]
    return crew


def sync_replicas(work: Workload, folder: Path, ps: int, workers: int) -> Held:
    crew = Held(work, folder, "SyncReplicas", from_reports=False)
    seats = json.dumps(_seats(ps, workers))
    crew.servers["SyncReplicas"] = [
        Task("bench.peers.plain", [work.name, "ps", str(index), seats, "--sync", "-"], folder) for index in range(ps)
    ]
    for index in range(workers):
        crew.logs.append(folder / f"sync-{index}.rows")
        args = [work.name, "worker", str(index), seats, "--sync", str(crew.logs[-1])]
        crew.workers.append(Task("bench.peers.plain", args, folder))
    return crew


def pss(work: Workload, folder: Path, ps: int, workers: int) -> Driven:
    """The chief is the one that takes orders; its processor time is the workers', as theirs is."""
    crew = Driven(work, folder)
    seats = {**_seats(ps, workers), "chief": [f"127.0.0.1:{ports(1)[0]}"]}

    def task(role: str, index: int) -> Task:
        env = {"TF_CONFIG": json.dumps({"cluster": seats, "task": {"type": role, "index": index}})}
        return Task("bench.peers.pss", [work.name], folder, env)

    crew.servers["pss"] = [task("ps", n) for n in range(ps)] + [task("worker", n) for n in range(workers)]
    crew.workers = [task("chief", 0)]
    return crew


def mwms(work: Workload, folder: Path, workers: int) -> Driven:
    crew = Driven(work, folder, sync=["mwms"])
    seats = {"worker": [f"127.0.0.1:{port}" for port in ports(workers)]}
    for index in range(workers):
        env = {"TF_CONFIG": json.dumps({"cluster": seats, "task": {"type": "worker", "index": index}})}
        crew.workers.append(Task("bench.peers.mwms", [work.name], folder, env))
    return crew


def ddp(work: Workload, folder: Path, workers: int, python: str) -> Driven:
    crew = Driven(work, folder, sync=["ddp"])
    port = str(ports(1)[0])
    for index in range(workers):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(index), "WORLD_SIZE": str(workers)}
        crew.workers.append(Task("bench.peers.ddp", [work.name], folder, env, python=python))
    return crew


def _seats(ps: int, workers: int) -> dict[str, list[str]]:
    found = [f"127.0.0.1:{port}" for port in ports(ps + workers)]
    return {"ps": found[:ps], "worker": found[ps:]}


def torch_python() -> str:
    """A Python that has PyTorch: BENCH_TORCH, or none."""
    return os.environ.get("BENCH_TORCH", "")
