"""Who uses a GPU, from what the driver says: the rules by themselves."""

import pytest

from muster.launch.gpu_use import MODULES, modules, of_task, shows, strangers, use

MIB = 1 << 20
MINE, OTHER = {"pid": 10, "used": 500 * MIB}, {"pid": 99, "used": 700 * MIB, "user": "bob", "command": "python x.py"}


@pytest.mark.parametrize(
    ("device", "trusted", "found"),
    [
        ({"users": [MINE, OTHER]}, True, 500 * MIB),
        ({"users": [MINE]}, False, 500 * MIB),  # our pid is there, wherever we are
        ({"users": [{"pid": 10, "used": (1 << 64) - 1}]}, True, 1),  # the driver has no number (WSL, MIG)
        ({"users": [{"pid": 10}]}, True, 1),  # nor has nvidia-smi
        ({"users": [{"pid": 10, "used": 0}]}, True, 0),
        ({"users": [OTHER], "held": 700 * MIB}, True, 0),
        ({"users": [OTHER], "held": 700 * MIB}, False, None),  # in a container 99 may be us
        ({"users": [], "held": 3 * MIB}, False, 0),  # but nobody at all is nobody anywhere
        ({"held": 3 * MIB}, True, 0),
        ({"held": 700 * MIB}, True, None),  # the driver does not say who
        ({"users": []}, False, None),
        ({"users": []}, True, 0),
        ({"users": [{"pid": 5, "used": 1, "command": "nvidia-cuda-mps-server"}]}, True, None),  # it computes for others
    ],
)
def test_what_our_processes_hold(device, trusted, found):
    assert use(device, {10, 11}, trusted) == found


@pytest.mark.parametrize(
    ("visible", "shown"),
    [("0", False), ("1", True), ("0, 1", True), ("", False), ("-1", False), ("GPU-ab", True), ("GPU-cd", False)],
)
def test_what_a_variable_hides(visible, shown):
    assert shows(visible, {"index": 1, "uuid": "GPU-abcd"}) is shown


def test_strangers_are_those_that_are_of_no_task_of_ours():
    assert strangers({"users": [MINE, OTHER]}, {10}) == ["pid 99 of bob: python x.py"]


def test_a_task_is_its_session_its_descendants_and_who_carries_its_marks():
    family = {10: (1, 10), 11: (10, 10), 12: (11, 12), 13: (1, 13), 14: (1, 14), 15: (12, 15)}
    marks = {10: (b"r", b"w/0"), 11: (), 12: (), 13: (b"r", b"w/0"), 14: (b"r", b"w/1"), 15: ()}
    assert of_task(10, family, marks) == {10, 11, 12, 13, 15}


def test_the_modules_of_a_look_stand_by_themselves():
    made = dict(modules())
    assert list(made) == list(MODULES) and made["muster.check.probe"] and made["muster.launch.gpu_use"]
    assert not made["muster"]
