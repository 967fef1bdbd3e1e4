"""Training over real parameter servers: what comes out is what the mode promises."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ps_fleet import Fleet

from muster.errors import MusterError, RunFailed
from muster.ps import client as client_module
from muster.ps import wire
from muster.ps.client import Client
from muster.ps.optimizers import parse
from muster.ps.slab import Slab
from muster.ps.slabs import Floats, Parameter, lay_out

SOFTMAX = [Parameter("w", (784, 10)), Parameter("b", (10,))]
ROUNDS, BATCH, WORKERS = 200, 32, 3


def softmax(values: list[Floats], x: Floats, y: Any) -> list[Floats]:
    """By einsum, not BLAS, whose threads would fight those of the workers here."""
    scores = np.einsum("bi,ij->bj", x, values[0]) + values[1]
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(y)), y] -= 1
    chances /= np.float32(len(y))
    return [np.einsum("bi,bj->ij", x, chances), chances.sum(axis=0)]


def batch(step: int, worker: int) -> tuple[Floats, Any]:
    random = np.random.default_rng([7, step, worker])
    return random.standard_normal((BATCH, 784)).astype(np.float32), random.integers(0, 10, BATCH)


def start_values() -> list[Floats]:
    random = np.random.default_rng(3)
    return [(0.05 * random.standard_normal(p.shape)).astype(np.float32) for p in SOFTMAX]


def together(tasks: list[Callable[[], None]]) -> None:
    """Run each in a thread, as workers; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"


def alone(config: dict[str, Any], rate: float) -> list[Floats]:
    """One process, the threefold batch, no ps."""
    layout = lay_out(SOFTMAX, 1)
    slab = Slab(layout, 0, parse(config))
    views = layout.views(slab.values)
    for view, value in zip(views, start_values(), strict=True):
        view[...] = value
    gradient = np.zeros(layout.size, np.float32)
    for step in range(ROUNDS):
        parts = [batch(step, worker) for worker in range(WORKERS)]
        grads = softmax(views, np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))
        for view, value in zip(layout.views(gradient), grads, strict=True):
            view[...] = value
        slab.apply([(gradient, 1.0)], rate)
    return views


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        ({"class_name": "SGD", "config": {}}, 0.05),
        ({"class_name": "Adam", "config": {}}, 0.001),
        ({"class_name": "SGD", "config": {"momentum": 0.9, "global_clipnorm": 1.0}}, 0.05),
        ({"class_name": "Adam", "config": {"clipnorm": 0.1}}, 0.001),
    ],
    ids=["sgd", "adam", "sgd-global-clipnorm", "adam-clipnorm"],
)
def test_sync_over_three_workers_is_one_process_with_the_threefold_batch(config: dict[str, Any], rate: float) -> None:
    with Fleet(ps=2, workers=WORKERS, mode="sync") as fleet:
        clients = [fleet.client(i) for i in range(WORKERS)]
        joined = threading.Barrier(WORKERS)

        def work(index: int, client: Client) -> None:
            client.declare(SOFTMAX, config, start_values())
            joined.wait(20)
            for step in range(ROUNDS):
                done = client.step(softmax(client.views, *batch(step, index)), samples=BATCH, rate=rate)
                assert done.step == step + 1 and not done.late

        together([lambda i=i, c=c: work(i, c) for i, c in enumerate(clients)])  # type: ignore[misc]
        for client in clients[1:]:
            assert np.array_equal(client.values, clients[0].values)
        ours, theirs = clients[0].views, alone(config, rate)
        largest = max(float(np.abs(b - a).max()) for a, b in zip(start_values(), theirs, strict=True))
        apart = max(float(np.abs(b - a).max()) for a, b in zip(ours, theirs, strict=True))
        assert apart <= 1e-5 * largest, apart / largest


def test_statistics_are_the_mean_over_the_workers() -> None:
    rows = [*SOFTMAX, Parameter("mean", (10,), trainable=False)]
    with Fleet(ps=2, workers=2, mode="sync") as fleet:
        clients = [fleet.client(i) for i in range(2)]
        joined = threading.Barrier(2)

        def work(index: int, client: Client) -> None:
            client.declare(rows, {"class_name": "Adam"}, [*start_values(), np.zeros(10, np.float32)])
            joined.wait(20)
            new = np.full(10, 1.0 + index, np.float32)
            client.step([None, None, client.views[2] - new], rate=0.1)

        together([lambda i=i, c=c: work(i, c) for i, c in enumerate(clients)])  # type: ignore[misc]
        assert np.allclose(clients[0].views[2], 1.5)


