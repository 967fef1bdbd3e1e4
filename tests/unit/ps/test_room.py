"""A worker's arrays: whatever a gradient is given as, the same bytes go out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.errors import Refused
from muster.ps.room import Room
from muster.ps.slabs import Parameter, lay_out

ROWS = [Parameter("a", (50, 7)), Parameter("b", (3,)), Parameter("c", ())]
GRADS = [np.arange(350, dtype=np.float32).reshape(50, 7), np.arange(3, dtype=np.float32), np.float32(5).reshape(())]
ROOM = Room(lay_out(ROWS, 2), shared=False)


def sent(gradient: Any) -> list[bytes]:
    return [b"".join(bytes(memoryview(part).cast("B")) for part in parts) for parts in ROOM.buffers(gradient)]


def flat() -> Any:
    whole = np.zeros(ROOM.layout.size, np.float32)
    for view, value in zip(ROOM.layout.views(whole), GRADS, strict=True):
        view[...] = value
    return whole


@pytest.mark.parametrize(
    "given",
    [
        GRADS,
        [memoryview(g) for g in GRADS],
        [np.asfortranarray(g) for g in GRADS],
        [g.astype(np.float64) for g in GRADS],
        [g.astype(">f4") for g in GRADS],
        [g.tolist() for g in GRADS],
        [np.repeat(g.reshape(-1), 2)[::2].reshape(g.shape) for g in GRADS],
    ],
    ids=["arrays", "buffers", "columns first", "float64", "the other byte order", "lists", "every second"],
)
def test_a_gradient_goes_out_as_the_same_floats_whatever_it_is_given_as(given: Any) -> None:
    assert sent(given) == sent(flat())


def test_a_gradient_of_another_size_is_refused_and_none_is_zeros() -> None:
    with pytest.raises(Refused, match="2 floats for b"):
        ROOM.buffers([GRADS[0], GRADS[1][:2], GRADS[2]])
    assert sent([None, None, None]) == sent(np.zeros(ROOM.layout.size, np.float32))
