"""Encrypted connections, with the certificates of a run's own authority."""

from __future__ import annotations

import socket
from contextlib import suppress

import numpy as np
import pytest
from ps_fleet import Fleet

from muster.errors import RunFailed
from muster.launch.authority import Authority
from muster.ps.slabs import Parameter

ROWS = [Parameter("w", (700, 100)), Parameter("b", (10,))]
START = [np.ones(p.shape, np.float32) for p in ROWS]


def fleet() -> Fleet:
    made, authority = Fleet(ps=2, workers=3, tcp=True), Authority("ours")
    made.papers = {task: authority.papers(task) for task in ("ps/0", "ps/1", "worker/0", "worker/1")}
    return made


def test_training_over_tls() -> None:
    with fleet() as made:
        chief, other = made.client(0), made.client(1)
        chief.declare(ROWS, {"class_name": "SGD"}, START)
        other.declare(ROWS, {"class_name": "SGD"})
        for _ in range(20):
            chief.step([np.ones(p.shape, np.float32) for p in ROWS], rate=0.5)
            other.step([None, np.ones(10, np.float32)], rate=0.5)
        chief.pull()
        assert np.allclose(chief.views[0], -9) and np.allclose(chief.views[1], -19)


def test_a_certificate_of_another_task_or_run_or_none_is_refused() -> None:
    with fleet() as made:
        for papers in (made.papers["worker/1"], Authority("theirs").papers("worker/2"), {}):
            made.papers["worker/2"] = papers
            with pytest.raises(RunFailed, match="worker/2"):
                made.client(2, patience=0.3)
        with socket.create_connection(("127.0.0.1", made.ports[0])) as sock, suppress(ConnectionResetError):
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            sock.settimeout(5)
            assert b"MST1" not in sock.recv(100)
        made.client(0).declare(ROWS, {"class_name": "SGD"}, START)