COUNTING = """
import os, sys
import numpy as np
from muster.ps.connect import client
from muster.ps.slabs import Parameter
here = client(os.environ, bytes.fromhex(os.environ["SECRET"]))
here.declare([Parameter("w", (SIZE,))], {"class_name": "SGD"}, [np.zeros(SIZE, np.float32)])
here.gradient[:SIZE] = -1
print("go", flush=True)
while True:
    here.step(rate=1.0)
"""


@pytest.mark.parametrize(("size", "tcp"), [(40_000, False), (40_000, True), (2_000_000, False)])
def test_a_killed_workers_push_is_applied_once_or_not_at_all(size: int, tcp: bool) -> None:
    """Each push adds 1 to every weight with rate 1, so a slab that is not everywhere equal to its count of updates
    has applied half a push, or one twice. By Unix socket, by TCP and by shared memory."""
    chance = np.random.default_rng(1)
    with Fleet(ps=2, workers=2, tcp=tcp) as fleet:
        watch = fleet.client(0)
        watch.declare([Parameter("w", (size,))], {"class_name": "SGD"}, [np.zeros(size, np.float32)])
        for attempt in range(1, 9):
            env = {**fleet.env("worker/1"), "MUSTER_ATTEMPT": str(attempt), "SECRET": fleet.secret.hex()}
            code = COUNTING.replace("SIZE", str(size))
            process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
            assert process.stdout is not None and process.stdout.readline() == b"go\n"
            time.sleep(float(chance.uniform(0.01, 0.06)))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            watch.pull()
            for cut, stats in zip(watch.layout.cuts, watch.stats(), strict=True):
                assert stats["version"] > 0
                assert (watch.values[cut.start : cut.start + cut.pieces[-1].stop] == stats["version"]).all()


def test_a_push_is_repeated_after_a_broken_connection_and_applied_once() -> None:
    with Fleet(ps=2, workers=1, tcp=True) as fleet:
        client = fleet.client(0)
        client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
        for step in range(20):
            for link in client.links:
                assert link.stream is not None
                # either the push does not go out, or it does and its answer is lost
                link.stream.sock.shutdown(socket.SHUT_RDWR if step % 2 else socket.SHUT_RD)
            client.step([np.ones((784, 10), np.float32), None], rate=1.0)
        stats = client.stats()
        assert [row["version"] for row in stats] == [20, 20]
        assert any(row["workers"]["worker/0"]["repeated"] for row in stats)
        assert np.allclose(client.views[0], start_values()[0] - 20, atol=1e-4)


def test_the_same_push_sent_twice_is_applied_once() -> None:
    with Fleet(ps=1, workers=1) as fleet:
        client = fleet.client(0)
        client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
        client.step(rate=1.0)
        client.number -= 1  # as if the answer had been lost
        assert client.step(rate=1.0).step == 1
        assert client.stats()[0]["workers"]["worker/0"]["repeated"] == 1


def test_who_connects_again_by_hand_goes_on_counting_its_pushes() -> None:
    with Fleet(ps=1, workers=1) as fleet:
        for steps in (3, 6):
            client = fleet.client(0)
            client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
            for _ in range(3):
                client.step(rate=0.1)
            assert client.step_now == steps
            client.close()


def test_a_norm_over_several_ps_needs_nothing_of_one_that_holds_nothing() -> None:
    rows = [Parameter("w", (10,)), Parameter("b", (1,))]
    assert [cut.size for cut in lay_out(rows, 3).cuts] == [16, 0, 16]
    with Fleet(ps=3, workers=1, mode="sync") as fleet:
        client = fleet.client(0)
        client.declare(rows, {"name": "sgd", "global_clipnorm": 1.0}, [np.zeros(p.shape, np.float32) for p in rows])
        client.step([np.ones(p.shape, np.float32) for p in rows], rate=1.0)
        assert client.views[1] == pytest.approx(-1 / np.sqrt(11))


def test_a_sync_round_goes_on_when_a_worker_is_killed_in_it() -> None:
    with Fleet(ps=2, workers=2, mode="sync") as fleet:
        first, second = fleet.client(0), fleet.client(1)
        both = threading.Barrier(2)

        def stay() -> None:
            first.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
            both.wait(20)
            for _ in range(50):
                first.step(rate=0.1)

        def die() -> None:
            second.declare(SOFTMAX, {"class_name": "SGD"})
            both.wait(20)
            for _ in range(20):
                second.step(rate=0.1)
            second.close()

        together([stay, die])
        assert first.step_now == 50
        again = fleet.client(1, attempt=2)
        again.declare(SOFTMAX, {"class_name": "SGD"})

        def nine(client: Client) -> None:
            for _ in range(9):
                client.step(rate=0.1)

        together([lambda: nine(first), lambda: nine(again)])
        assert abs(first.step_now - 59) <= 1


