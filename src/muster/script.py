"""The script that is to be run, looked at before anything starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from muster.errors import Refused
from muster.plan import Script


def find_script(words: Sequence[str], here: bool = True) -> Script:
    """The script to run. Raises Refused where it is missing, no file, or not valid Python.

    ``here=False``: it lies on the hosts, which are asked for it before anything starts.
    """
    for word in words:
        if not is_utf8(word):
            raise Refused(
                f"{os.fsencode(word)!r} is not UTF-8",
                at="command line",
                because="plan and journal are, so it would not reach the tasks as it is",
                try_="another name, or a file that holds the bytes",
            )
    path = Path(words[0])
    if not here:
        return Script(words[0], tuple(words[1:]))
    if not os.path.exists(path):  # false, where Path.exists would raise, for a name that is too long
        folder = path.parent if path.parent.is_dir() else Path(".")
        near = [p.name for p in folder.glob("*.py")][:8]
        raise Refused(
            f"there is no script {str(path)!r}",
            at=str(Path.cwd()),
            try_=f"{folder}/ has {', '.join(near)}" if near else "name a Python file",
        )
    if not path.is_file():
        raise Refused(f"{str(path)!r} is no file", at=str(Path.cwd()))
    if path.suffix == ".py":
        check_syntax(path)
    elif not os.access(path, os.X_OK):
        raise Refused(
            f"{str(path)!r} is neither a .py file nor executable", at=str(Path.cwd()), try_=f"chmod +x {path}"
        )
    return Script(str(path.absolute()), tuple(words[1:]))


def is_utf8(word: str) -> bool:
    """Whether what came from the command line or the environment can stand in plan and journal."""
    return word.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in word)


def check_syntax(path: Path) -> None:
    """Raises Refused, with the line, before anything starts: five tasks would print the same error five times."""
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise Refused(
            f"{path.name} is not valid Python",
            at=f"{path}, line {line}" if line else str(path),
            because=getattr(error, "msg", None) or str(error),
        ) from None
    except OSError as error:
        raise Refused(f"{path.name} cannot be read", at=str(path), because=str(error)) from None
