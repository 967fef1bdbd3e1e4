"""muster attach, and the way into the background that ``muster run --detach`` takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.events import PortTaken

if TYPE_CHECKING:
    from muster.journal import RunFolder

START = 60.0  # seconds that the tasks of a run in the background get to come up before it is left alone
SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []  # no click.py of the user's folder in place of ours


@click.command("attach")
@click.argument("run", default="")
def command(run: str) -> int:
    """Show RUN (the newest, or a named one) as if it had been started here. Ctrl-C leaves it running."""
    from muster.journal import find
    from muster.summary import summarise
    from muster.watch.console import console
    from muster.watch.ending import tell
    from muster.watch.follow import follow
    from muster.watch.terminal import Screen

    folder = find(run)
    plan = folder.plan()
    out = console()
    screen = Screen(out, plan)
    try:
        screen.note(f"attached to run {folder.id}; Ctrl-C leaves it running, muster stop ends it")
        state = follow(folder, plan, screen)
    except KeyboardInterrupt:
        screen.close()
        print(f"run {folder.id} goes on")
        return 0
    screen.close()
    summary = summarise(state, plan, state.now, str(folder.path))
    tell(out, summary, plan)
    return summary.exit_code


def in_the_background(options: list[str], script: Sequence[str]) -> int:
    """Starts the same command as a launcher of its own, in a session of its own, and says how to find it again.

    What comes before the run (copying the code, asking the hosts) is waited for, however long it takes; Ctrl-C ends it.
    """
    from muster.journal import runs, safe_root

    root = safe_root()
    before = {folder.id for folder in runs()}
    options = [word for word in options if word != "--detach"]
    options.insert(options.index("run") + 1, "--in-background")
    with tempfile.NamedTemporaryFile(prefix=".screen-", dir=root, delete=False) as screen:  # to be moved from there
        child = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", "muster", *options, *script],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        folder = _begun(child, before)
    except KeyboardInterrupt:
        child.terminate()
        Path(screen.name).unlink()
        raise
    if folder is None:
        print(Path(screen.name).read_text(), end="")
        Path(screen.name).unlink()
        return child.returncode or 1
    os.replace(screen.name, folder.path / "screen.log")
    print(f"run {folder.id} goes on in the background (launcher: pid {child.pid})")
    print(f"muster attach {folder.id}    muster status {folder.id}    muster stop {folder.id}")
    return 0


def _begun(child: subprocess.Popen[bytes], before: set[str]) -> RunFolder | None:
    """The run of ``child``, once it is under way; None where ``child`` ended without one."""
    from muster.journal import runs

    while True:
        over = child.poll() is not None
        for folder in runs():
            if folder.id not in before and folder.launcher() == child.pid:
                if _under_way(folder, time.monotonic() + START):
                    return folder
                before.add(folder.id)  # a port was taken meanwhile: the launcher makes another plan
        if over:
            return None
        time.sleep(0.05)


def _under_way(folder: RunFolder, until: float) -> bool:
    """Whether its tasks have come up. False where the run ended before that, so that another takes its place."""
    plan = folder.plan()
    while time.monotonic() < until:
        state = folder.state(plan)
        if state.ended is not None:
            return not isinstance(state.cause, PortTaken)
        if all(t.attempt and t.phase.value not in ("waiting", "starting") for t in state.tasks.values()):
            time.sleep(0.3)
            if folder.state(plan).ended is None:
                return True
        time.sleep(0.05)
    return True
