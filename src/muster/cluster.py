"""The cluster file, read into typed values.

Each setting is one field here and nowhere else: its type, bounds and help text make the key of the file, the flag of
the command line, the error that lists what would have been valid, and the manual.

What TensorFlow swallows (a port of 70000 becomes 4464, a job called ``ps_hosts`` is accepted and never found) is
refused here, with the key and the line, before anything has started.
"""

import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import tomllib
from msgspec import Meta

from muster.addresses import Address, key, odd_name, parse_address
from muster.errors import Refused, nearest

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


class Source:
    """Where settings were written, so that an error can name the line."""

    def __init__(self, path: str, text: str = "") -> None:
        self.path = path
        self._lines = dict(_lines(text))

    def at(self, where: str) -> str:
        """``where`` is a key path such as ``run.ps[1]`` or ``hosts[0].address``."""
        probe = where
        while probe:
            if probe in self._lines:
                return f"{self.path}, line {self._lines[probe]}: {where}"
            probe = probe[: max(probe.rfind("."), probe.rfind("["), 0)]
        return f"{self.path}: {where}" if where else self.path


def _lines(text: str) -> typing.Iterator[tuple[str, int]]:
    """(key path, line number) for each table and key of a TOML text: good for messages, not for parsing."""
    table, counts = "", dict[str, int]()
    last, item = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[\s*([\w.\"' -]+?)\s*\]\]", line):
            name = head[1]
            table = f"{name}[{counts.get(name, 0)}]"
            counts[name] = counts.get(name, 0) + 1
            yield table, number
        elif head := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
            table = head[1]
            yield table, number
        elif head := re.match(r"\s*([\w\"'-]+)\s*=", line):
            path = f"{table}.{head[1]}" if table else head[1]
            last, item = path, 0
            yield path, number
            for _ in re.findall(r'"[^"]*"|\'[^\']*\'', line.partition("=")[2].split("#")[0]):
                yield f"{last}[{item}]", number
                item += 1
        else:
            for _ in re.findall(r'"[^"]*"|\'[^\']*\'', line.split("#")[0]):
                if counts or table:
                    yield f"{last}[{item}]", number
                    item += 1


def load(path: Path) -> Cluster:
    """The cluster that a TOML file describes. Raises Refused with the line and what would have been valid."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise Refused(
            "there is no such cluster file", at=str(path), try_="muster init writes one; -c names another"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refused("the cluster file cannot be read", at=str(path), because=str(error)) from None
    if len(text) > 4_000_000:
        raise Refused("the cluster file is far too long", at=str(path), because=f"{len(text):,} characters")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(
            "the cluster file is not valid TOML",
            at=str(path),
            because=str(error),
            try_='text stands in double quotes: launcher = "local"',
        ) from None
    except RecursionError:
        raise Refused("the cluster file is nested too deeply", at=str(path)) from None
    return from_raw(raw, Source(str(path), text))


def from_raw(raw: dict[str, Any], source: Source) -> Cluster:
    """Checks keys, types, seats and hosts of what a file said. Raises Refused."""
    warnings: list[str] = []
    _known(raw, Cluster, "", source, without=("source", "warnings"))
    run = raw.get("run", {})
    if isinstance(run, dict):
        run = _old_names(run, source, warnings)
        _known(run, Run, "run", source)
    hosts = raw.get("hosts", [])
    if not isinstance(hosts, list):
        raise Refused("hosts is not a list of tables", at=source.at("hosts"), try_="write each as [[hosts]]")
    for n, host in enumerate(hosts):
        if isinstance(host, dict):
            _known(host, Host, f"hosts[{n}]", source)
    made = convert({**raw, "run": run}, Cluster, "", source)
    if made.launcher not in LAUNCHERS:
        near = nearest(made.launcher, list(LAUNCHERS))
        raise Refused(
            f"there is no launcher {made.launcher!r}",
            at=source.at("launcher"),
            try_=(f"did you mean {near!r}? " if near else "") + f"one of: {', '.join(LAUNCHERS)}",
        )
    if "hosts" in raw and not made.hosts:
        raise Refused("the cluster has no hosts", at=source.at("hosts"), try_="add a [[hosts]] table, or drop the key")
    named = tuple(_host(host, n, made, source, warnings) for n, host in enumerate(made.hosts))
    _no_twins(named, source)
    made = msgspec.structs.replace(made, hosts=list(named), source=source.path)
    warnings += check_run(made.run, source)
    return msgspec.structs.replace(made, warnings=tuple(warnings))


Made = TypeVar("Made")


def convert(raw: Any, kind: type[Made], where: str, source: Source) -> Made:
    """``msgspec.convert`` with our errors."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").replace("[...]", "")
        full = (where + path if path.startswith("[") else f"{where}{path}").lstrip(".")
        raise Refused(
            f"{full or where} has a wrong value", at=source.at(full), because=_plain(said), try_=_choices(full)
        ) from None


def _choices(path: str) -> str:
    """What the setting at a key path takes, from its field."""
    table, _, name = path.rpartition(".")
    name = name.split("[")[0]
    top = Cluster if name in Cluster.__struct_fields__ else Run  # a flag has the name of its field in [run]
    kind: Any = {"run": Run, "": top}.get(table, Host if table.startswith("hosts") else None)
    if kind is None or name not in kind.__struct_fields__:
        return ""
    hint = typing.get_type_hints(kind, include_extras=True)[name]
    said = next((m.description for m in getattr(hint, "__metadata__", ()) if m.description), "")
    return f"{name} is {said}" + (f" ({takes(hint)})" if takes(hint) else "")


def takes(hint: Any) -> str:
    """A type in words: ``a whole number``, ``one of: a, b``."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return "one of: " + ", ".join(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(w for w in map(takes, typing.get_args(hint)) if w)
    if typing.get_origin(hint) is list:
        return "a list"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
    return names.get(typing.get_origin(hint) or hint, "")


def _plain(said: str) -> str:
    words = {
        "`int`": "a whole number",
        "`str`": "text",
        "`bool`": "true or false",
        "`array`": "a list",
        "`float`": "a number",
        "`object`": "a table",
        "`null`": "nothing",
    }
    for theirs, ours in words.items():
        said = said.replace(theirs, ours)
    if both := re.fullmatch(r"Expected `([\w| ]+)`, got (.*)", said):
        wants = " or ".join(words[f"`{part}`"] for part in both[1].split(" | ") if part != "null")
        return f"expected {wants}, got {both[2]}"
    return said[:1].lower() + said[1:]


OLD = {"master": "chief", "worker": "workers"}
JOBS = ("ps", "workers", "chief")
ROLES = (("chief", "chief"), ("ps", "ps"), ("worker", "workers"), ("evaluator", "evaluator"))  # role, setting of [run]


def _old_names(run: dict[str, Any], source: Source, warnings: list[str]) -> dict[str, Any]:
    """``master`` is TensorFlow's old name for the chief; ``worker`` is the ClusterSpec's name for our workers."""
    run = dict(run)
    for old, new in OLD.items():
        if old not in run:
            continue
        if new in run:
            raise Refused(
                f"{old} and {new} are the same thing, and both are given",
                at=source.at(f"run.{old}"),
                because=f"{old} is {'the old' if old == 'master' else 'another'} name of {new}",
                try_=f"keep {new}",
            )
        if old == "master":
            warnings.append(f"{source.at('run.master')}: master is the old name of the chief; it is taken as chief")
        run[new] = run.pop(old)
    return run


def _known(raw: dict[str, Any], kind: Any, where: str, source: Source, without: tuple[str, ...] = ()) -> None:
    known = [name for name in kind.__struct_fields__ if name not in without]
    strangers = [name for name in raw if name not in known]
    if not strangers:
        return
    told = []
    for name in strangers:
        near = (
            nearest(name.removesuffix("_hosts"), [*JOBS, "evaluator"])
            if where == "run" and "_hosts" in name
            else nearest(name, known)
        )
        told.append(f"{name}" + (f" -> {near}" if near else ""))
    path = f"{where}.{strangers[0]}" if where else strangers[0]
    tables = {"": "at the top", "run": "in [run]"}.get(where, "in [[hosts]]")
    raise Refused(
        f"unknown {'setting' if len(strangers) == 1 else 'settings'} {', '.join(map(repr, strangers))}",
        at=source.at(path),
        because="nearest valid: " + "; ".join(told) if any("->" in t for t in told) else "",
        try_=f"{tables} there may be: {', '.join(known)}",
    )


def _host(host: Host, n: int, cluster: Cluster, source: Source, warnings: list[str]) -> Host:
    where = f"hosts[{n}]"
    address = host.address or (host.name if host.name and cluster.launcher != "local" else "127.0.0.1")
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    parse_address(f"[{address}]:1" if ":" in address else f"{address}:1", source.at(f"{where}.address"), host_only=True)
    if odd := odd_name(address):
        warnings.append(f"{source.at(where + '.address')}: {odd}")
    name = host.name or address
    if not re.fullmatch(r"[^\s/\x00-\x1f]{1,64}", name) or name.startswith("-"):
        raise Refused(
            f"{name[:80]!r} cannot be the name of a host",
            at=source.at(f"{where}.name"),
            because="a name has 1 to 64 characters without blanks or slashes, and no dash in front",
        )
    if isinstance(host.gpus, list) and (len(set(host.gpus)) < len(host.gpus) or any(g < 0 for g in host.gpus)):
        raise Refused(
            f"gpus of {name} are not a list of different indices",
            at=source.at(f"{where}.gpus"),
            because=f"{host.gpus}",
            try_="gpus = 4, or gpus = [0, 1, 2, 3]",
        )
    _check_bound(host, name, where, source)
    for variable in host.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise Refused(f"{variable!r} cannot be the name of a variable", at=source.at(f"{where}.env"))
    return msgspec.structs.replace(host, name=name, address=address)


def _check_bound(host: Host, name: str, where: str, source: Source) -> None:
    if host.bind:
        parse_address(
            f"[{host.bind}]:1" if ":" in host.bind else f"{host.bind}:1", source.at(f"{where}.bind"), host_only=True
        )
    dialled = host_ports(host.ports, source.at(f"{where}.ports")) if host.ports else range(0)
    if host.bind_ports and len(dialled) != len(host_ports(host.bind_ports, source.at(f"{where}.bind_ports"))):
        raise Refused(
            f"bind_ports of {name} are not as many as its ports",
            at=source.at(f"{where}.bind_ports"),
            because=f"ports is {host.ports or 'not set'}, bind_ports is {host.bind_ports}, and they lead one to one",
            try_='ports = "3200-3299" and bind_ports = "2200-2299", for docker run -p 3200-3299:2200-2299',
        )


def _no_twins(hosts: tuple[Host, ...], source: Source) -> None:
    names: dict[str, int] = {}
    places: dict[tuple[str, str], int] = {}
    for n, host in enumerate(hosts):
        where = source.at(f"hosts[{n}]")
        if host.name in names:
            raise Refused(
                f"two hosts are called {host.name!r}",
                at=where,
                because=f"hosts[{names[host.name]}] is too",
                try_="give each its own name",
            )
        # Two sshd at one address are two hosts (containers that share an IP); the same place twice is a slip.
        place = (key(host.address), host.ssh)
        if place in places:
            raise Refused(
                f"{host.name} and {hosts[places[place]].name} are the same machine",
                at=where,
                because=f"both have address {host.address}" + (f" and ssh {host.ssh}" if host.ssh else ""),
                try_="list a machine once; its share of tasks comes from gpus and slots",
            )
        names[host.name] = places[place] = n


def settled(run: Run) -> Run:
    """``run`` with engine and kind decided: what speaks of a TensorFlow script asks for TensorFlow's engine."""
    asks = run.kind is not None or run.tf1 or run.role_flags
    engine = run.engine or ("tensorflow" if asks else "muster")
    return msgspec.structs.replace(run, engine=engine, kind=run.kind or "v1", role_flags=run.role_flags or run.tf1)


def overruled(run: Run, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of ``run``, as the file has it, gives way to what flags ask for (``given``), and a sentence on each.

    A flag wins over the file, so also over what in the file contradicts that flag. Two flags that contradict each other
    are left for ``check_run`` to refuse.
    """
    kind = given.get("kind") or ("v1" if given.get("tf1") else None)
    asks = given.get("kind") is not None or given.get("tf1") or given.get("role_flags")
    engine = given.get("engine") or ("tensorflow" if asks else None)
    # setting of the file: what it becomes, whether it stands in the way, and of what
    rows: list[tuple[str, Any, bool, str]] = [
        ("engine", "tensorflow", run.engine == "muster" and engine == "tensorflow", "the tensorflow engine"),
        ("kind", None, run.kind is not None and engine == "muster", "the muster engine"),
        ("tf1", False, run.tf1 and engine == "muster", "the muster engine"),
        ("role_flags", False, run.role_flags and engine == "muster", "the muster engine"),
        ("evaluator", False, bool(run.evaluator) and engine == "muster", "the muster engine"),
        ("kind", kind, run.kind not in (None, kind) and bool(given.get("tf1")), "tf1"),
        ("tf1", False, run.tf1 and kind in ("pss", "mwms"), f"kind {kind}"),
        ("ps", None, run.ps not in (None, 0, []) and kind == "mwms", "kind mwms, which has no ps"),
        ("chief", None, run.chief is False and kind == "pss", "kind pss, which has a chief"),
        ("spare", 0, run.spare > 0 and given.get("mode", "sync") != "sync", f"mode {given.get('mode')}"),
        ("max_staleness", None, run.max_staleness is not None and given.get("mode", "bounded") != "bounded",
         f"mode {given.get('mode')}"),
    ]  # fmt: skip
    found = [row for row in rows if row[2] and row[0] not in given]
    said = [f"{name} = {msgspec.json.encode(getattr(run, name)).decode()} of the file gives way to {whom}"
            for name, _, _, whom in found]  # fmt: skip
    return {name: value for name, value, _, _ in found}, said


def check_run(given: Run, source: Source) -> list[str]:
    """What a type cannot say about [run]. Raises Refused; returns warnings."""
    run = settled(given)
    if run.engine == "muster" and given.kind is not None:
        raise Refused(
            f"kind {given.kind} goes with the tensorflow engine", at=source.at("run.kind"),
            because="over Muster's own parameter servers there is one kind of script: muster.fit or muster.connect",
            try_="drop engine, or drop kind",
        )  # fmt: skip
    if run.engine == "muster" and given.role_flags:
        raise Refused(
            "role_flags goes with the tensorflow engine", at=source.at("run.role_flags"),
            because="over Muster's own parameter servers only workers run the script, and muster.worker_index() tells",
            try_="drop engine, or drop role_flags",
        )  # fmt: skip
    warnings: list[str] = []
    port_range(run.ports, source.at("run.ports"))
    if isinstance(run.chief, list) and len(run.chief) > 1:
        raise Refused(
            "there are two chiefs",
            at=source.at("run.chief"),
            because=", ".join(run.chief),
            try_="a cluster has one chief; the others are workers",
        )
    _check_evaluator(given, source)
    if run.workers in (0, []) and run.kind != "pss":
        raise Refused(
            "there is no worker",
            at=source.at("run.workers"),
            because="nobody would compute",
            try_="workers = 1 or more",
        )
    if run.workers in (0, []):
        raise Refused(
            "there is no worker",
            at=source.at("run.workers"),
            because="the chief of a ParameterServerStrategy only coordinates",
            try_="workers = 1 or more",
        )
    _check_kind(run, source)
    seen: dict[str, str] = {}
    for role, job in ROLES:
        for n, seat in enumerate(listed(getattr(run, job))):
            where = source.at(f"run.{job}[{n}]")
            address = parse_address(seat, where)
            if odd := odd_name(address.host):
                warnings.append(f"{where}: {odd}")
            task = f"{role}/{n}"
            if (other := seen.setdefault(address.key, task)) != task:
                raise Refused(
                    f"{other} and {task} have the same address {seat}",
                    at=where,
                    because="TensorFlow takes it and both then fight for one port",
                    try_="a port for each task",
                )
    counted = [job for job in (*JOBS, "evaluator") if listed(getattr(run, job))]
    plain = [job for job in JOBS if isinstance(getattr(run, job), int) and getattr(run, job)]
    if counted and plain:
        raise Refused(
            f"exact seats for {' and '.join(counted)}, but a count for {' and '.join(plain)}",
            at=source.at(f"run.{plain[0]}"),
            because="ports could collide",
            try_="seats for all, or counts for all",
        )
    return warnings


def _check_evaluator(given: Run, source: Source) -> None:
    """An engine that nobody has named yet may still be named by a flag: the plan refuses that one."""
    if given.evaluator and given.engine == "muster":
        raise no_evaluator(source.at("run.evaluator"))
    if len(seats := listed(given.evaluator)) > 1:
        raise Refused(
            f"there are {len(seats)} evaluators",
            at=source.at("run.evaluator"),
            because=", ".join(seats),
            try_="TensorFlow knows one: keep one seat, or evaluator = true",
        )


def no_evaluator(at: str) -> Refused:
    """What is asked for stands beside TensorFlow's training, and Muster's own needs none."""
    return Refused(
        "evaluator goes with the tensorflow engine",
        at=at,
        because="over Muster's own parameter servers the chief validates, after each epoch, on the values of then",
        try_="validation_data in muster.fit(...); or --kind v1 | pss | mwms for a TensorFlow script with checkpoints",
    )


def _check_kind(run: Run, source: Source) -> None:
    if run.kind == "pss" and run.chief is False:
        raise Refused(
            "kind pss needs exactly one chief",
            at=source.at("run.chief"),
            because="the chief runs the ClusterCoordinator; workers and ps only serve",
            try_="chief = true",
        )
    if run.kind == "mwms" and run.ps not in (None, 0, []):
        raise Refused(
            "kind mwms has no ps",
            at=source.at("run.ps"),
            because="its workers exchange gradients among themselves",
            try_="drop ps, or use kind v1 or pss",
        )
    if run.ps in (0, []) and not (run.kind == "mwms" and run.engine == "tensorflow"):
        raise Refused(
            "there is no ps", at=source.at("run.ps"), because="the parameters live on the ps", try_="ps = 1 or more"
        )
    if run.tf1 and (run.engine != "tensorflow" or run.kind != "v1"):
        raise Refused(
            "tf1 goes with the tensorflow engine and kind v1",
            at=source.at("run.tf1"),
            because=f"engine is {run.engine}, kind is {run.kind}",
            try_="drop the other setting",
        )
    workers = len(run.workers) if isinstance(run.workers, list) else run.workers
    if run.spare and (run.mode != "sync" or run.spare >= workers):
        raise Refused(
            "spare goes with sync, and is less than the workers",
            at=source.at("run.spare"),
            because=f"mode is {run.mode}, workers are {workers}, spare is {run.spare}",
        )
    if (run.max_staleness is not None) != (run.mode == "bounded"):
        raise Refused(
            "max_staleness goes with mode bounded",
            at=source.at("run.max_staleness" if run.max_staleness is not None else "run.mode"),
            because=f"mode is {run.mode}, max_staleness is {run.max_staleness or 'missing'}",
            try_='mode = "bounded", max_staleness = 3',
        )


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
