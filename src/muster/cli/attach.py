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

START = 60.0  # seconds within which a run in the background must have begun


@click.command("attach")
@click.argument("run", default="")
def command(run: str) -> int:
    """Show RUN (the newest, or a named one) as if it had been started here. Ctrl-C leaves it running."""
    from rich.console import Console

    from muster.journal import find
    from muster.summary import summarise
    from muster.watch.ending import tell
    from muster.watch.follow import follow
    from muster.watch.terminal import Screen

    folder = find(run)
    plan = folder.plan()
    console = Console(highlight=False)
    screen = Screen(console, plan)
    try:
        screen.note(f"attached to run {folder.id}; Ctrl-C leaves it running, muster stop ends it")
        state = follow(folder, plan, screen)
    except KeyboardInterrupt:
        screen.close()
        print(f"run {folder.id} goes on")
        return 0
    screen.close()
    summary = summarise(state, plan, state.now, str(folder.path))
    tell(console, summary, plan)
    return summary.exit_code


def in_the_background(options: list[str], script: Sequence[str]) -> int:
    """Starts the same command as a launcher of its own, in a session of its own, and says how to find it again."""
    from muster.journal import runs

    before = {folder.id for folder in runs()}
    options = [word for word in options if word != "--detach"]
    options.insert(options.index("run") + 1, "--in-background")
    with tempfile.NamedTemporaryFile(prefix="muster-screen-", delete=False) as screen:
        child = subprocess.Popen(
            [sys.executable, "-m", "muster", *options, *script],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + START
    while time.monotonic() < until:
        new = [f for f in runs() if f.id not in before and f.launcher() == child.pid]
        if new:
            if not _under_way(new[0], until):  # a port was taken meanwhile: the launcher makes another plan
                before.add(new[0].id)
                continue
            print(f"run {new[0].id} goes on in the background (launcher: pid {child.pid})")
            print(f"muster attach {new[0].id}    muster status {new[0].id}    muster stop {new[0].id}")
            os.replace(screen.name, new[0].path / "screen.log")
            return 0
        if child.poll() is not None:
            break
        time.sleep(0.05)
    print(Path(screen.name).read_text(), end="")
    Path(screen.name).unlink()
    return child.poll() or 1


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
