"""Options that several verbs share. Flags of [run] come from its fields: type, help and default stand there alone."""

import json
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from muster.cluster import Cluster, Run
from muster.clusterfile import convert, from_raw, load, takes
from muster.errors import MusterError, Refused, nearest
from muster.rules import check_run, overruled
from muster.written import Source

Decorated = Callable[..., Any]
HINTS = typing.get_type_hints(Run, include_extras=True)
SHORT = {"kind", "engine", "mode", "ps", "workers"}


DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Run)}


class Verb(click.Command):
    """Whoever asked for JSON gets it for an error too; its text goes to the other output all the same."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MusterError as error:
            if ctx.params.get("as_json"):
                print(json.dumps(error.as_json()), flush=True)
            raise


def _is_flag(name: str) -> bool:
    """Off unless it is turned on; what else it takes (the seat of the evaluator) stands in a file."""
    return isinstance(DEFAULTS[name], bool)


def run_options(command: Decorated) -> Decorated:
    """A flag for each setting of [run]."""
    for name in reversed(Run.__struct_fields__):
        hint = HINTS[name]
        said = next(m.description for m in hint.__metadata__ if m.description)
        flag = f"--{name.replace('_', '-')}"
        if _is_flag(name):
            command = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=said)(command)
        else:
            words = takes(hint).replace("one of: ", "").replace(", ", "|") if "one of" in takes(hint) else "VALUE"
            command = click.option(flag, name, metavar=words, help=said)(command)
    return command


def cluster_option(command: Decorated) -> Decorated:
    return click.option(
        "-c",
        "--cluster",
        "file",
        type=click.Path(path_type=Path),
        help="the cluster file (default: ./cluster.toml where it exists, else this machine)",
    )(command)


def find_cluster(file: Path | None, flags: dict[str, Any]) -> tuple[Cluster, str]:
    """The cluster to use and a sentence that says which. Flags win over the file. Raises Refused."""
    if file is None and Path("cluster.toml").exists():
        file, said = Path("cluster.toml"), "cluster: ./cluster.toml"
    else:
        said = f"cluster: {file}" if file else "cluster: this machine (no cluster.toml here; muster init writes one)"
    cluster = load_any(file) if file else Cluster()
    given = {name: _typed(name, text) for name, text in flags.items() if text is not None}
    if not given:
        return cluster, said
    source = Source("command line")
    for name in ("ps", "workers", "chief"):
        if name in given and not file and isinstance(given[name], str):
            raise Refused(f"--{name} takes a number here", at="command line", because=f"{given[name]!r}")
    asked = convert(given, Run, "", FlagSource())
    flags = {name: getattr(asked, name) for name in given}
    changed, gave_way = overruled(cluster.run, flags)
    run = msgspec.structs.replace(cluster.run, **changed, **flags)
    warnings = check_run(run, FlagSource())
    known = [
        *cluster.warnings,
        *gave_way,
        *(w for w in warnings if w not in cluster.warnings and not w.startswith(source.path)),
    ]
    return msgspec.structs.replace(cluster, run=run, warnings=tuple(known)), said


class FlagSource(Source):
    def __init__(self) -> None:
        super().__init__("command line")

    def at(self, where: str) -> str:
        name = where.removeprefix("run.").split("[")[0]
        return f"command line: --{name.replace('_', '-')}"


def load_any(file: Path) -> Cluster:
    """A TOML cluster file, or a TF_CONFIG or ClusterSpec in JSON."""
    if file.suffix == ".json":
        from muster.sources import from_tf_config

        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            raise Refused("the cluster file cannot be read", at=str(file), because=str(error)) from None
        return from_raw(from_tf_config(text, str(file)).raw, Source(str(file)))
    return load(file)


def _typed(name: str, text: Any) -> Any:
    """What was typed, as the number, truth or list that the setting takes; else the text, for the check to refuse."""
    if not isinstance(text, str):
        return text
    if name in ("ps", "workers", "chief") and ":" in text:
        return [part.strip() for part in text.split(",")]
    words = {"true": True, "false": False, "yes": True, "no": False}
    if name == "chief" and text.lower() in words:
        return words[text.lower()]
    hint = takes(HINTS[name])
    for kind in (int, float):
        if "number" in hint:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def no_stray_flag(words: Sequence[str]) -> None:
    """Raises Refused where an option that nobody knows stands in the place of the script."""
    if not words or not words[0].startswith("-") or os.path.isfile(words[0]):
        return
    known = [f"--{name.replace('_', '-')}" for name in Run.__struct_fields__] + ["--only", "--json", "--cluster"]
    name = words[0].split("=")[0]
    raise Refused(
        f"there is no option {name}",
        at="command line",
        because="options of muster stand before the script, those of the script after it",
        try_=nearest(name, known) or "muster run --help",
    )
