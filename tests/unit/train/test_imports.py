import importlib
import inspect
import sys

import pytest

from muster.train.imports import AfterImport, Refuse, first, where, wrap


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazily.py").write_text("value = 1\n")
    yield "lazily"
    sys.modules.pop("lazily", None)


def test_it_acts_when_the_module_has_been_imported_and_once(module):
    seen = []
    first(AfterImport(module, lambda loaded: seen.append(loaded.value)))
    assert seen == [] and module not in sys.modules
    lazily = importlib.import_module(module)
    assert seen == [1]
    importlib.reload(lazily)
    assert seen == [1]


def test_the_module_keeps_its_own_loader(module):
    first(AfterImport(module, lambda loaded: None))
    lazily = importlib.import_module(module)
    assert inspect.getsource(lazily) == "value = 1\n"
    assert type(lazily.__loader__).__name__ == "SourceFileLoader"


def test_a_module_that_is_missing_stays_missing(module):
    first(AfterImport("never_heard_of", lambda loaded: None))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_heard_of")


def test_a_refusal_reaches_the_one_who_imports(module):
    def refuse(loaded):
        raise RuntimeError("no")

    first(AfterImport(module, refuse))
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module(module)


def test_a_module_is_refused_to_a_script_and_missing_to_a_library(module):
    first(Refuse(["gone_by"], RuntimeError))
    with pytest.raises(RuntimeError, match=r"gone_by"):
        exec(compile("import gone_by.part", "/home/me/script.py", "exec"), {})
    with pytest.raises(ModuleNotFoundError):
        exec(compile("import gone_by.part", "/lib/site-packages/lib.py", "exec"), {})


def test_where_is_the_line_that_asks():
    assert where() == f"{__file__}:{inspect.currentframe().f_lineno}"


def test_wrap_holds_under_every_name_of_a_class():
    class Owner:
        def double(self, number):
            return 2 * number

    alias = Owner
    wrap(Owner, "double", lambda plain, self, number: plain(self, number) + 1)
    assert alias().double(3) == 7 and alias.double.__name__ == "double"
