from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import numpy as np
import pytest

from muster.ps.peer import Shared
from muster.ps.slabs import Cut
from muster.ps.wire import WireError

CUT = Cut(1600, 3200, ())


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("gradient", "values")]
    yield made
    for fd in made:
        os.close(fd)


def test_a_slab_is_mapped_where_it_lies_in_the_vector(fds: list[int]) -> None:
    for fd in fds:
        os.write(fd, np.arange(4000, dtype=np.float32).tobytes())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    shared = Shared(*fds, CUT)
    assert shared.gradient[0] == 1600 and len(shared.gradient) == 1600
    shared.values[-1] = 7
    assert np.frombuffer(os.pread(fds[1], 4, 3199 * 4), np.float32)[0] == 7


def test_memory_that_could_shrink_under_us_is_refused(fds: list[int]) -> None:
    for fd in fds:
        os.ftruncate(fd, 16000)
    with pytest.raises(WireError, match="can shrink"):
        Shared(*fds, CUT)


def test_memory_that_is_too_small_is_refused(fds: list[int]) -> None:
    for fd in fds:
        os.ftruncate(fd, 3199 * 4)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(WireError, match="too small"):
        Shared(*fds, CUT)
