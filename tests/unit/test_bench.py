"""The arithmetic of the benchmark: what counts, and what a ratio is of."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import events
from bench.measure import figures, meter
from bench.measure.figures import Curve, Reference
from bench.measure.workloads import WORKLOADS
from bench.table import verdict


def falling(steps: int, shift: float = 0.0, worth: float = 1.0, noise: float = 0.02, seed: int = 0) -> Curve:
    """Losses that fall like those of a softmax; ``shift`` steps late, each step worth ``worth`` of one."""
    at = np.arange(1, steps + 1, dtype=float)
    useful = np.maximum(at * worth - shift, 0)
    random = np.random.default_rng(seed)
    return Curve(at / 100, at, 0.4 + 1.9 / (1 + useful / 150) + noise * random.standard_normal(steps))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(falling(2000))


@pytest.mark.parametrize("shift, worth", [(0, 1.0), (6, 1.0), (4, 0.95), (0, 1.05)])
def test_a_run_that_is_a_few_steps_late_is_in_the_band(reference: Reference, shift: float, worth: float) -> None:
    found = figures.band(falling(1500, shift, worth, seed=1), reference)
    assert found.inside and found.compared > 5


@pytest.mark.parametrize("shift, worth", [(150, 1.0), (0, 0.6), (0, 1.7)])
def test_a_run_whose_steps_are_worth_less_or_more_is_not(reference: Reference, shift: float, worth: float) -> None:
    found = figures.band(falling(1500, shift, worth, seed=1), reference)
    assert not found.inside
    assert abs(found.loss - found.expected) > 0.02


def test_a_run_that_has_gone_to_pieces_is_not_in_the_band(reference: Reference) -> None:
    run = falling(1500, seed=1)
    run.loss[400:] = np.nan
    assert not figures.band(run, reference).inside


def test_a_run_too_short_to_compare_is_not_in_the_band(reference: Reference) -> None:
    found = figures.band(falling(5, seed=1), reference)
    assert not found.inside and found.compared == 0


def test_steps_behind_the_end_of_the_reference_are_not_compared() -> None:
    run = falling(5000, seed=1)
    run.loss[2500:] = 9.0
    assert figures.band(run, Reference(falling(2000))).inside


def test_bins_cover_all_up_to_the_end_without_gaps() -> None:
    found = figures.bins(300.0)
    assert found[0][0] == 0 and found[-1][1] == 300.0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_workers_that_step_on_their_own_add_up_and_rounds_count_once() -> None:
    assert figures.rate([100, 200], [1.0, 2.0]) == 200.0
    assert figures.rate([100, 100, 100], [1.0, 2.0, 1.5], sync=True) == 50.0
    assert figures.rate([0, 50], [0.0, 1.0]) == 50.0


def test_ratios_stay_within_a_round() -> None:
    assert figures.ratios([10.0, 30.0, None], [2.0, 3.0, 4.0]) == [5.0, 10.0]
    assert figures.ratios([10.0], [None]) == []
    assert figures.middle([None, 3.0, 1.0, 2.0]) == 2.0
    assert figures.middle([None]) is None


def test_a_rate_from_sightings_is_their_slope() -> None:
    assert figures.slope([5.0, 6.0, 7.0], [100, 300, 500]) == pytest.approx(200.0)
    assert figures.slope([5.0], [100]) == 0.0


def test_logs_of_workers_become_one_curve_in_order_of_time() -> None:
    one, other = np.array([[0.1, 1, 2.0], [0.3, 3, 1.0]]), np.array([[0.2, 2, 1.5]])
    found = figures.curve([one, other, np.zeros((0, 3))])
    assert found.step.tolist() == [1, 2, 3] and found.loss.tolist() == [2.0, 1.5, 1.0]
    assert len(figures.curve([])) == 0


def test_time_to_a_loss_is_when_the_mean_gets_there() -> None:
    run = Curve(np.arange(10.0), np.arange(10.0), np.array([9, 9, 9, 9, 1, 9, 1, 1, 1, 1], float))
    assert figures.time_to(run, 1.0, 3) == 7.0, "one lucky batch does not count"
    assert figures.time_to(run, 0.5, 3) is None
    assert figures.time_to(run, 1.0, 20) is None
    assert figures.steps_to(run, 1.0, 3) == 7.0


def test_the_target_is_one_that_the_slowest_reaches() -> None:
    slow, fast = falling(300, seed=1), falling(3000, seed=2)
    aim = figures.target([slow, fast], 40)
    assert aim is not None
    assert figures.time_to(slow, aim, 40) is not None
    assert figures.time_to(fast, aim, 40) is not None
    assert figures.target([], 40) is None


def test_thinning_keeps_means() -> None:
    found = figures.thinned(falling(1000), 10)
    assert len(found) == 10 and found[0][1] == pytest.approx(50.5)
    assert figures.thinned(figures.curve([])) == []


def test_bytes_are_those_that_sockets_of_these_processes_had_acknowledged() -> None:
    lines = (
        'ESTAB 0 0 127.0.0.1:1 127.0.0.1:2 users:(("python",pid=7,fd=3)) cubic bytes_sent:90 bytes_acked:80 x:1\n'
        'ESTAB 0 0 127.0.0.1:2 127.0.0.1:1 users:(("python",pid=8,fd=3)) cubic bytes_acked:5\n'
        'LISTEN 0 0 127.0.0.1:2 0.0.0.0:* users:(("python",pid=7,fd=4)) cubic\n'
    )
    assert meter.count(lines, [7]) == 80
    assert meter.count(lines, [7, 8]) == 85
    assert meter.count(lines, []) == 0


def test_models_are_as_large_as_their_names_say() -> None:
    assert WORKLOADS["W1"].floats == 7850
    assert len(WORKLOADS["W2"].shapes) == 42
    assert round(WORKLOADS["W3"].floats / 1e6, 1) == 1.0
    assert round(WORKLOADS["W4"].floats / 1e6, 1) == 10.1


def test_a_verdict_needs_the_floor_and_most_windows_in_the_band() -> None:
    assert verdict(6.1, 6.0, inside=4, windows=4) == "reached"
    assert verdict(5.9, 6.0, inside=4, windows=4) == "missed"
    assert verdict(9.0, 6.0, inside=1, windows=4) == "out of the band"
    assert verdict(None, 6.0, inside=0, windows=0) == "not measured"


def test_the_run_of_fake_workers_goes_well(tmp_path: Path) -> None:
    assert events.once(tmp_path, workers=60)["events"] > 60 * 2 * events.SECONDS
