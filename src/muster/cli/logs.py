"""muster logs"""

import os
import sys
import time

import click


@click.command("logs")
@click.argument("words", metavar="[TASK] [RUN]", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="go on showing what comes, until the run ends")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=0, help="only the last so many lines of each task")
def command(words: tuple[str, ...], follow: bool, lines: int) -> int:
    """What TASK (worker/1), or all tasks, of RUN (the newest, or a named one) printed."""
    from muster.errors import Refused
    from muster.journal import find
    from muster.plan import check_task_name
    from muster.watch.lines import Lines
    from muster.watch.tail import Tail

    task = next((w for w in words if "/" in w and not os.path.exists(w)), "")
    rest = [w for w in words if w != task]
    if len(rest) > 1:
        raise Refused("more than one run is named", at="command line", because=", ".join(rest))
    folder = find(rest[0] if rest else "")
    plan = folder.plan()
    names = [check_task_name(task, plan).id] if task else list(plan.tasks)
    width = max(map(len, names))
    readers = {name: (Tail(folder.logs / plan.tasks[name].log), Lines()) for name in names}
    first = True
    while True:
        ended = folder.launcher() == 0
        for name, (tail, cut) in readers.items():
            found = cut.feed(tail.more())
            for line in found[-lines:] if lines and first else found:
                sys.stdout.write(line + "\n" if task else f"{name:<{width}} | {line}\n")
        first = False
        sys.stdout.flush()
        if not follow or ended:
            break
        time.sleep(0.2)
    for name, (_, cut) in readers.items():
        for line in cut.rest():
            sys.stdout.write(line + "\n" if task else f"{name:<{width}} | {line}\n")
    return 0
