"""The arrows point one way. The tables here are the diagram."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import muster
from muster.launch import bundle

LAYERS = [
    {"errors", "events"},
    {"addresses", "written", "cluster", "bound", "rules", "clusterfile", "sources"}
    | {"placement", "plan", "state", "policy", "waits", "summary", "idle"},
    {"journal", "check", "launch", "ps"},
    {"supervise", "script", "planning", "signals", "run", "train", "watch"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: n for n, layer in enumerate(LAYERS) for name in layer}
NEVER = {"train": {"check", "launch", "supervise"}, "ps": {"check", "launch", "supervise"}}
TRAVELS = {"errors", "events", "ps", "train"}  # sent as a zip to machines that have nothing of ours
THERE = set(sys.stdlib_module_names) | {"numpy", "tensorflow", "keras", "tf_keras"}

ROOT = Path(muster.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[str, ...]]:
    """Every import anywhere in a module, as the parts of an absolute name: ("muster", "plan")."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, ...]]:
    package = ("muster", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            name = (*base, *(node.module.split(".") if node.module else ()))
            yield from [(*name, alias.name) for alias in node.names] if name == ("muster",) else [name]


def ours(path: Path) -> set[str]:
    """The modules and packages of ours that ``path`` imports, itself apart."""
    return {name[1] for name in imports(path) if name[0] == "muster" and len(name) > 1} - {home(path), "__version__"}


def test_every_module_has_a_row():
    assert {home(path) for path in MODULES} - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_from_its_own_row_or_above(path):
    if home(path) == "__init__":
        assert not ours(path), "it travels, and everybody pays for what it imports"
        return
    below = {name for name in ours(path) if LEVEL[name] > LEVEL[home(path)]}
    assert not below, f"{home(path)} must not import {below}"
    assert not ours(path) & NEVER.get(home(path), set())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_but_train_imports_train(path):
    assert home(path) == "train" or "train" not in ours(path)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if home(p) in TRAVELS or p.name == "agent.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_travels_needs_nothing_that_is_not_there(path):
    strangers = {name[0] for name in imports(path)} - THERE - {"muster"}
    assert not strangers
    assert ours(path) <= (set() if path.name == "agent.py" else TRAVELS)


def test_only_train_imports_tensorflow():
    for path in MODULES:
        if home(path) != "train":
            assert not {name[0] for name in imports(path)} & {"tensorflow", "keras", "tf_keras"}, path


def test_the_zip_holds_what_travels_and_is_the_same_each_time():
    import io
    import zipfile

    made = bundle.bundle()
    assert made == bundle.bundle()
    names = zipfile.ZipFile(io.BytesIO(made)).namelist()
    assert {"muster/__init__.py", "muster/errors.py", "muster/events.py", "muster/train/start.py"} <= set(names)
    assert {Path(name).parts[1].removesuffix(".py") for name in names} <= TRAVELS | {"__init__"}
