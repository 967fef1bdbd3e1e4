"""muster plan"""

import json
from pathlib import Path
from typing import Any

import click

from muster.cli.options import Verb, cluster_option, find_cluster, no_stray_flag, run_options


@click.command("plan", cls=Verb, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="everything, as one JSON object")
@click.option("--env", "task", metavar="TASK", default="", help="the environment and command of one task, for a shell")
@run_options
@click.argument("words", metavar="[SCRIPT [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
def command(file: Path | None, as_json: bool, task: str, words: tuple[str, ...], **flags: Any) -> int:
    """Show who runs where: task, host, port, GPUs, environment, and why. Starts nothing."""
    import shlex

    from muster.plan import Script, check_task_name
    from muster.planning import plan_only
    from muster.script import find_script

    no_stray_flag(words)
    cluster, said = find_cluster(file, flags)
    script = find_script(words, cluster.launcher == "local") if words else Script("script.py")
    plan = plan_only(cluster, script)
    if task:
        found = check_task_name(task, plan)
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.env.items()))
        print(f"cd {shlex.quote(found.cwd)}\n{shlex.join(found.argv)}")
        return 0
    if as_json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(plan), indent=1))
        return 0
    print(said)
    rows = [("task", "host", "address", "GPUs", "why")]
    rows += [
        (
            t.id + (" (chief)" if t.id == plan.chief else ""),
            t.host,
            (t.where if t.listens else t.address) + (f" (listens at {t.bound})" if t.listens and t.bind else ""),
            ",".join(map(str, t.gpus)) or "-",
            t.why,
        )
        for t in plan.tasks.values()
    ]
    widths = [max(len(row[n]) for row in rows) for n in range(5)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    chief = plan.tasks[plan.chief]
    print(f"command: {shlex.join(chief.argv)}   (of {chief.id}; in {chief.cwd})")
    for note in plan.notes:
        print(f"note: {note}")
    return 0
