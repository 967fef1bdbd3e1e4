"""A run in one process: parameter servers in threads, and workers in threads that each call ``fit`` as tasks do."""

from __future__ import annotations

import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from muster.ps import wire
from muster.ps.client import Client
from muster.ps.link import Identity, Place
from muster.ps.loop import Loop, listen_local, remove_local, socket_path
from muster.ps.server import Rule, Server
from muster.train.context import Context
from muster.train.fit import part
from muster.train.options import Options
from muster.train.part import Life
from muster.train.report import Channel

LIMIT = 100  # seconds


class Reports(Channel):
    """What a worker reports, kept."""

    def __init__(self, barrier: threading.Barrier | None) -> None:
        super().__init__(None)
        self.told: list[dict[str, Any]] = []
        self.barrier = barrier

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [told for told in self.told if told["kind"] == kind]

    def ready(self, limit: float = LIMIT) -> None:
        barrier, self.barrier = self.barrier, None
        if barrier is not None:
            barrier.wait(limit)

    def metrics(self, values: dict[str, float]) -> None:
        self.tell("Metrics", values=values)


class Worker:
    """One task: ``fit`` as ``muster.fit``, with the run's context instead of the environment's."""

    def __init__(self, run: Run, index: int, attempt: int = 1) -> None:
        self.run, self.index = run, index
        seats = {"ps": ("ps",) * run.ps, "worker": ("worker",) * run.workers}
        self.me = Context(run.name, f"worker/{index}", attempt, seats, engine="muster", kind="v1", mode=run.mode)
        self.reports, self.life = Reports(run.barrier if attempt == 1 else None), Life()
        who = Identity(self.me.task, attempt, os.urandom(16), wire.task_key(run.secret, self.me.task))
        places = [Place(i, socket_path(run.name, i)) for i in range(run.ps)]
        self.client = self.life.client = Client(places, who, chief=index == 0, patience=5.0)

    def fit(self, model: Any, x: Any = None, y: Any = None, **options: Any) -> Any:
        return part(model, x, y, Options(**options), self.me, self.reports, self.life).run()


class Run:
    def __init__(self, workers: int = 3, ps: int = 2, mode: str = "async", **rule: Any) -> None:
        self.name, self.secret = f"fit-{secrets.token_hex(5)}", secrets.token_bytes(32)
        self.workers, self.ps, self.mode, self.rule = workers, ps, mode, rule
        self.servers: list[Server] = []
        self.barrier = threading.Barrier(workers)  # as the supervisor holds everybody until all are ready

    def __enter__(self) -> Run:
        tasks = tuple(f"worker/{i}" for i in range(self.workers))
        for index in range(self.ps):
            rule = Rule(self.mode, workers=tasks, **self.rule)
            server = Server(index, rule, send=lambda peer, *buffers: None, say=lambda text: None)
            loop = Loop(server, [listen_local(self.name, index)], self.secret)
            threading.Thread(target=loop.run, name=f"ps/{index}", daemon=True).start()
            self.servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(self.ps):
            remove_local(self.name, index)

    def all(self, script: Callable[[Worker], Any]) -> list[Any]:
        """What ``script`` gives on every worker, all at once."""
        return self.each([script] * self.workers)

    def each(self, scripts: list[Callable[[Worker], Any]]) -> list[Any]:
        results: list[Any] = [None] * len(scripts)
        failed: list[str] = []

        def go(index: int) -> None:
            worker = Worker(self, index)
            try:
                results[index] = scripts[index](worker)
            except BaseException as error:  # told to the test, which raises it
                failed.append(traceback.format_exc())
                results[index] = error
                self.barrier.abort()
            finally:
                worker.client.close()

        threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(len(scripts))]
        for thread in threads:
            thread.start()
        end = time.monotonic() + LIMIT
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            threads[0].join(0.05)
            if failed:  # the others wait for it: what it died of is the news
                end = min(end, time.monotonic() + 2)
        assert not failed, "\n".join(failed)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        return results
