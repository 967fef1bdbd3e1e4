"""Writes the pages of docs/reference that the code already says: the cluster file, and the command line.

python docs/generate.py

Types, defaults, bounds and help texts come from the fields of ``muster.cluster`` and the options of ``muster.cli``;
only the sentences between the tables stand here. ``tests/unit/test_docs.py`` fails where a page and the code differ.
"""

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from muster.cli import VERBS, group
from muster.cluster import LAUNCHERS, Cluster, Host, Run
from muster.clusterfile import takes

HERE = Path(__file__).parent
MADE = "<!-- made by docs/generate.py from the code: change the fields there, not this page -->"


def pages() -> dict[Path, str]:
    return {HERE / "reference" / "cluster-file.md": cluster_file(), HERE / "reference" / "cli.md": cli()}


# --- the cluster file

CLUSTER_FILE = """\
# The cluster file

{made}

A TOML file: the machines, and how to train on them. `muster init` writes a commented one, `muster plan -c FILE` shows
what it means. Without `-c`, `./cluster.toml` is taken where it exists, else this machine alone. Unknown keys are
refused with the line, the nearest valid key and the list of keys.

```toml
{example}```

`-c` also takes a `TF_CONFIG` or `ClusterSpec` in a file whose name ends in `.json`, and
`muster init --from FILE` makes a cluster file of one, or of a host file.

## At the top

{top}

## `[[hosts]]`

One table for each machine. Without any, local runs use this machine, and runs with exact seats take the hosts of the
seats.

{hosts}

A host's tasks get its `env`, what Muster itself sets, and the variables named with `muster run --pass NAME`; nothing
else of your environment travels to other machines.

## `[run]`

Every key is also a flag of `run`, `plan` and `check` (`gpus_per_worker` is `--gpus-per-worker`), and the flag wins.

{run}

Left out, `ps` is 2 (0 for kind `mwms`), and `chief` is true for kind `pss` and false for the others.

Counts and exact seats do not mix: seats for `ps`, `workers` and `chief`, or counts for all. `master` is taken as the
old name of `chief`, and `worker` as another name of `workers`.
"""

EXAMPLE = """\
name = "lab"
launcher = "ssh"

[[hosts]]
name = "gpu-a"
address = "10.0.0.11"
ssh = "ml@gpu-a"
python = "/opt/venv/bin/python"
cwd = "/home/ml/project"

[[hosts]]
name = "gpu-b"
address = "10.0.0.12"
ssh = "ml@gpu-b"
python = "/opt/venv/bin/python"
cwd = "/home/ml/project"

[run]
ps = 2
workers = 3
"""


def cluster_file() -> str:
    return CLUSTER_FILE.format(
        made=MADE, example=EXAMPLE, top=_settings(Cluster), hosts=_settings(Host), run=_settings(Run)
    )


def _settings(table: type[msgspec.Struct]) -> str:
    hints = typing.get_type_hints(table, include_extras=True)
    defaults = msgspec.structs.fields(table)
    rows = []
    for field in defaults:
        said = _said(hints[field.name])
        if said:
            rows.append((f"`{field.name}`", said, _takes(field.name, hints[field.name]), _default(field)))
    return _table(("key", "what", "takes", "default"), rows)


def _said(hint: Any) -> str:
    return next((m.description for m in getattr(hint, "__metadata__", ()) if m.description), "")


def _takes(name: str, hint: Any) -> str:
    words = "one of: " + ", ".join(LAUNCHERS) if name == "launcher" else takes(hint)
    return words + "".join(f", {bound}" for bound in _bounds(hint))


def _bounds(hint: Any) -> Iterator[str]:
    for meta in getattr(hint, "__metadata__", ()):
        if meta.gt is not None:
            yield f"more than {meta.gt}"
        if meta.ge not in (None, 0):
            yield f"{meta.ge} or more"


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "" if value in (None, "", {}, []) else f"`{json.dumps(value)}`"


# --- the command line

CLI = """\
# The command line

{made}

```
{help}```

Options stand before the script; what comes after it is the script's own. Exit codes are on
[their own page](exit-codes.md).

{verbs}
## Settings of `[run]` as flags

`run`, `plan` and `check` take these; they win over the cluster file. The same settings stand, with types and defaults,
in [the cluster file](cluster-file.md).

{settings}
"""


def cli() -> str:
    context = click.Context(group, info_name="muster", terminal_width=100, max_content_width=100)
    settings = [option for option in _options("run") if _is_setting(option)]
    return CLI.format(
        made=MADE,
        help=group.get_help(context) + "\n",
        verbs="\n".join(_verb(name) for name in VERBS),
        settings=_table(("flag", "what"), [(_flag(option), option.help or "") for option in settings]),
    )


def _verb(name: str) -> str:
    command = _command(name)
    context = click.Context(command, info_name=f"muster {name}", terminal_width=100, max_content_width=100)
    usage = command.get_usage(context).removeprefix("Usage: ")
    own = [option for option in _options(name) if not _is_setting(option)]
    table = _table(("option", "what"), [(_flag(option), option.help or "") for option in own])
    also = (
        "\nand the settings of `[run]`, [below](#settings-of-run-as-flags).\n" if len(own) < len(_options(name)) else ""
    )
    return f"## `muster {name}`\n\n{command.help}\n\n```\n{usage}\n```\n\n{table}\n{also}"


def _command(name: str) -> click.Command:
    found = group.get_command(click.Context(group), name)
    assert found is not None
    return found


def _options(name: str) -> list[click.Option]:
    return [p for p in _command(name).params if isinstance(p, click.Option) and not p.hidden]


def _is_setting(option: click.Option) -> bool:
    return option.name in Run.__struct_fields__


def _flag(option: click.Option) -> str:
    metavar = "" if option.is_flag else " " + _metavar(option)
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names}{metavar}`".replace("|", "\\|")


def _metavar(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    return "|".join(option.type.choices) if isinstance(option.type, click.Choice) else (option.type.name or "").upper()


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(HERE))