def test_a_late_word_of_an_old_incarnation_is_refused() -> None:
    with Fleet(ps=1, workers=2) as fleet:
        fleet.client(1, attempt=2)
        with pytest.raises(RunFailed, match="refused worker/1"):
            fleet.client(1, attempt=1)


def test_bounded_keeps_its_bound_with_one_slow_worker() -> None:
    bound = 3
    with Fleet(ps=2, workers=3, mode="bounded", max_staleness=bound) as fleet:
        clients = [fleet.client(i) for i in range(3)]
        both = threading.Barrier(3)
        seen: list[list[int]] = [[], [], []]

        def work(index: int, client: Client) -> None:
            client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
            both.wait(20)
            for step in range(60):
                seen[index].append(step)
                ahead = step - min(len(steps) - 1 for steps in seen)
                assert index == 2 or ahead <= bound + 1, "it began a step too far ahead"
                client.step(rate=0.01)
                if index == 2:
                    time.sleep(0.002)

        together([lambda i=i, c=c: work(i, c) for i, c in enumerate(clients)])  # type: ignore[misc]
        for stats in clients[0].stats():
            assert 0 < max(row["ahead"] for row in stats["workers"].values()) <= bound


def test_declaring_again_keeps_values_and_slots_of_what_stays_though_it_moves() -> None:
    adam = {"class_name": "Adam", "config": {}}
    with Fleet(ps=2, workers=2) as fleet:
        client, other = fleet.client(0), fleet.client(1)
        client.declare(SOFTMAX, adam, start_values())
        for step in range(5):
            client.step(softmax(client.views, *batch(step, 0)), rate=0.01)
        before, place = client.state(), client.layout
        grown = [Parameter("first", (5000,)), *SOFTMAX[::-1]]
        client.declare(grown, adam, [np.ones(5000, np.float32), *start_values()[::-1]])
        after = client.state()
        assert set(after) == {"", "momentum", "velocity"}
        for name, array in after.items():
            new, old = client.layout.views(array), place.views(before[name])
            assert np.array_equal(new[2], old[0]) and np.array_equal(new[1], old[1])
            assert (new[0] == (1 if name == "" else 0)).all()
        other.declare(grown, adam)
        assert np.array_equal(other.values, client.values)
        with pytest.raises(MusterError, match="does not train the same model") as caught:
            fleet.client(1, attempt=2).declare([Parameter("first", (4999,)), *SOFTMAX[::-1]], adam)
        assert "first is float32[4999] here and float32[5000] at the chief" in str(caught.value)


def test_a_parameter_keeps_its_age_over_two_layouts() -> None:
    """Adam corrects its moments by the steps that they have seen: "two" has seen 1, not the 101 of "one"."""
    adam = {"class_name": "Adam", "config": {}}
    rows = [Parameter(name, (16,)) for name in ("one", "two", "three")]
    alone, ones = Slab(lay_out(rows[1:2], 1), 0, parse(adam)), np.ones(16, np.float32)
    for gradient in (1.0, 0.5):
        alone.apply([(ones * np.float32(gradient), 1.0)], 0.1)
    with Fleet(ps=1, workers=1) as fleet:
        client = fleet.client(0)
        for count, steps, gradient in ((1, 100, 1.0), (2, 1, 1.0), (3, 1, 0.5)):
            client.declare(rows[:count], adam, [np.zeros(16, np.float32)] * count)
            for _ in range(steps):
                client.step([ones * np.float32(gradient)] * count, rate=0.1)
        assert np.allclose(client.views[1], alone.values, rtol=1e-6)


def test_who_came_back_during_the_second_layout_waits_for_the_third() -> None:
    """It has declared less often than the others: what counts is the layout that it knows."""
    rows = [[Parameter(name, (8,))] for name in ("one", "two", "three")]
    with Fleet(ps=2, workers=2) as fleet:
        chief, other = fleet.client(0), fleet.client(1, attempt=2)
        for row in rows[:2]:
            chief.declare(row, {"name": "sgd"}, [np.zeros(8, np.float32)])
        other.declare(rows[1], {"name": "sgd"})
        with pytest.raises(RunFailed, match="waited 0 s for the chief"):
            other.declare(rows[2], {"name": "sgd"}, limit=0.1)
        chief.declare(rows[2], {"name": "sgd"}, [np.zeros(8, np.float32)])
        other.declare(rows[2], {"name": "sgd"})


def test_another_optimizer_keeps_the_values_and_begins_its_slots_anew() -> None:
    with Fleet(ps=2, workers=1) as fleet:
        client = fleet.client(0)
        client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
        client.step([np.ones((784, 10), np.float32), None], rate=1.0)
        before = client.values.copy()
        client.declare(SOFTMAX, {"class_name": "Adagrad"}, start_values())
        state = client.state()
        assert np.array_equal(state[""], before)
        assert (client.layout.views(state["accumulator"])[0] == np.float32(0.1)).all()


