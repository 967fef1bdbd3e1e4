"""``muster run`` as a user of ``ctl`` types it, on machines of a lab, over stand-in scripts that need no TensorFlow.

Every wait here is for a condition, and has a limit. After each test the lab is whole again and empty of processes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from standins import LIMIT, Launched, slack

from .lab import SEED, Lab

PS0, PS1, WORKER0, WORKER1, WORKER2 = SEED


def toml(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)


class Launch(Launched):
    """One ``muster run`` on ``ctl``. ``process`` is muster itself."""

    def __init__(self, site: "Site", number: int, argv: Sequence[str]) -> None:
        self.site, self.runs = site, site.runs
        self.out, self.err = (site.lab.folder / f"launch-{number}.{name}" for name in ("out", "err"))
        self.began = time.monotonic()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                site.lab.argv("ctl", argv, site.lab.home),
                env=site.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code. Fails unless nothing is left on any machine that can be reached."""
        code = self.ended(limit)
        self.seconds = time.monotonic() - self.began
        self.site.clean(slack(2.0))
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Site:
    """A lab, its cluster file, and the user at ``ctl``."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.runs = lab, lab.folder / "runs"
        self.env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.env |= {"HOME": str(lab.home), "MUSTER_RUNS": str(self.runs)}
        self.launches: list[Launch] = []
        self.broken: set[str] = set()  # hosts that a test has taken out of reach

    # --- what the user writes

    def cluster(
        self,
        run: Mapping[str, Any] | None = None,
        hosts: Mapping[str, Mapping[str, Any]] | None = None,
        every: Mapping[str, Any] | None = None,
        **top: Any,
    ) -> str:
        """Writes the cluster file. ``hosts`` changes or adds hosts, ``every`` all of them, ``run`` and ``top`` the
        rest; by default the five seats of the seed at port 2222."""
        python = {"python": sys.executable, "cwd": str(self.lab.home)}
        rows = {h: {"name": h.split(".")[0], "address": h, **python, **(every or {})} for h in self.lab.names}
        if hosts is not None:
            rows = {h: {**rows.get(h, {"name": h, "address": h, **python}), **row} for h, row in hosts.items()}
        seats = {"ps": [f"{h}:2222" for h in SEED[:2]], "workers": [f"{h}:2222" for h in SEED[2:]]}
        heads = {"name": "lab", "launcher": "ssh", "ssh_config": str(self.lab.ssh_config), **top}
        settings = {**(seats if hosts is None else {}), "engine": "tensorflow", "backoff": 0.1, **(run or {})}
        text = toml({k: v for k, v in heads.items() if v is not None})
        text += "".join("\n[[hosts]]\n" + toml(row) for row in rows.values())
        self.write("ctl", "lab.toml", text + "\n[run]\n" + toml({k: v for k, v in settings.items() if v is not None}))
        return "lab.toml"

    def write(self, host: str, name: str, text: str) -> Path:
        path = self.lab.private(host) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def everywhere(self, name: str, text: str) -> None:
        for host in self.lab.names:
            self.write(host, name, text)

    # --- what the user types

    def run(
        self,
        code: str,
        *options: str,
        args: Sequence[str] = (),
        name: str = "train.py",
        check: bool = False,
        through: Sequence[str] = ("-m", "muster"),
    ) -> Launch:
        """``muster run -c lab.toml [--no-check] OPTIONS train.py ARGS``, the script being on all hosts."""
        self.everywhere(name, code)
        return self.start(*([] if check else ["--no-check"]), *options, name, *args, through=through)

    def start(self, *words: str, through: Sequence[str] = ("-m", "muster")) -> Launch:
        if not (self.lab.private("ctl") / "lab.toml").exists():
            self.cluster()
        argv = [sys.executable, *through, "run", "-c", "lab.toml", *words]
        launch = Launch(self, len(self.launches), argv)
        self.launches.append(launch)
        return launch

    def ask(self, *args: str, within: float = LIMIT, cwd: Path | None = None) -> tuple[int, str]:
        """Another verb, to its end: exit code, and all that it printed."""
        argv = self.lab.argv("ctl", [sys.executable, "-m", "muster", *args], cwd or self.lab.home)
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=within, check=False)
        return done.returncode, done.stdout + done.stderr

    # --- what is there

    def left(self, host: str) -> dict[int, str]:
        """What runs in ``host`` besides sshd: nothing, unless a run is on."""
        found = self.lab.processes(host)
        return {pid: said for pid, said in found.items() if not said.startswith("sshd:") and "/sshd -D" not in said}

    def everything(self) -> dict[str, dict[int, str]]:
        found = {host: self.left(host) for host in (*self.lab.names, "ctl") if host not in self.broken}
        return {host: processes for host, processes in found.items() if processes}

    def clean(self, within: float) -> None:
        """Fails unless nothing of a run is alive anywhere ``within`` seconds."""
        end = time.monotonic() + within
        while (left := self.everything()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"left after {within:.1f} s: {left}"

    def copies(self, host: str, task: str) -> list[int]:
        """The processes of ``task`` on ``host`` (its own and its children's)."""
        mark = f"MUSTER_TASK={task}".encode()
        return [pid for pid in self.left(host) if mark in _environ(pid)]

    def logins(self, host: str) -> int:
        return self.lab._machines[host].log.read_text().count("Accepted publickey")

    # --- afterwards

    def mend(self) -> None:
        """Ends what a test has left, and takes its faults back."""
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.kill()
        self.launches.clear()
        for host in self.lab.names:
            machine = self.lab._machines[host]
            if not machine.pid:
                self.lab.power_on(host)
            with contextlib.suppress(ProcessLookupError):
                os.kill(machine.pid, signal.SIGCONT)
            self.lab.plug(host)
            self.lab.calm(host)
            self.lab.run_in(host, ["iptables", "-F", "INPUT"])
            for path in self.lab.private(host).iterdir():
                if path.name == "enough" or path.name.startswith(".bash"):
                    path.unlink()
        (self.lab.private("ctl") / "lab.toml").unlink(missing_ok=True)
        self.broken.clear()
        left = {pid for processes in self.everything().values() for pid in processes}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


@contextlib.contextmanager
def site_on(lab: Lab) -> Iterator[Site]:
    with lab:
        yield Site(lab)
