"""muster run"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from muster.cli.options import cluster_option, find_cluster, run_options


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option("--only", metavar="TASK", default="", help="give one task (worker/1) this terminal, for a debugger")
@click.option("--json", "as_json", is_flag=True, help="the result as one JSON object on the last line")
@click.option(
    "--lines",
    type=click.Choice(["some", "all", "none"]),
    default="some",
    help="what the tasks print: all but TensorFlow's own notices, all, or none (the logs have all)",
)
@run_options
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(file: Path | None, only: str, as_json: bool, lines: str, words: tuple[str, ...], **flags: Any) -> int:
    """Check, place, start, supervise and show a run of SCRIPT. Ctrl-C ends it cleanly, twice at once."""
    from muster.errors import Refused
    from muster.run import find_script, run_here

    if not words:
        raise Refused("no script is named", at="command line", try_="muster run [options] script.py [args...]")
    if words[0].startswith("-") and not Path(words[0]).is_file():
        _no_such_flag(words[0])
    script = find_script(words)
    cluster, said = find_cluster(file, flags)

    from rich.console import Console

    from muster.journal import RunFolder
    from muster.plan import Plan
    from muster.supervise import Watcher
    from muster.watch.terminal import Screen, end_table

    console = Console(stderr=as_json, highlight=False)

    def watchers(plan: Plan, folder: RunFolder) -> Sequence[Watcher]:
        screen = Screen(console, plan, only, lines)
        roles = ", ".join(
            f"{len(plan.of(r))} {r}" + "s" * (r == "worker" and len(plan.of(r)) > 1)
            for r in ("chief", "ps", "worker")
            if plan.of(r)
        )
        screen.note(f"{said}; {roles}; run {folder.id}")
        for text in plan.notes:
            screen.note(text, "dim")
        return [screen]

    bells = []
    if only:
        from muster.watch.keys import Keys

        if sys.stdin.isatty():
            bells = [Keys(sys.stdin)]
    plan, summary, _ = run_here(cluster, script, watchers, only, bells)
    if summary.trace:
        console.print(summary.trace, markup=False, soft_wrap=True)
        console.print()
    console.print(end_table(summary, plan))
    for text in summary.warnings:
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)
    if not summary.ok:
        rows = [("because", summary.because), ("try", summary.try_)]
        console.print(
            "\n".join([summary.cause, *(f"  {label:<8}  {text}" for label, text in rows if text)]),
            markup=False,
            soft_wrap=True,
        )
    if as_json:
        print(json.dumps(summary.as_json()), flush=True)
    return summary.exit_code


def _no_such_flag(word: str) -> None:
    from muster.cluster import Run
    from muster.errors import Refused, nearest

    known = [f"--{name.replace('_', '-')}" for name in Run.__struct_fields__] + ["--only", "--json", "--cluster"]
    name = word.split("=")[0]
    near = nearest(name, known)
    raise Refused(
        f"there is no option {name}",
        at="command line",
        try_=f"{near}" if near else "muster run --help",
        because="options of muster stand before the script, those of the script after it",
    )
