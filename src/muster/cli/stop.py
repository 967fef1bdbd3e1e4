"""muster stop"""

import contextlib
import os
import signal
import time

import click


@click.command("stop")
@click.argument("run", default="")
@click.option("--now", is_flag=True, help="without the grace time")
def command(run: str, now: bool) -> int:
    """End RUN (the newest, or a named one) cleanly, from any terminal."""
    from muster.journal import find
    from muster.launch.sweep import processes_of, sweep_run

    folder = find(run)
    if pid := folder.launcher():
        with contextlib.suppress(ProcessLookupError):  # it ends at this very moment
            os.kill(pid, signal.SIGUSR1)
            if now:
                time.sleep(0.05)
                os.kill(pid, signal.SIGUSR1)
        limit = time.monotonic() + folder.plan().run.grace * 2 + 15
        while folder.launcher() and time.monotonic() < limit:
            time.sleep(0.05)
        if not folder.launcher():
            print(f"run {folder.id} has ended")
            return 0
        print(f"the launcher of {folder.id} (pid {pid}) does not end; its tasks are ended one by one")
    count = sweep_run(folder.id, 0.0 if now else 5.0)
    left = processes_of(folder.id)
    print(
        f"run {folder.id} was over; "
        + (f"{count} process(es) of it were ended" if count else "nothing of it was alive")
    )
    return 1 if left else 0
