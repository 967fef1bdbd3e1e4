"""Runs that outlive their terminal, and what goes there and back: code and files."""

import json
import os
import re
import signal
import time

import pytest
from standins import FOREVER, SERVE, STEPS, slack, until

from muster.events import HostLost, StopAsked
from muster.journal import RunFolder, born, read
from muster.launch.pipe import LOST

from .lab import SEED
from .remote import PS0, WORKER0, WORKER1, Site


class Detached:
    """A run in the background, started by ``muster run --detach`` that has ended."""

    def __init__(self, site: Site, code: str = SERVE + FOREVER, *args: str) -> None:
        self.site = site
        launch = site.run(code, "--detach", args=args)
        assert launch.process.wait(60) == 0, launch.text()
        self.said = launch.text()
        found = re.search(r"run (\S+) goes on in the background \(launcher: pid (\d+)\)", self.said)
        assert found, self.said
        self.folder, self.pid = RunFolder(site.runs / found[1]), int(found[2])
        until(lambda: '"Step"' in self.journal(), what="it trains")

    def journal(self) -> str:
        return self.folder.journal.read_text()

    def steps(self) -> int:
        return max((json.loads(row)["step"] for row in self.journal().splitlines() if '"Step"' in row), default=0)

    def ended(self, within: float = 30.0) -> None:
        until(lambda: not born(self.pid), within, "the launcher ends")
        self.site.clean(slack(2.0))


def test_a_run_goes_on_without_its_terminal_and_is_found_again(site: Site):
    """attach, status, logs and stop from another terminal; what belongs to the script stays the script's."""
    run = Detached(site, SERVE + "say(sys.argv[1:])\n" + FOREVER, "--detach", "x")
    site.ask("status")  # the terminal that had started it is long gone
    code, said = site.ask("status", "--json")
    assert code == 0 and json.loads(said)["state"] == "running"
    assert "['--detach', 'x']" in site.ask("logs", "worker/1")[1]
    watching = site.lab.popen_in("ctl", _muster("attach", run.folder.id), cwd=site.lab.home, env=site.env)
    assert watching.stdout is not None and b"attached to run" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    out, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0 and f"run {run.folder.id} goes on".encode() in out
    before = run.steps()
    until(lambda: run.steps() > before, what="it goes on")
    assert site.ask("stop") == (0, f"run {run.folder.id} has ended\n")
    run.ended()
    code, said = site.ask("attach", run.folder.id)
    assert code == 130 and "stopped by muster stop" in said


def _muster(*words: str) -> list[str]:
    import sys

    return [sys.executable, "-m", "muster", *words]


def test_attach_shows_the_run_to_its_end_and_has_its_exit_code(site: Site):
    run = Detached(site, SERVE + FOREVER + "say('bye from', me)\n")
    watching = site.lab.popen_in("ctl", _muster("attach"), cwd=site.lab.home, env=site.env)
    assert watching.stdout is not None and b"attached to run" in watching.stdout.readline()
    site.everywhere("enough", "")
    out, _ = watching.communicate(timeout=40)
    assert watching.returncode == 0 and b"bye from worker/0" in out and b"succeeded in" in out
    run.ended()


@pytest.mark.slow
def test_a_detached_launcher_that_is_frozen_for_longer_than_the_lease_goes_on(site: Site):
    """P12: no restart, nothing done twice, state reconciled."""
    run = Detached(site)
    os.kill(run.pid, signal.SIGSTOP)
    before, frozen = run.steps(), time.monotonic()
    time.sleep(13.0)
    assert all(site.left(host) for host in SEED)
    os.kill(run.pid, signal.SIGCONT)
    until(lambda: run.steps() > before + (time.monotonic() - frozen) * 2, what="it has caught up")
    site.everywhere("enough", "")
    run.ended()
    events = list(read(run.folder.journal))
    assert not [e for e in events if isinstance(e, (HostLost, StopAsked))]
    assert sum(row.count('"Spawned"') for row in run.journal().splitlines()) == 5


def test_a_detached_launcher_that_is_killed_leaves_nothing_anywhere(site: Site):
    """P6."""
    run = Detached(site)
    os.kill(run.pid, signal.SIGKILL)
    site.clean(10.0)
    code, said = site.ask("status")
    assert code == 0 and "its launcher died" in said
    code, said = site.ask("attach")
    assert code == 1


def test_closing_the_terminal_does_not_end_a_detached_run(site: Site):
    """SIGHUP to all of the session that it was started from."""
    site.cluster()
    site.everywhere("train.py", SERVE + FOREVER)
    line = " ".join(_muster("run", "-c", "lab.toml", "--no-check", "--detach", "train.py"))
    shell = site.lab.run_in("ctl", ["setsid", "sh", "-c", f"{line}; kill -HUP 0"], cwd=site.lab.home, env=site.env)
    assert "goes on in the background" in shell.stdout, shell
    assert site.ask("stop", "--now")[0] == 0
    site.clean(slack(5.0))


def test_a_run_that_cannot_begin_says_so_before_it_detaches(site: Site):
    site.lab.crash(WORKER1)
    site.broken.add(WORKER1)
    launch = site.run(SERVE + FOREVER, "--detach", check=True)
    assert launch.wait() == 1
    assert "worker1" in launch.text() and "refused" in launch.text()


def test_the_limit_of_silence_is_below_every_lease():
    """Else the far side would end its tasks before the launcher says that the host is lost."""
    from muster.run import DETACHED_LEASE, LEASE

    assert LOST < LEASE < DETACHED_LEASE


