"""muster init"""

from pathlib import Path

import click

TEMPLATE = """\
# cluster.toml: the machines, and how to train on them. `muster plan` shows what it makes of this file.

name = "{name}"
launcher = "local"            # tasks are processes of this machine

# [[hosts]]                   # this machine is taken where no host is listed
# name = "gpu-a"              # what the screen calls it
# address = "127.0.0.1"       # what other tasks dial
# gpus = 2                    # how many, or which: [0, 1]; left out, the machine is asked
# python = "/opt/venv/bin/python"
# cwd = "/home/ml/project"
# env = {{ NCCL_SOCKET_IFNAME = "eth0" }}

[run]
ps = 2                        # a number, or exact seats: ["ps0.example.com:2222", "ps1.example.com:2222"]
workers = 3
# gpus_per_worker = 1         # left out: shared out evenly
# chief = true                # a separate chief/0; else worker/0 is the chief
# kind = "v1"                 # v1 | pss | mwms: session scripts, ParameterServerStrategy, MultiWorkerMirroredStrategy
# evaluator = true            # a task beside the training that evaluates its checkpoints (with a kind)
# checkpoints = "/shared/lab" # a folder that every host sees
# ports = "20000-20999"       # where ports are taken from
# retries = 3                 # restarts of a task within `window` seconds
"""


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path), default="cluster.toml")
@click.option(
    "--from", "source", type=click.Path(path_type=Path), help="a TF_CONFIG or ClusterSpec (JSON), or a host file"
)
@click.option("--force", is_flag=True, help="write over a file that exists")
def command(path: Path, source: Path | None, force: bool) -> int:
    """Write a commented cluster file to PATH (cluster.toml), or one made from what you already have."""
    from muster.clusterfile import from_raw
    from muster.errors import Refused
    from muster.sources import from_host_file, from_tf_config, to_toml
    from muster.written import Source

    if path.exists() and not force:
        raise Refused(f"{path} exists already", at=str(path), try_="--force, or another name")
    text = TEMPLATE.format(name=Path.cwd().name.replace('"', "").replace("\\", "") or "lab")
    if source is not None:
        try:
            given = source.read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            raise Refused("there is nothing to read", at=str(source), because=str(error)) from None
        is_json = source.suffix == ".json" or given.lstrip("\ufeff \t\r\n").startswith(("{", "'"))
        found = (from_tf_config if is_json else from_host_file)(given, str(source))
        from_raw(found.raw, Source(str(source)))
        text = f"# made from {source.name}\n" + to_toml(found.raw)
        for note in found.notes:
            print(f"note: {note}")
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise Refused("the file cannot be written", at=str(path), because=str(error), try_="another name") from None
    print(f"{path} is written; `muster plan` shows what it means, `muster run script.py` runs it")
    return 0
