"""muster status"""

import json
import time

import click

from muster.cli.options import Verb


@click.command("status", cls=Verb)
@click.argument("run", default="")
@click.option("--json", "as_json", is_flag=True, help="the same as one JSON object")
def command(run: str, as_json: bool) -> int:
    """How RUN (the newest, or a named one) stands: works from any terminal, and after everything died."""
    from muster.journal import find
    from muster.summary import summarise
    from muster.waits import waits
    from muster.watch.ending import end_table, footer, headline
    from muster.watch.terminal import current, phases

    folder = find(run)
    plan = folder.plan()
    state = folder.state(plan)
    alive = folder.launcher() != 0
    now = max(state.now, time.time() - state.wall) if alive else state.now
    summary = summarise(state, plan, now, str(folder.path))
    waiting = waits(state, now, plan) if alive else []
    word = "running" if alive else "ended" if state.ended else "its launcher died"
    if as_json:
        told = summary.as_json() | {"state": word, "waits": [w.text(now) for w in waiting]}
        print(json.dumps(told))
        return 0
    from muster.watch.console import console

    out = console()
    out.print(f"run {folder.id}: {word}, {phases(state)}", soft_wrap=True)
    if state.low >= 0:
        out.print(f"step {current(state):,}" + (f" of {state.total:,}" if state.total else ""))
    for wait in waiting:
        out.print(wait.text(now), style="yellow", soft_wrap=True)
    for text in summary.warnings:
        out.print(f"warning: {text}", style="yellow", soft_wrap=True)
    if state.ended:
        out.print(headline(summary, plan), style="bold", soft_wrap=True)
    out.print(end_table(summary, plan, out.width))
    for text in footer(summary):
        out.print(text, style="dim", soft_wrap=True)
    if state.ended and not summary.ok:
        out.print(
            summary.cause + (f"\n  because   {summary.because}" if summary.because else ""),
            soft_wrap=True,
        )
    return 0
