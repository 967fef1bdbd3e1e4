"""muster run"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli.options import Verb, cluster_option, find_cluster, no_stray_flag, run_options

if TYPE_CHECKING:  # imported only when a run begins: help and errors answer at once
    from rich.console import Console

    from muster.journal import RunFolder
    from muster.plan import Plan
    from muster.run import CheckFailed, Watchers
    from muster.supervise import Watcher


@click.command("run", cls=Verb, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option("--only", metavar="TASK", default="", help="give one task (worker/1) this terminal, for a debugger")
@click.option("--json", "as_json", is_flag=True, help="the result as one JSON object on the last line")
@click.option(
    "--lines",
    type=click.Choice(["some", "all", "none"]),
    default="some",
    help="what the tasks print: all but TensorFlow's own notices, all, or none (the logs have all)",
)
@click.option("--pass", "passed", metavar="NAME", multiple=True, help="a variable of yours that the tasks are to have")
@click.option("--no-check", is_flag=True, help="start without asking the hosts first")
@click.option(
    "--sync", type=click.Path(path_type=Path), help="copy this folder to the hosts first (changed files only)"
)
@click.option("--detach", is_flag=True, help="go on without this terminal; muster attach brings it back")
@click.option("--in-background", is_flag=True, hidden=True)
@run_options
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    file: Path | None,
    only: str,
    as_json: bool,
    lines: str,
    passed: tuple[str, ...],
    no_check: bool,
    sync: Path | None,
    detach: bool,
    in_background: bool,
    words: tuple[str, ...],
    **flags: Any,
) -> int:
    """Check, place, start, supervise and show a run of SCRIPT. Ctrl-C ends it cleanly, twice at once."""
    from muster.errors import Refused

    if not words:
        raise Refused("no script is named", at="command line", try_="muster run [options] script.py [args...]")
    no_stray_flag(words)
    cluster, said = find_cluster(file, flags)
    from muster.run import CheckFailed, Request, run
    from muster.script import find_script
    from muster.watch.console import console
    from muster.watch.ending import tell as tell_end

    script = find_script(words, cluster.launcher == "local" or sync is not None)
    if detach:
        from muster.cli.attach import in_the_background

        return in_the_background(sys.argv[1 : len(sys.argv) - len(words)], words)
    if sync is not None:
        from muster.launch.sync import sync_cluster

        cluster, script = sync_cluster(cluster, sync, script)
    out = console(stderr=as_json)
    tell = functools.partial(out.print, style="dim", soft_wrap=True)
    request = Request(cluster, script, only, _variables(passed), not no_check, in_background, tell)
    with contextlib.ExitStack() as held:
        bells = []
        if only and sys.stdin.isatty():
            from muster.watch.keys import Keys

            bells = [held.enter_context(contextlib.closing(Keys(sys.stdin)))]
        try:
            plan, summary, _ = run(request, _watchers(out, said, only, lines), bells)
        except CheckFailed as failed:
            return _unfit(out, failed, as_json)
    tell_end(out, summary, plan)
    if as_json:
        print(json.dumps(summary.as_json()), flush=True)
    return summary.exit_code


def _unfit(console: Console, failed: CheckFailed, as_json: bool) -> int:
    from muster.check import render
    from muster.check.examine import wanted

    console.print(render.table(wanted(failed.plan), failed.findings))
    console.print("nothing was started; muster check tells more, --no-check starts all the same", style="dim")
    if as_json:
        told = {"ok": False, "result": "refused", "cause": "the check found errors", "exit_code": 1}
        print(json.dumps({**told, **json.loads(render.as_json(failed.findings))}))
    return 1


def _variables(names: tuple[str, ...]) -> dict[str, str]:
    import os

    from muster.errors import Refused
    from muster.script import is_utf8

    missing = [name for name in names if name not in os.environ]
    if missing:
        raise Refused(
            f"there is no variable {missing[0]} to pass", at="command line: --pass", try_=f"export {missing[0]}=..."
        )
    found = {name: os.environ[name] for name in names}
    for name, value in found.items():
        if not is_utf8(value):
            raise Refused(
                f"{name} is not UTF-8", at="command line: --pass", because=f"it is {os.fsencode(value)!r}",
                try_="another encoding: the plan is UTF-8, so it would not reach the tasks as it is",
            )  # fmt: skip
    return found


def _watchers(console: Console, said: str, only: str, lines: str) -> Watchers:
    from muster.watch.terminal import Screen

    def watchers(plan: Plan, folder: RunFolder) -> Sequence[Watcher]:
        screen = Screen(console, plan, only, lines)
        counts = {role: len(plan.of(role)) for role in ("chief", "ps", "worker", "evaluator")}
        roles = ", ".join(f"{n} {role}{'s' if role == 'worker' and n > 1 else ''}" for role, n in counts.items() if n)
        screen.note(f"{said}; {roles}; run {folder.id}")
        for text in plan.notes:
            screen.note(text, "dim")
        return [screen]

    return watchers
