"""The check over plain ssh, from the lab's ``ctl``: what ``muster check`` does once it has its launcher's pipes."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster.check.channel import Pipe, ssh_argv
from muster.check.findings import Finding, Job, Wanted
from muster.check.survey import Survey, survey
from muster.check.verdicts import judge

from .lab import Lab

PORT = 2222
SCRIPT = "train.py"


@dataclass(frozen=True)
class Checked:
    findings: list[Finding]
    survey: Survey
    seconds: float


def plan(lab: Lab) -> list[Wanted]:
    """One task on each machine, named as the machine is: worker0.example.com runs worker/0 at port 2222."""
    return [_wanted(lab, host) for host in lab.names]


def _wanted(lab: Lab, host: str) -> Wanted:
    name = host.partition(".")[0]
    task = f"{name.rstrip('0123456789')}/{name.lstrip('abcdefghijklmnopqrstuvwxyz')}"
    (lab.private(host) / SCRIPT).write_text("import tensorflow as tf\n")
    return Wanted(
        host,
        address=host,
        python=sys.executable,
        cwd=str(lab.home),
        script=SCRIPT,
        checkpoints=str(lab.shared),
        ports={task: PORT},
        tasks=(task,),
    )


def open_pipe(lab: Lab, w: Wanted) -> Pipe:
    return Pipe(lab.argv("ctl", ssh_argv(w.host, w.python, ["-F", str(lab.ssh_config)])))


def check(
    lab: Lab, wanted: Sequence[Wanted], job: Job | None = None, *, progress: Callable[[str], None] = lambda text: None
) -> Checked:
    began = time.monotonic()
    heard = survey(wanted, lambda w: open_pipe(lab, w), job, progress=progress)
    return Checked(judge(wanted, heard.facts, heard.pairs, job), heard, time.monotonic() - began)
