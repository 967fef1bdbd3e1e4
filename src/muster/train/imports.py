"""Acting on a module when the script imports it, and no sooner.

TensorFlow must not be imported, let alone used, before the user's script does so: collective operations have to be
configured at program start, and a script that sets environment variables first must still be heard.
"""

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

OURS = __file__.rpartition("/")[0]
THEIRS = "/site-packages/", "/dist-packages/"


class AfterImport:
    """A finder that finds nothing itself: when others have loaded ``name``, it calls ``then`` with the module, once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        """Through the instance, so that it stays the loader that ``inspect`` and ``pkgutil`` know."""
        plain = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            plain(module)
            sys.meta_path.remove(self)
            self.then(module)

        loader.exec_module = exec_module


class Refuse:
    """A finder that refuses modules by name with ``error(name)``, when it is the user's own code that asks.

    A library that tries ``import tensorflow.contrib`` and goes on without it is left alone.
    """

    def __init__(self, names: Sequence[str], error: Callable[[str], Exception]) -> None:
        self.names, self.error = tuple(names), error

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if any(name == own or name.startswith(own + ".") for own in self.names) and asked_by_user():
            raise self.error(name)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(plain, *args, **kwargs)``, where ``plain`` is what was there."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(plain, *args, **kwargs)

    setattr(owner, name, wrapped)


def first(finder: Any) -> None:
    sys.meta_path.insert(0, finder)


def asked_by_user() -> bool:
    frame = _caller()
    return frame is not None and not any(part in frame.f_code.co_filename for part in THEIRS)


def where() -> str:
    """``file:line`` of the user's code that is running now, or an empty string."""
    frame = _caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _caller() -> FrameType | None:
    """The innermost frame that is neither ours, nor the import system's, nor TensorFlow's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(("<frozen", OURS)) or "/tensorflow/python/" in file or file.endswith("/functools.py")):
            return frame
        frame = frame.f_back
    return None