def test_decisions_of_the_chief_reach_everybody() -> None:
    with Fleet(ps=2, workers=2) as fleet:
        chief, other = fleet.client(0), fleet.client(1)
        chief.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
        other.declare(SOFTMAX, {"class_name": "SGD"})
        chief.set_learning_rate(0.0)
        assert not other.step(rate=1.0).stop
        assert other.rate_set == 0.0
        before = other.values.copy()
        other.step([np.ones((784, 10), np.float32), None], rate=1.0)
        assert np.array_equal(before, other.values)
        chief.stop("early")
        assert other.step(rate=1.0).stop
        assert chief.lend("e", 2).chunk == 0 and other.lend("e", 2).chunk == 1
        other.close()
        deadline = time.monotonic() + 5
        while (lease := chief.lend("e", 2, finished=0)).chunk is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lease.chunk == 1
        chief.post("x", {"a": [1]})
        assert chief.read("x") == {"worker/0": {"a": [1]}}


def test_large_slabs_are_shared_on_one_host_and_come_out_the_same() -> None:
    rows = [Parameter("a", (1000, 700)), Parameter("b", (300,))]
    random = np.random.default_rng(0)
    values = [random.standard_normal(p.shape).astype(np.float32) for p in rows]
    grads = [random.standard_normal(p.shape).astype(np.float32) for p in rows]
    ends = []
    for tcp in (False, True):
        with Fleet(ps=2, workers=1, tcp=tcp) as fleet:
            client = fleet.client(0)
            client.declare(rows, {"class_name": "Adam"}, values)
            assert bool(client.shared) is not tcp
            assert client.values.ctypes.data % 64 == 0 and client.gradient.ctypes.data % 64 == 0
            client.step(grads, rate=0.01)
            for view, value in zip(client.gradients, grads, strict=True):
                view[...] = value
            client.step(rate=0.01)
            flat = client.gradient.copy()
            client.step(flat, rate=0.01)
            client.values[:] = 0
            client.pull()
            ends.append(client.values.copy())
    assert np.array_equal(ends[0], ends[1])


def test_values_on_their_way_are_of_one_moment_though_the_slab_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "SHARE_FROM", 1 << 62)
    rows = [Parameter("a", (1000, 2000))]  # more than a socket holds
    with Fleet(ps=1, workers=2) as fleet:
        chief, slow = fleet.client(0), fleet.client(1)
        for client in (chief, slow):
            client.declare(rows, {"class_name": "SGD"}, [np.zeros((1000, 2000), np.float32)])
        (link,) = slow.links
        link.ask([wire.Header(wire.PULL, layout=slow.layout_number).pack()], [slow.values.data])
        link.begin()
        assert select.select([link], [], [], 20)[0], "the ps has begun to answer, and we do not read on"
        for _ in range(3):
            chief.step([np.ones((1000, 2000), np.float32)], rate=1.0)
        while not link.turn():
            assert select.select([link], [], [], 20)[0]
        assert np.unique(slow.values).tolist() == [0.0]
        slow.pull()
        assert np.unique(slow.values).tolist() == [-3.0]


def test_tcp_within_a_machine_is_not_sent_by_a_clock() -> None:
    with Fleet(ps=1, workers=1, tcp=True) as fleet:
        stream = fleet.client(0).links[0].stream
        assert stream is not None
        assert stream.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_a_ps_that_is_gone_is_named() -> None:
    with Fleet(ps=2, workers=1) as fleet:
        client = fleet.client(0, patience=0.3)
        client.declare(SOFTMAX, {"class_name": "SGD"}, start_values())
        fleet.processes[1].kill()
        with pytest.raises(RunFailed, match="ps/1 cannot be reached by worker/0"):
            client.step(rate=0.1)
    assert not Path(fleet.places()[1].path).parent.exists(), "what the killed one left, the other one removes"


def test_a_ps_is_up_in_time_and_leaves_nothing() -> None:
    """In processor time, from its start to its end: what else the machine does is not the ps' fault."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(3):
        began = spent()
        with Fleet(ps=1, workers=1) as fleet:
            place = Path(fleet.places()[0].path)
            assert place.is_socket() and place.parent.stat().st_mode & 0o777 == 0o700
        assert not place.parent.exists()
        times.append(spent() - began)
    assert min(times) < 0.4, times  # 0.2 s where nothing else runs


def test_the_example_trains_alone() -> None:
    example = Path(__file__).parents[2] / "examples" / "numpy_softmax.py"
    env = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}
    done = subprocess.run(
        [sys.executable, example, "--steps", "200"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "200 steps of 200" in done.stdout, done.stderr
