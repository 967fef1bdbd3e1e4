"""A cluster and how to train on it, as typed values.

Each setting is one field here and nowhere else: its type, bounds and help text make the key of the file, the flag of
the command line, the error that lists what would have been valid, and the manual.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from muster.addresses import Address, parse_address
from muster.errors import Refused

LAUNCHERS = ("local", "ssh")
MOST_TASKS = 10_000  # of one role: beyond that a count is a slip of the finger, and a plan of it would fill memory

Seats = Annotated[list[str], Meta(max_length=MOST_TASKS)]
Count = Annotated[int, Meta(ge=0, le=MOST_TASKS)]


class Host(msgspec.Struct, frozen=True):
    """A machine of the cluster. ``gpus``: how many, or which; None means that the machine itself is asked."""

    name: Annotated[str, Meta(description="what the screen calls it")] = ""
    address: Annotated[str, Meta(description="what other tasks dial")] = ""
    ports: Annotated[
        str, Meta(description="range from which its tasks' ports are taken, as others dial them; else that of [run]")
    ] = ""
    bind: Annotated[
        str, Meta(description="address that its tasks listen on, where others dial another one (0.0.0.0: all it has)")
    ] = ""
    bind_ports: Annotated[
        str, Meta(description="range that its tasks listen on, one for one with ports: what a container publishes")
    ] = ""
    ssh: Annotated[str, Meta(description="how your ssh reaches it: an alias, user@host or ssh://user@host:port")] = ""
    gpus: Annotated[Count | list[int] | None, Meta(description="how many GPUs, or a list of their indices")] = None
    slots: Annotated[Count | None, Meta(description="the most tasks to put on it")] = None
    python: Annotated[str, Meta(description="the interpreter that runs the tasks")] = ""
    cwd: Annotated[str, Meta(description="the folder in which the tasks run")] = ""
    env: Annotated[dict[str, str], Meta(description="variables for the tasks on this host")] = {}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """How to train: who takes part, over which engine, and what is forgiven."""

    ps: Annotated[Count | Seats | None, Meta(description="parameter servers: a number, or their host:port seats")] = (
        None
    )
    workers: Annotated[Count | Seats, Meta(description="workers: a number, or their host:port seats")] = 3
    chief: Annotated[
        bool | str | list[str] | None,
        Meta(description="a separate chief/0, not counted in workers: true, or its host:port; else worker/0 is it"),
    ] = None
    evaluator: Annotated[
        bool | str | list[str],
        Meta(description="a task beside the training that evaluates its checkpoints (tensorflow engine)"),
    ] = False
    gpus_per_worker: Annotated[Count | None, Meta(description="GPUs of each worker; by default shared out evenly")] = (
        None
    )
    engine: Annotated[
        Literal["muster", "tensorflow"] | None,
        Meta(description="whose parameter servers (muster; tensorflow where kind, tf1 or role_flags is given)"),
    ] = None
    kind: Annotated[
        Literal["v1", "pss", "mwms"] | None,
        Meta(description="a tensorflow script's: v1 session, ParameterServerStrategy, MultiWorkerMirroredStrategy"),
    ] = None
    tf1: Annotated[bool, Meta(description="run a TensorFlow 1 script verbatim (tensorflow engine, v1, role flags)")] = (
        False
    )
    role_flags: Annotated[bool, Meta(description="give the script --job_name=ps --task_index=0")] = False
    mode: Annotated[Literal["async", "sync", "bounded"], Meta(description="how gradients are applied")] = "async"
    spare: Annotated[Count, Meta(description="sync: workers that a round does not wait for")] = 0
    max_staleness: Annotated[Count | None, Meta(description="bounded: steps that a worker may be ahead")] = None
    encrypt: Annotated[bool, Meta(description="TLS between hosts for Muster's own parameter servers")] = True
    checkpoints: Annotated[str, Meta(description="folder for checkpoints, seen by all hosts")] = ""
    ports: Annotated[str, Meta(description="range from which ports are taken where the file names none")] = (
        "20000-20999"
    )
    done: Annotated[
        Literal["chief", "all-workers", "first-worker"], Meta(description="who ends the run by ending well")
    ] = "chief"
    retries: Annotated[Count, Meta(description="restarts allowed for each task within the window")] = 3
    window: Annotated[float, Meta(gt=0, description="seconds over which restarts are counted")] = 600.0
    backoff: Annotated[float, Meta(ge=0, description="seconds before the first restart; doubles each time")] = 1.0
    grace: Annotated[
        float, Meta(ge=0, description="seconds between asking a task to end (TERM) and ending it (KILL)")
    ] = 5.0
    settle: Annotated[
        float, Meta(ge=0, description="seconds the others get to end by themselves after the run is done")
    ] = 10.0
    last_evaluation: Annotated[
        float, Meta(ge=0, description="seconds the evaluator gets for the last checkpoint once training has ended")
    ] = 60.0
    barrier: Annotated[
        float, Meta(ge=0, description="seconds that a ready worker waits for the others at the start")
    ] = 60.0
    quiet: Annotated[
        float, Meta(gt=0, description="seconds without a step and without output that are worth a warning")
    ] = 60.0
    gpu_idle: Annotated[
        float,
        Meta(ge=0, description="seconds after which a task that does not use its GPU is warned of; 0: nobody looks"),
    ] = 60.0
    stall: Annotated[
        float, Meta(ge=0, description="seconds without a step after which a worker is restarted; 0: never")
    ] = 0.0
    log_mb: Annotated[int, Meta(ge=1, description="size in MB at which a log is rotated (one old part is kept)")] = 100


class Cluster(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(description="of the cluster and its runs")] = ""
    launcher: Annotated[str, Meta(description="how tasks are started")] = "local"
    ssh_config: Annotated[str, Meta(description="an OpenSSH configuration to use instead of yours")] = ""
    accept_new_keys: Annotated[bool, Meta(description="let ssh accept the keys of hosts it has not seen before")] = (
        False
    )
    hosts: list[Host] = []
    run: Run = Run()
    source: str = ""  # the file it came from; "" for this machine without a file
    warnings: tuple[str, ...] = ()


JOBS = ("ps", "workers", "chief")
ROLES = (("chief", "chief"), ("ps", "ps"), ("worker", "workers"), ("evaluator", "evaluator"))  # role, setting of [run]


def settled(run: Run) -> Run:
    """``run`` with engine and kind decided: what speaks of a TensorFlow script asks for TensorFlow's engine."""
    asks = run.kind is not None or run.tf1 or run.role_flags
    engine = run.engine or ("tensorflow" if asks else "muster")
    return msgspec.structs.replace(run, engine=engine, kind=run.kind or "v1", role_flags=run.role_flags or run.tf1)


def listed(given: object) -> list[str]:
    """The seats that a setting names: one, or a list of them; none where it is a number, or true."""
    return [given] if isinstance(given, str) else given if isinstance(given, list) else []


def port_range(text: str, where: str) -> range:
    """The ports of ``20000-20999``. Raises Refused."""
    found = re.fullmatch(r"(\d{1,6})-(\d{1,6})", text)
    if found and 1024 <= int(found[1]) <= int(found[2]) <= 65535:
        return range(int(found[1]), int(found[2]) + 1)
    raise Refused(
        f"{text!r} is no range of ports", at=where, try_='two ports from 1024 to 65535: ports = "20000-20999"'
    )


def host_ports(text: str, where: str) -> range:
    """As ``port_range``, or one port alone: a container may publish no more. Raises Refused."""
    return port_range(f"{text}-{text}" if re.fullmatch(r"\d{1,6}", text) else text, where)


def seats(run: Run, job: str) -> list[Address]:
    """The exact seats of ps, workers, chief or evaluator; empty where a count is given."""
    return [parse_address(seat, job) for seat in listed(getattr(run, job))]
