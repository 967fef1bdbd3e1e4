"""Machines for tests: ``lab`` has the five of the seed, ``make_lab`` any. Skipped, saying why, where none can be
had."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .lab import Lab, why_not
from .remote import Site, site_on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("lab")


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    if why_not():
        pytest.skip(why_not())
    with ExitStack() as stack:
        yield lambda *machines: stack.enter_context(Lab(machines) if machines else Lab())


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab()


@pytest.fixture(scope="module")
def one_lab_for_all() -> Iterator[Site]:
    if why_not():
        pytest.skip(why_not())
    with site_on(Lab()) as site:
        yield site


@pytest.fixture
def site(one_lab_for_all: Site) -> Iterator[Site]:
    """``muster run`` in a lab that the tests of a module share; mended after each."""
    yield one_lab_for_all
    one_lab_for_all.mend()
