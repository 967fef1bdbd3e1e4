"""The loop that runs on a host during a check: one JSON line in, one marked JSON line out; and the text that starts it.

``program()`` goes to the host's own interpreter over a pipe, in front of the requests. Its first lines are understood
by any Python since 2.6, so that a host whose Python is far too old still says which one it has, instead of a
SyntaxError. The loop ends with its input: a check that dies leaves nothing behind. A time limit ends it in any case.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

from muster.check import pairs, probe

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "muster-check:"  # what a login shell prints on its way is not ours
LIMIT = 120.0
OLDEST = (3, 8)

BOOT = """\
import sys, json
pipe = getattr(sys.stdin, "buffer", sys.stdin)
text = pipe.read(int(pipe.readline()))
if sys.version_info < (3, 8):
    told = {"python": {"version": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable}, "too_old": True}
    while pipe.readline():
        sys.stdout.write("muster-check:" + json.dumps(told) + "\\n")
        sys.stdout.flush()
else:
    import types
    for name, source in json.loads(text.decode()):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    module.loop(pipe, getattr(sys.stdout, "buffer", sys.stdout))
"""


def command(python: str) -> list[str]:
    """The argv that, with ``program()`` on its standard input, answers requests.

    One line and no single quote in it: every login shell passes that on unchanged, csh and fish too.
    """
    return [python, "-u", "-c", f"exec({json.dumps(BOOT)})"]


def program() -> bytes:
    """The modules that run on the host, as they are here, with their length in front."""
    here = os.path.dirname(os.path.abspath(__file__))
    sources = [("muster", ""), ("muster.check", "")]
    for name in ("probe", "pairs", "serve"):
        with open(os.path.join(here, name + ".py"), encoding="utf-8") as file:
            sources.append(("muster.check." + name, file.read()))
    text = json.dumps(sources).encode()
    return b"%d\n%s" % (len(text), text)


class Examination:
    """What one host remembers between requests: the listener of this check."""

    def __init__(self) -> None:
        self.listener: pairs.Listener | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return ASKED[request["ask"]](self, request)

    def listen(self, request: dict[str, Any]) -> dict[str, Any]:
        self.hush(request)
        self.listener = pairs.Listener(request["token"], [(address, port) for _, address, port in request["ports"]])
        return {"errors": self.listener.errors}

    def spare(self, request: dict[str, Any]) -> dict[str, Any]:
        self.listener = self.listener or pairs.Listener(request["token"], [])
        return self.listener.spare(request["towards"])

    def half_open(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"from": self.listener.half_open() if self.listener else []}

    def hush(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.listener:
            self.listener.close()
            self.listener = None
        return {}


ASKED: dict[str, Callable[[Examination, dict[str, Any]], dict[str, Any]]] = {
    "facts": lambda _, request: probe.facts(request),
    "clock": lambda _, request: probe.clock(request),
    "nonce": lambda _, request: probe.nonce(request),
    "listen": Examination.listen,
    "reach": lambda _, request: pairs.reach(request["targets"], request["token"], request["within"]),
    "spare": Examination.spare,
    "half_open": Examination.half_open,
    "measure": lambda _, request: pairs.measure(
        request["target"], request["token"], request["within"], request.get("patient", False)
    ),
    "hush": Examination.hush,
}


def loop(pipe: BinaryIO, out: BinaryIO, limit: float = LIMIT) -> None:
    """Answers until ``pipe`` ends, or exits the process after ``limit`` seconds whatever it is doing."""
    watchdog = threading.Timer(limit, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    examination = Examination()
    for line in iter(pipe.readline, b""):
        try:
            answer = examination.answer(json.loads(line))
        except Exception as error:  # one request that fails on a strange host must not cost the answers to the others
            answer = {"broken": f"{type(error).__name__}: {error}"}
        out.write((MARK + json.dumps(answer) + "\n").encode())
        out.flush()
    sys.stdout.flush()
    os._exit(0)  # threads that hang in a dead file server would keep the interpreter alive for ever
