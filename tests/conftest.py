"""What tests of several folders share."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BLOCK = 20  # ports of one test
_blocks = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def hang_up() -> Iterator[None]:
    """SIGHUP does what it does from a terminal, under nohup too: every process that a test starts inherits that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def ports() -> range:
    """Ports that no other test of this session, and hardly another session, will choose."""
    first = 21000 + (os.getpid() * 7 + next(_blocks)) % 500 * BLOCK  # below the range of outgoing connections
    return range(first, first + BLOCK)


@pytest.fixture
def muster(tmp_path: Path, ports: range) -> Iterator[Any]:
    """``muster`` as a command, in an empty folder: see ``real/launching.py``."""
    from launching import muster_in

    with muster_in(tmp_path, ports) as made:
        yield made
