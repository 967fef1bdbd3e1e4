from __future__ import annotations

import pytest

from muster.errors import Refused
from muster.ps.board import NOTES, Board, Lease

A, B = "worker/0", "worker/1"


def drain(board: Board, task: str, epoch: str = "e", chunks: int = 5, seed: int | None = None) -> list[int]:
    done: list[int] = []
    lease = board.lend(task, epoch, chunks, seed, None)
    while lease.chunk is not None:
        done.append(lease.chunk)
        lease = board.lend(task, epoch, chunks, seed, lease.chunk)
    return done


def test_each_chunk_is_lent_once() -> None:
    board = Board()
    assert drain(board, A) == [0, 1, 2, 3, 4]
    assert board.lend(B, "e", 5, None, None) == Lease(None, True)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = [drain(Board(), A, epoch, 50, seed) for epoch, seed in (("0", 1), ("0", 1), ("1", 1), ("0", 2))]
    assert orders[0] == orders[1] and orders[0] != orders[2] and orders[0] != orders[3]
    assert sorted(orders[0]) == list(range(50))


def test_a_dead_workers_chunk_goes_to_another() -> None:
    board = Board()
    assert board.lend(A, "e", 2, None, None).chunk == 0
    assert board.lend(B, "e", 2, None, None).chunk == 1
    assert board.lend(B, "e", 2, None, 1) == Lease(None, False)  # A still works on the last one
    board.gone(A)
    assert board.lend(B, "e", 2, None, None).chunk == 0
    assert board.lend(A, "e", 2, None, 0) == Lease(None, False)  # what A says of it no longer counts
    assert board.lend(B, "e", 2, None, 0) == Lease(None, True)


def test_a_question_repeated_gets_the_same_chunk() -> None:
    board = Board()
    assert board.lend(A, "e", 5, None, None) == board.lend(A, "e", 5, None, None)


def test_an_absurd_epoch_is_refused() -> None:
    with pytest.raises(Refused):
        Board().lend(A, "e", 1 << 40, None, None)


def test_notes_are_by_task_and_bounded() -> None:
    board = Board()
    board.post("loss", A, 1.0)
    board.post("loss", B, 2.0)
    board.post("loss", A, 3.0)
    assert board.read("loss") == {A: 3.0, B: 2.0}
    for number in range(NOTES + 10):
        board.post(str(number), A, number)
    assert len(board.notes) == NOTES and board.read("loss") == {}
