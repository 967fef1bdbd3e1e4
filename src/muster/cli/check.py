"""muster check"""

from pathlib import Path
from typing import Any

import click

from muster.cli.options import Verb, cluster_option, find_cluster, no_stray_flag, run_options


@click.command("check", cls=Verb, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="the findings as one JSON object")
@click.option("--links", is_flag=True, help="show every pair with its figures, not only the slow ones")
@click.option("--parameters", type=int, default=1_000_000, help="size of the model whose step time is foretold")
@run_options
@click.argument("words", metavar="[SCRIPT]", nargs=-1, type=click.UNPROCESSED)
def command(
    file: Path | None, as_json: bool, links: bool, parameters: int, words: tuple[str, ...], **flags: Any
) -> int:
    """Is every machine fit, and can every task reach every task that it needs? Host, cause, remedy."""
    import time

    from muster.check import render
    from muster.check.examine import examine, job, wanted
    from muster.check.verdicts import slowest
    from muster.plan import Script
    from muster.planning import plan_only
    from muster.watch.console import console

    no_stray_flag(words)
    cluster, said = find_cluster(file, flags)
    plan = plan_only(cluster, Script(words[0], words[1:]) if words else Script(""))
    errors = console(stderr=True)
    if not as_json:
        errors.print(said, soft_wrap=True)
    began = time.monotonic()
    progress = (lambda text: None) if as_json else (lambda text: errors.print(f"  {text}", style="dim"))
    heard, findings = examine(cluster, plan, parameters=parameters, progress=progress)
    rows = wanted(plan)
    slow = slowest(rows, heard.pairs, job(plan, parameters))
    if as_json:
        print(render.as_json(findings, heard.pairs, slow, heard.facts))
    else:
        out = console()
        if links:
            out.print(render.links(heard.pairs))
        out.print(render.table(rows, findings, slow, time.monotonic() - began, heard.facts))
        if plan.run.engine == "tensorflow" and len(plan.hosts) > 1:
            out.print(STRANGERS, style="dim", soft_wrap=True)
    return render.exit_code(findings)


STRANGERS = "note: TensorFlow's ports take any graph from anybody who reaches them: keep this network closed"
