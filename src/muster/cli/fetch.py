"""muster fetch"""

import os
from pathlib import Path

import click

from muster.cli.options import cluster_option


@click.command("fetch")
@cluster_option
@click.argument("run", default="")
@click.argument("paths", nargs=-1)
@click.option(
    "--to", type=click.Path(path_type=Path), help="the folder to bring them to (default: one named as the run)"
)
def command(file: Path | None, run: str, paths: tuple[str, ...], to: Path | None) -> int:
    """Bring logs, and files of the hosts, back: PATHS (default: the checkpoint folder) of RUN, one folder a host."""
    import shutil
    import sys

    from msgspec.structs import replace

    from muster.cli.options import find_cluster
    from muster.cluster import Cluster
    from muster.errors import Refused, RunFailed
    from muster.journal import find, runs
    from muster.launch.fetch import fetch_host

    if run and not any(folder.id.startswith(run) for folder in runs()) and not os.path.exists(Path(run, "plan.json")):
        run, paths = "", (run, *paths)  # the newest run, and the first word is a path
    folder = find(run)
    plan = folder.plan()
    to = to or Path(folder.id)
    wanted = list(paths) or ([plan.run.checkpoints] if plan.run.checkpoints else [])
    try:
        shutil.copytree(folder.logs, to / "logs", dirs_exist_ok=True)
    except OSError as error:
        raise Refused(
            "nothing can be brought there", at=str(to), because=str(error), try_="--to another/folder"
        ) from None
    print(f"{sum(1 for _ in (to / 'logs').iterdir())} logs in {to / 'logs'}")
    cluster = (
        find_cluster(file or (Path(plan.source) if plan.source else None), {})[0]
        if plan.launcher != "local"
        else Cluster()
    )
    failed = False
    cwd = {task.host: task.cwd for task in plan.tasks.values()}  # what the tasks wrote lies where they ran
    for host in plan.hosts if wanted else ():
        try:
            count = fetch_host(cluster, replace(host, cwd=cwd.get(host.name, host.cwd)), wanted, to / host.name)
        except RunFailed as error:  # the others' files are wanted all the same
            failed = True
            print(error, file=sys.stderr)
        else:
            print(f"{count} file(s) of {host.name} in {to / host.name}")
    return int(failed)
