"""The cluster file, read into typed values.

Every error names the key and the line, and lists what would have been valid.
"""

import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import tomllib

from muster.addresses import key, odd_name, parse_address
from muster.cluster import JOBS, LAUNCHERS, Cluster, Host, Run, host_ports
from muster.errors import Refused, nearest
from muster.rules import check_run
from muster.written import Source

OLD = {"master": "chief", "worker": "workers"}


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
