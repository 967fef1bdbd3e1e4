"""argv in, one library call, text out. One small file a verb; no decision lives here."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from muster.errors import MusterError, Refused

VERBS = {
    "init": "write a commented cluster.toml",
    "check": "is every machine fit, and can every task reach every task that it needs?",
    "plan": "show who runs where, and why; start nothing",
    "run": "place, start, supervise and show a training run",
    "status": "how a run stands",
    "logs": "what the tasks of a run printed",
    "attach": "show a run that goes on without a terminal",
    "stop": "end a run cleanly",
    "fetch": "bring logs and files of a run back from its hosts",
}


class Verbs(click.Group):
    """Imports a verb's module only when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        found: Any = importlib.import_module(f"muster.cli.{name}").command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from muster.errors import nearest

            near = nearest(args[0], list(VERBS))
            hint = (
                f"muster {near}"
                if near
                else f"muster run {args[0]}"
                if args[0].endswith(".py")
                else "one of: " + ", ".join(VERBS)
            )
            raise Refused(f"there is no verb {args[0]!r}", try_=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tf-muster", prog_name="muster")
def group() -> None:
    """Make a TensorFlow training cluster of parameter servers and workers out of the machines you have.

    \b
    muster run examples/mnist.py           2 ps and 3 workers on this machine
    muster run -c cluster.toml train.py    the same script on many machines
    muster run --tf1 old_script.py         a TensorFlow 1 script, unchanged
    """


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Exit codes: 0 done, 1 failed, 2 bad request, 3 no progress, 130 Ctrl-C, 143 SIGTERM."""
    try:
        _somewhere()
        code = group.main(args=list(argv) if argv is not None else None, prog_name="muster", standalone_mode=False)
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `muster logs | head`: the reader has seen enough
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _somewhere() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Refused("the folder that you are in is gone", try_="cd to one that is there") from None
