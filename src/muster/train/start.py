"""``python -m muster.train.start [--tf1] script.py args...`` runs the script as ``python script.py args...`` would.

Two things differ: what happens when the script imports TensorFlow (see ``roles``, ``sessions`` and ``tf1``), and that
an error is told well: the user's own traceback without our frames, or the four rows of a MusterError without any.
"""

import builtins
import importlib.machinery
import io
import os
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from muster.errors import MusterError, Refused
from muster.train import advice, roles, tf1
from muster.train.context import Context, context
from muster.train.imports import OURS, AfterImport, first
from muster.train.report import channel

KEPT: list[ModuleType] = []  # the module that was __main__ before the script: nothing else holds it


def main(argv: list[str]) -> int:
    """The exit code of a script that failed; otherwise SystemExit with what the script itself would have ended with."""
    as_tf1 = argv[:1] == ["--tf1"]
    script, *args = argv[1:] if as_tf1 else argv
    channel()  # takes the pipe before a child of the script could inherit it
    try:
        return _told(script, args, context(), as_tf1)
    finally:
        channel().flush(within=1.0)


def _told(script: str, args: list[str], me: Context, as_tf1: bool) -> int:
    try:
        prepare(me, as_tf1)
        code = _exit_code(script, args)
        if not code:
            roles.at_end(me)
        sys.exit(code)
    except MusterError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except SystemExit:
        raise
    except BaseException as error:  # what the interpreter would have printed, less our frames; nothing is lost
        strip(error, set())
        sys.excepthook(type(error), error, error.__traceback__)
        if hint := advice.on(error):
            channel().say(hint)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _exit_code(script: str, args: list[str]) -> Any:
    """What the script gave to ``sys.exit``, be it a number or words; None when it ran to its end."""
    try:
        run(script, args)
    except SystemExit as error:
        return error.code
    return None


def prepare(me: Context, as_tf1: bool) -> None:
    """Arrange for what must happen when the script imports TensorFlow. Imports nothing itself."""
    if as_tf1:
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # read once, while TensorFlow is imported

    def then(tensorflow: ModuleType) -> None:
        roles.install(me, replace_addresses=as_tf1)
        if as_tf1:
            tf1.install(tensorflow, me)

    first(AfterImport("tensorflow", then))


def run(script: str, args: list[str]) -> None:
    """Execute ``script`` as ``__main__``."""
    path = script if script.startswith("/") else f"{Path.cwd()}/{script}"  # as Python has it: not made any nicer
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise Refused(f"cannot read the script {script}", at=path, because=str(error)) from None
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):  # with -P there is no entry for the script's folder
        sys.path[0] = str(Path(script).resolve().parent)
    KEPT.append(sys.modules["__main__"])
    module = ModuleType("__main__")
    names = {"__file__": path, "__builtins__": builtins, "__cached__": None, "__annotations__": {}}
    module.__dict__.update(names, __loader__=importlib.machinery.SourceFileLoader("__main__", path))
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def strip(error: BaseException, seen: set[int]) -> None:
    """Take our frames out of the traceback of ``error`` and of those that led to it."""
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without_ours(error.__traceback__)
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None:
            strip(earlier, seen)


# What stands between the script and TensorFlow. Frames of ``muster.fit`` stay: the script called that itself.
OWN = ("start", "imports", "roles", "sessions", "steps", "tf1", "gone", "evaluator")
BETWEEN = {f"{OURS}/{name}.py" for name in OWN}


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in BETWEEN:
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for link in reversed(kept):
        rest = TracebackType(rest, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return rest


if __name__ == "__main__":
    from muster.train.start import main as imported  # not this copy, whose frames would be those of __main__

    sys.exit(imported(sys.argv[1:]))
