"""GP-07: what the agent sees of the GPUs that tasks were given. The driver is a stand-in, processes are real."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fake_nvml import Driver
from test_agent import Here
from test_launchers import SLEEP

from muster.events import Exited, GpuUse, Spawned
from muster.launch import agent, gpu_use

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler for the fake driver")
GIB = 1 << 30
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-SIc', 'import time; time.sleep(600)'])"


class WithGpus(Here):
    def work(self, code: str, gpus: tuple[int, ...], name: str = "worker/0", attempt: int = 1, **env: str) -> None:
        """Starts a task that was given ``gpus``."""
        env = {"MUSTER_TASK": name, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **env}
        argv = (sys.executable, "-SIc", code)
        self.launcher.start(msgspec.structs.replace(self.tasks[name], argv=argv, port=0, env=env, gpus=gpus), attempt)

    def pid(self, name: str = "worker/0") -> int:
        self.until(lambda: self.of(Spawned, name))
        return int(self.of(Spawned, name)[-1].pid)

    def uses(self, count: int, name: str = "worker/0") -> list[GpuUse]:
        """What was told of a task, as soon as it is so much."""
        self.until(lambda: len(self.of(GpuUse, name)) >= count)
        return self.of(GpuUse, name)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return Driver(tmp_path)


@pytest.fixture
def make(driver: Driver) -> Iterator[Callable[..., WithGpus]]:
    with contextlib.ExitStack() as stack:

        def made(gpu_idle: float = 0.1) -> WithGpus:
            here = WithGpus(gpu_idle=gpu_idle)
            stack.callback(here.launcher.close)
            return here

        yield made


def test_a_gpu_that_is_not_used_is_told_once_and_again_when_it_is(make, driver):
    here = make()
    here.work(SLEEP, (0,))
    (told,) = here.uses(1)
    assert told.used == {"0": 0} and (told.hidden, told.loaded, told.elsewhere) == (None, [], [])
    driver.users((0, here.pid(), 3 * GIB))
    assert [use.used for use in here.uses(2)] == [{"0": 0}, {"0": 3 * GIB}]


def test_many_looks_find_the_same_and_say_it_once(make, driver):
    here = make()
    here.work(SLEEP, (0,))
    here.uses(1)
    for _ in range(3):
        driver.await_asked()
    here.work("pass", (), name="worker/1")
    here.exit_of("worker/1")
    assert len(here.of(GpuUse)) == 1


def test_a_task_that_computes_is_known_by_its_children_and_not_asked_about_again(make, driver):
    here = make(gpu_idle=1.0)
    here.work(CHILD, (0, 1))
    parent = here.pid()
    children = Path(f"/proc/{parent}/task/{parent}/children")
    here.until(lambda: children.read_text().split())
    driver.users((0, int(children.read_text().split()[0]), GIB), (1, parent, 2 * GIB))
    (told,) = here.uses(1)
    assert told.used == {"0": GIB, "1": 2 * GIB} and told.loaded == []


def test_a_task_without_a_gpu_is_nobodys_business(make, driver):
    here = make()
    here.work(SLEEP, (), name="worker/1")
    here.work(SLEEP, (0,))
    here.uses(1)
    assert {use.task for use in here.of(GpuUse)} == {"worker/0"}


def test_why_a_gpu_is_idle_can_be_guessed(make, driver):
    here = make()
    driver.users((1, os.getpid(), GIB))
    said = "W0000 cudart.cc:1] Could not find cuda drivers on your machine"
    here.work(f"print('x' * 300, {said!r}, sep=chr(10), flush=True); {SLEEP}", (0,), CUDA_VISIBLE_DEVICES="-1")
    (told,) = here.uses(1)
    assert told.hidden == "-1" and told.no_cuda == said


def test_one_that_uses_another_gpu_than_its_own_is_told_apart(make, driver):
    here = make(gpu_idle=1.0)
    here.work(SLEEP, (0,), CUDA_VISIBLE_DEVICES="1")
    driver.users((1, here.pid(), GIB))
    (told,) = here.uses(1)
    assert (told.used, told.elsewhere, told.hidden) == ({"0": 0}, [1], "1")


@pytest.mark.skipif(os.readlink("/proc/self/ns/pid") != "pid:[4026531836]", reason="the pids here are not the driver's")
def test_a_stranger_on_the_gpu_is_named(make, driver):
    stranger = subprocess.Popen([sys.executable, "-SIc", SLEEP])
    try:
        driver.users((0, stranger.pid, GIB))
        here = make()
        here.work(SLEEP, (0,))
        (told,) = here.uses(1)
    finally:
        stranger.kill()
        stranger.wait()
    assert told.used == {"0": 0} and told.others["0"][0].startswith(f"pid {stranger.pid} of ")


@pytest.mark.parametrize("broken", ["9", "12", "18"])
def test_without_a_driver_nothing_is_said_and_nobody_asks_again(make, driver, broken):
    (driver.folder / "broken").write_text(broken)
    here = make()
    here.work(SLEEP, (0,))
    driver.await_asked()
    here.work("import time; time.sleep(0.5)", (), name="worker/1")
    here.exit_of("worker/1")
    (driver.folder / "broken").unlink()
    (driver.folder / "asked").unlink()
    here.work("import time; time.sleep(0.5)", (), name="worker/1", attempt=2)
    here.until(lambda: len(here.of(Exited, "worker/1")) == 2)
    assert not here.of(GpuUse) and not (driver.folder / "asked").exists()


def test_a_driver_that_hangs_holds_up_nothing(make, driver):
    (driver.folder / "hangs").touch()
    here = make()
    here.work(SLEEP, (0,))
    driver.await_asked()
    here.work("print('still here')", (), name="worker/1")
    assert here.exit_of("worker/1").code == 0
    began = time.monotonic()
    here.launcher.close()
    assert time.monotonic() - began < 5 and not here.of(GpuUse)


def test_a_look_that_takes_too_long_is_ended_and_the_next_one_answers(driver):
    (driver.folder / "hangs").touch()
    look = agent.Look(gpu_use.modules(), {}, {})
    driver.await_asked()
    look.give_up()
    os.set_blocking(look.out, True)
    while look.read():
        pass
    assert look.proc.wait(10) == -9 and look.heard == b""
    look.close()
