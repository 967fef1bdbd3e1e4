"""``muster.connect()``: the parameter servers for a loop of your own, NumPy arrays in and out.

    ps = muster.connect()
    params = ps.declare({"w": w, "b": b}, {"name": "sgd", "learning_rate": 0.1})
    while not ps.stopping and ps.step_now < 1000:
        ps.step(gradients(params, next(batches)), samples=100)

``params`` are views that every step fills anew. Run by ``muster run`` the loop shares its parameters with the other
workers; run by itself it trains alone, over a parameter server in a thread of its own.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import secrets
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from muster.errors import Refused
from muster.ps import wire
from muster.ps.client import Client, Done
from muster.ps.link import Identity, places
from muster.ps.loop import Loop, listen_local, remove_local
from muster.ps.optimizers import parse
from muster.ps.server import Rule, Server
from muster.ps.slabs import Floats, Parameter
from muster.ps.tls import context

Rate = float | Callable[[int], Any]


class Session:
    """One worker's connection to all parameter servers. Made by ``connect``; use it from one thread at a time."""

    def __init__(self, client: Client, reports: Any) -> None:
        self.client, self.reports = client, reports
        self.names: list[str] = []
        self.samples = 0.0
        self.accounted = False
        self.rate: Rate = 0.01

    @property
    def step_now(self) -> int:
        """The global step: updates applied (in sync: rounds), by whomever."""
        return self.client.step_now

    @property
    def stopping(self) -> bool:
        """Whether somebody has called ``stop``."""
        return self.client.stopping

    def declare(
        self,
        params: Mapping[str, Any],
        optimizer: Mapping[str, Any] | str = "sgd",
        learning_rate: Rate | None = None,
        statistics: Sequence[str] = (),
    ) -> dict[str, Floats]:
        """Agree on the parameters, wait until all workers can start, and return the parameters by name.

        ``params``: initial values by name; the chief's count, all workers need the same names and shapes. The arrays
        returned are float32 views of one buffer, which ``pull`` and ``step`` fill. ``optimizer``: a name, or a config
        as Keras gives it, such as {"name": "adam", "learning_rate": 0.001}. ``learning_rate``: a number, or a function
        of the global step; it comes before the optimizer's, and without either it is Keras' default. ``statistics``
        names those that are averaged over the workers instead of trained. Raises Refused for what has no counterpart on
        the parameter servers.
        """
        config: Mapping[str, Any] = {"name": optimizer} if isinstance(optimizer, str) else optimizer
        set_there = config.get("config", config).get("learning_rate", parse(config).default_rate)
        rate = set_there if learning_rate is None else learning_rate
        if not callable(rate) and not isinstance(rate, (int, float)):
            raise Refused(
                "The learning rate must be a number or a function of the step", because=f"it is {rate!r}",
                try_="pass learning_rate=schedule; a Keras schedule is such a function",
            )  # fmt: skip
        self.rate, self.names = rate, list(params)
        values = [np.asarray(value, np.float32) for value in params.values()]
        rows = [
            Parameter(name, value.shape, trainable=name not in statistics)
            for name, value in zip(params, values, strict=True)
        ]
        self.client.declare(rows, config, values)
        self.reports.ready()
        self.client.pull()
        return dict(zip(self.names, self.client.views, strict=True))

    def pull(self) -> Done:
        """Fill the parameters with their present values."""
        return self.client.pull()

    def push(self, grads: Any = None, samples: float = 1.0, loss: float | None = None) -> Done:
        """Send gradients without taking values back; see ``step``."""
        self.samples += samples
        return self._reported(self.client.push(self._ordered(grads), samples, self._rate()), loss)

    def step(self, grads: Any = None, samples: float = 1.0, loss: float | None = None) -> Done:
        """Send gradients and fill the parameters with what they lead to, in one round trip.

        ``grads``: arrays by name (a name left out has gradient zero), or a sequence in the order declared, or None for
        what ``client.gradients`` holds; float32, in the shapes declared. ``samples``: how many samples they are the
        mean of, the weight in a sync round. ``loss`` is only reported.
        """
        self.samples += samples
        return self._reported(self.client.step(self._ordered(grads), samples, self._rate()), loss)

    def stop(self, why: str = "stop") -> None:
        """Every worker's ``stopping`` is True from its next step on."""
        self.client.stop(why)

    def finish(self) -> None:
        """Out of data: nobody waits for this worker any more. The end table gets what its share came to."""
        self.client.turn("done")
        self._account()

    def close(self) -> None:
        self._account()
        self.client.close()

    def _account(self) -> None:
        if self.accounted or not self.names:
            return
        self.accounted = True
        told = self.client.stats()[0]["workers"].get(self.client.who.task, {})
        self.reports.tell(
            "Account", samples=round(self.samples), staleness=float(told.get("staleness_mean", 0.0)),
            staleness_max=int(told.get("staleness_max", 0)), dropped=int(told.get("dropped", 0)),
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rate(self) -> float:
        return float(self.rate(self.client.step_now)) if callable(self.rate) else float(self.rate)

    def _ordered(self, grads: Any) -> Any:
        if not isinstance(grads, Mapping):
            return grads
        unknown = [name for name in grads if name not in self.names]
        if unknown:
            raise Refused(f"There is no parameter called {unknown[0]}", try_="one of " + ", ".join(self.names))
        return [grads.get(name) for name in self.names]

    def _reported(self, done: Done, loss: float | None) -> Done:
        self.reports.step(done.step, loss=loss)
        return done


def connect() -> Session:
    """Connect this process to the parameter servers of its run, or to one of its own where there is no run.

    Raises RunFailed where a parameter server cannot be reached or refuses us.
    """
    reports = _reports()
    if "MUSTER_CLUSTER" not in os.environ:
        return Session(alone(), reports)
    hello = reports.hello()
    reports.tell("Joined")
    return Session(introduced(os.environ, hello, notice=reports.say), reports)


def introduced(
    env: Mapping[str, str], hello: Mapping[str, Any], notice: Callable[[str], None] = lambda text: None
) -> Client:
    """A client with what the agent's first line told us: our own key, and papers for TLS between hosts."""
    key = bytes.fromhex(hello["key"]) if hello.get("key") else wire.task_key(b"", env["MUSTER_TASK"])
    papers = hello.get("tls")
    return _client(env, key, context(papers, server=False) if papers else None, notice)


def client(env: Mapping[str, str], secret: bytes, notice: Callable[[str], None] = lambda text: None) -> Client:
    """A client for the task that ``env`` describes (MUSTER_TASK, _ATTEMPT, _RUN, _CLUSTER); it has to be declared to.

    ``secret`` is the run's, from which the key of the task is derived.
    """
    return _client(env, wire.task_key(secret, env["MUSTER_TASK"]), None, notice)


def _client(env: Mapping[str, str], key: bytes, tls: ssl.SSLContext | None, notice: Callable[[str], None]) -> Client:
    told, task = json.loads(env["MUSTER_CLUSTER"]), env["MUSTER_TASK"]
    who = Identity(task, int(env.get("MUSTER_ATTEMPT", "1")), os.urandom(16), key, tls)
    chief = told.get("chief", "worker/0")
    return Client(places(told, env.get("MUSTER_RUN", ""), task), who, task == chief, notice=notice)


def alone() -> Client:
    """A client and, in a thread of this process, the one ps that it talks to."""
    run, task, secret = f"alone-{secrets.token_hex(6)}", "worker/0", secrets.token_bytes(32)
    server = Server(0, Rule(workers=(task,)), send=lambda peer, *buffers: None)
    loop = Loop(server, [listen_local(run, 0)], secret)
    threading.Thread(target=loop.run, name="muster-ps", daemon=True).start()
    atexit.register(remove_local, run, 0)
    seats = {"cluster": {"ps": ["localhost:0"], "worker": ["localhost:0"]}, "chief": task}
    return client({"MUSTER_CLUSTER": json.dumps(seats), "MUSTER_TASK": task, "MUSTER_RUN": run}, secret)


def _reports() -> Any:
    """The process' one channel to its agent. It lives above this package, and is only looked up when a script asks."""
    return importlib.import_module("muster.train.report").channel()
