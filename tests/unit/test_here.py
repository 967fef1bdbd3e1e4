"""What planning sees of this machine."""

import pytest

from muster.launch.here import shown

NAMES = ["GPU-1a2b", "GPU-1a3c", "GPU-2b00"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,0", (2, 0)),
        (" 1 , 1,7", (1,)),
        ("GPU-2b00,GPU-1a2", (2, 0)),  # Slurm, Kubernetes and containers name them so
        ("GPU-9", ()),
        ("MIG-1a2b", ()),
    ],
)
def test_the_gpus_that_cuda_visible_devices_shows(visible, gpus):
    assert shown(visible, NAMES) == gpus
