"""The plan of a script on this machine as it is, and what can be known of it before anything starts."""

import os
import shutil
import socket
from pathlib import Path

from muster.cluster import Cluster
from muster.errors import Refused
from muster.launch.here import facts_here
from muster.placement import Facts
from muster.plan import Plan, Script, make_plan


def plan_only(cluster: Cluster, script: Script) -> Plan:
    """What ``muster plan`` shows: this machine is looked at, other hosts are not asked."""
    if cluster.launcher == "local":
        return plan_here(cluster, script)[0]
    return make_plan(cluster, script, os.getcwd(), {}, python="python3")


def plan_here(cluster: Cluster, script: Script, busy: frozenset[int] = frozenset()) -> tuple[Plan, dict[str, Facts]]:
    """The plan of ``script`` on this machine as it is now."""
    here = facts_here(busy)
    names = [host.name for host in cluster.hosts] or ["here"]
    facts = dict.fromkeys(names, here)
    return make_plan(cluster, script, os.getcwd(), facts), facts


def check_here(plan: Plan) -> None:
    """What can be known before anything starts, on this machine. Raises Refused."""
    for python in dict.fromkeys(task.python for task in plan.tasks.values()):
        if shutil.which(python) is None:
            raise Refused(
                f"there is no interpreter {python!r}",
                at=plan.source or "this machine",
                try_='python = "/path/to/python" in [[hosts]]',
            )
    for task in plan.tasks.values():
        if not Path(task.cwd).is_dir():
            raise Refused(
                f"the folder of {task.id} does not exist",
                at=f"{task.host}: {task.cwd}",
                try_='cwd = "..." in [[hosts]]',
            )
    for name in {task.bound.host for task in plan.tasks.values()}:
        _is_here(name, plan)


def _is_here(name: str, plan: Plan) -> None:
    """An address of another machine would be dialled there, while its task listens here."""
    who = next(task.id for task in plan.tasks.values() if task.bound.host == name)
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Refused(
            f"{name}, the address of {who}, leads nowhere",
            at=plan.source or "this machine",
            because=str(error),
            try_="an address of this machine such as 127.0.0.1, or the launcher that reaches that host",
        ) from None
    for family, kind, proto, _, address in found:
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
                return
            except OSError:
                continue
    raise Refused(
        f"{name}, the address of {who}, is not this machine",
        at=plan.source or "this machine",
        because=f"it is {found[0][4][0]}, and the launcher is local",
        try_="an address of this machine such as 127.0.0.1, or the launcher that reaches that host",
    )