# --- code there


def test_sync_copies_the_code_once_and_then_what_has_changed(site: Site):
    """EN, B5: hidden folders, bytecode and virtual environments stay at home; modes and odd names arrive."""
    here = site.lab.private("ctl") / "project"
    for name, text in {
        "train.py": SERVE + "import part\nsay(part.WORD, os.getcwd(), open('data/é \"q\".txt').read())\n" + STEPS,
        "part.py": "WORD = 'one'\n",
        'data/é "q".txt': "data",
        ".git/config": "x",
        "venv/lib/x.py": "x",
        "__pycache__/part.cpython-311.pyc": "x",
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    (here / "tool.sh").write_text("#!/bin/sh\n")
    (here / "tool.sh").chmod(0o755)
    for host in SEED:
        site.write(host, ".bashrc", "echo hello from the login shell\n")
    site.cluster(every={"cwd": str(site.lab.home / "copied")})
    launch = site.start("--sync", "project", "project/train.py")
    assert launch.wait() == 0, launch.text()
    assert launch.log("worker/1") == f"one {site.lab.home}/copied data\n"
    there = site.lab.private(WORKER1) / "copied"
    found = sorted(str(p.relative_to(there)) for p in there.rglob("*") if p.is_file() and p.suffix != ".pyc")
    assert found == ['data/é "q".txt', "part.py", "tool.sh", "train.py"]
    assert os.access(there / "tool.sh", os.X_OK)
    before = {p.name: p.stat().st_ino for p in there.iterdir()}
    (here / "part.py").write_text("WORD = 'two'\n")
    launch = site.start("--no-check", "--sync", "project", "project/train.py")
    assert launch.wait() == 0 and launch.log("worker/2").startswith("two ")
    after = {p.name: p.stat().st_ino for p in there.iterdir()}
    changed = {name for name in after if name != "__pycache__" and after[name] != before.get(name)}
    assert changed == {"part.py"}


@pytest.mark.parametrize("how", ["unreachable", "full", "outside"])
def test_a_sync_that_cannot_be_names_the_host_and_starts_nothing(site: Site, how: str):
    here = site.lab.private("ctl") / "project"
    here.mkdir(exist_ok=True)
    (here / "train.py").write_text(SERVE + STEPS)
    (site.lab.private("ctl") / "elsewhere.py").write_text(SERVE + STEPS)
    site.cluster(every={"cwd": str(site.lab.home / "copied2")})
    if how == "unreachable":
        site.lab.crash(WORKER1)
        site.broken.add(WORKER1)
    elif how == "full":
        site.lab.run_in(WORKER1, ["sh", "-c", f"rm -rf {site.lab.home}/copied2; touch {site.lab.home}/copied2"])
    launch = site.start("--no-check", "--sync", "project", "elsewhere.py" if how == "outside" else "project/train.py")
    assert launch.wait() in (1, 2)
    said = {"unreachable": ("worker1", "refused"), "full": ("worker1", "copied2"), "outside": ("elsewhere.py",)}
    assert all(word in launch.text() for word in said[how]) and "Traceback" not in launch.text(), launch.text()
    (site.lab.private(WORKER1) / "copied2").unlink(missing_ok=True) if how == "full" else None


# --- files back


def test_fetch_brings_logs_and_files_of_every_host(site: Site):
    """From another folder than the run was started in; a link that leads outside stays behind."""
    save = "os.makedirs('out', exist_ok=True); open(f'out/{role}-{index}.npz', 'wb').write(bytes(range(256)) * 4096)\n"
    site.cluster(run={"checkpoints": str(site.lab.home / "ckpt")})
    for host in SEED:
        site.write(host, "ckpt/model", host)
    launch = site.run(SERVE + save + "say('saved')\n" + STEPS)
    assert launch.wait() == 0, launch.text()
    os.symlink("/etc/passwd", site.lab.private(WORKER0) / "out" / "link")
    elsewhere = site.lab.private("ctl") / "elsewhere"
    elsewhere.mkdir()
    code, said = site.ask("fetch", launch.run().id, cwd=site.lab.home / "elsewhere")
    assert code == 0, said
    brought = elsewhere / launch.run().id
    assert (brought / "worker1" / "ckpt" / "model").read_text() == WORKER1
    assert (brought / "logs" / "worker-0.log").exists()
    code, said = site.ask("fetch", launch.run().id, "out", "--to", "here", cwd=site.lab.home / "elsewhere")
    (site.lab.private(WORKER0) / "out" / "link").unlink()
    assert code == 0, said
    got = {str(p.relative_to(elsewhere / "here")): p for p in (elsewhere / "here").rglob("*") if p.is_file()}
    assert (elsewhere / "here" / "worker0" / "out" / "worker-0.npz").read_bytes() == bytes(range(256)) * 4096
    assert not any(p.is_symlink() or "link" in name for name, p in got.items())


def test_fetch_names_a_host_that_is_not_there_and_brings_the_rest(site: Site):
    launch = site.run(SERVE + "open('made', 'w').write(me)\n" + STEPS)
    assert launch.wait() == 0
    site.lab.crash(PS0)
    site.broken.add(PS0)
    code, said = site.ask("fetch", launch.run().id, "train.py", "made", "--to", "part")
    assert code == 1 and "ps0" in said and "Traceback" not in said
    assert (site.lab.private("ctl") / "part" / "worker1" / "made").read_text() == "worker/1"
