"""GP-07, as a user meets it: two workers with a GPU each on a machine with a stand-in driver, and one of them idle."""

import shutil

import pytest
from fake_nvml import Driver
from standins import SERVE

from muster.events import GpuUse, Warned

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler for the fake driver")

# worker/1 "computes": the driver's stand-in reads who does from a file
CODE = (
    SERVE
    + """
if index == "1":
    with open(os.environ["USERS"] + ".new", "w") as file:
        file.write(f"1 {os.getpid()} {3 << 30}")
    os.rename(os.environ["USERS"] + ".new", os.environ["USERS"])
muster.ready()
step = 0
while not os.path.exists(os.environ["USERS"] + ".enough"):
    step += 1
    muster.report(step=step)
    time.sleep(0.05)
"""
)


def test_a_worker_that_leaves_its_gpu_idle_is_warned_of_once_on_every_screen(muster, tmp_path):
    driver = Driver(tmp_path)
    muster.env |= {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": "1", "USERS": f"{tmp_path}/users"}
    muster.env.pop("CUDA_VISIBLE_DEVICES", None)
    launch = muster.run(CODE, "--gpu-idle", "1", "--done", "all-workers")
    said = launch.saw(Warned, task="worker/0").text
    assert "worker/0 on here does not use GPU 0" in said and "neither TensorFlow nor libcuda" in said
    assert launch.saw(GpuUse, task="worker/1").used == {"1": 3 << 30}
    code, told = muster.ask("status")
    assert code == 0 and f"warning: {said.split(':')[0]}" in told and "0 idle" in told and "1 3.0 GiB" in told
    for _ in range(2):
        driver.await_asked()
    (tmp_path / "users.enough").touch()
    assert launch.wait() == 0
    assert [event.task for event in launch.events(Warned)] == ["worker/0"]
    assert launch.text().count("does not use GPU 0") == 2, "once while it runs, and once below the end table"


def test_zero_seconds_means_that_nobody_looks(muster, tmp_path):
    driver = Driver(tmp_path)
    muster.env |= {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": "1"}
    muster.env.pop("CUDA_VISIBLE_DEVICES", None)
    launch = muster.run(SERVE + "muster.ready(); muster.report(step=1); time.sleep(0.5)", "--gpu-idle", "0")
    assert launch.wait() == 0
    assert not launch.events(GpuUse) and (driver.folder / "asked").exists(), "the plan has asked how many there are"
