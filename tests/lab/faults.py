"""Ten faults as people have them, dealt to the machines of a lab by a seed.

All are planted at once. A fault that hides another on the same machine is dealt so that it does not: nobody sees the
folders of a machine that ssh does not let us into, nor a slow link between two machines of which neither can listen.
"""

import glob
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.check.findings import Finding, Wanted

from .lab import Lab
from .probe_over_ssh import PORT

OTHER_TENSORFLOW = "2.16.1"


@dataclass(frozen=True)
class Planted:
    """What must be found: of this kind, at this host (and peer, in either order), with these words in its rows."""

    kind: str
    host: str
    because: tuple[str, ...]
    try_: tuple[str, ...]
    peer: str = ""

    def found(self, findings: Sequence[Finding]) -> list[Finding]:
        return [f for f in findings if f.kind == self.kind and self._here(f) and self._says(f)]

    def _here(self, finding: Finding) -> bool:
        if self.kind == "link":
            return {finding.host, finding.peer} == {self.host, self.peer}
        return (finding.host, finding.peer) == (self.host, self.peer)

    def _says(self, finding: Finding) -> bool:
        return all(w in finding.because for w in self.because) and all(w in finding.try_ for w in self.try_)


class Deal:
    """One draw: ``planted`` says what must be found, ``wanted`` is the plan that goes with it."""

    def __init__(self, lab: Lab, wanted: Sequence[Wanted], seed: int) -> None:
        self.lab, self.rng = lab, random.Random(seed)
        self.wanted = {w.host: w for w in wanted}
        self.planted: list[Planted] = []
        self.children: list[subprocess.Popen[bytes]] = []
        hosts = list(self.wanted)
        self.rng.shuffle(hosts)
        self.sealed, self.old, self.odd, self.taken, self.lost = hosts
        self._plant()

    def _plant(self) -> None:
        self.host_key_changed(self.sealed)
        answers = self.wrong_python(self.old)
        self.other_tensorflow(self.odd)
        self.port_taken(self.taken)
        self.name_at_loopback(self.lost)
        free = [host for host in self.wanted if host != self.sealed and (answers or host != self.old)]
        self.proxy_set(self.rng.choice(free))
        self.clock_off(self.rng.choice(free))
        self.folder_not_shared(self.rng.choice(free))
        deaf = {self.taken, self.lost}
        pairs = [pair for pair in itertools.combinations(free, 2) if set(pair) != deaf]
        slow, cut = self.rng.sample(pairs, 2)
        self.slow_link(*slow)
        # What is cut must be noticed: somebody dials somebody who listens.
        self.one_direction_cut(*self.rng.sample(cut, 2))

    # --- the ten

    def wrong_python(self, host: str) -> bool:
        """Another minor version where this computer has one, else a path where there is none. Does it still answer?"""
        others = other_pythons()
        path = self.rng.choice([*others, "/opt/nowhere/bin/python"])
        self.wanted[host] = replace(self.wanted[host], python=path)
        if path not in others:
            self._expect("ssh no python", host, ("No such file",), ("set python",))
            self._expect("not asked", host, (), ())
            return False
        self._expect("python", host, (path,), (f"set python for {host}", sys.executable))
        return True

    def other_tensorflow(self, host: str) -> None:
        python = other_tensorflow(self.lab, host)
        self.wanted[host] = replace(self.wanted[host], python=python)
        self._expect("tensorflow", host, (OTHER_TENSORFLOW,), (f"{python} -m pip install tensorflow", "=="))

    def port_taken(self, host: str) -> None:
        program = f"import socket; s = socket.create_server(('', {PORT})); print(flush=True); s.accept()"
        ours = self.rng.random() < 0.5
        env = {"MUSTER_RUN": "r7", "MUSTER_TASK": "ps/0"} if ours else {}
        child = self.lab.popen_in(host, [sys.executable, "-c", program], env=env)
        self.children.append(child)
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        if ours:
            self._expect("port", host, ("ps/0 of run r7",), ("muster stop r7",))
        else:
            self._expect("port", host, ("of root", "import socket"), (f"ssh {host} kill ",))

    def proxy_set(self, host: str) -> None:
        name = self.rng.choice(["http_proxy", "https_proxy", "grpc_proxy"])
        self.lab.environ(host, **{name: "http://me:secret@proxy.example.com:3128"})
        self._expect("proxy", host, (f"{name}=http://...@proxy.example.com:3128",), ("no_proxy = ", *self.lab.names))

    def host_key_changed(self, host: str) -> None:
        self.lab.change_host_key(host)
        self._expect("ssh key changed", host, ("SHA256:",), ("ssh-keygen -f", str(self.lab.known_hosts), host))
        self._expect("not asked", host, (), ())

    def name_at_loopback(self, host: str) -> None:
        self.lab.set_name(host, host, "127.0.1.1")
        self._expect("loopback name", host, ("127.0.1.1",), ("/etc/hosts", f"{self.lab.address(host)} {host}"))

    def slow_link(self, a: str, b: str) -> None:
        self.lab.delay(a, 50, loss=1, peer=b)
        self._expect("link", a, ("ms round trip", f"lost from {b} to {a}", "a step of a model"), ("cable",), peer=b)

    def one_direction_cut(self, sender: str, receiver: str) -> None:
        self.lab.cut(sender, receiver)
        self._expect("cut one way", sender, (sender, receiver), (self.lab.address(sender), receiver), peer=receiver)

    def folder_not_shared(self, host: str) -> None:
        self.lab.unshare_folder(host)
        self._expect("not shared", host, (str(self.lab.shared),), ("mount", host))

    def clock_off(self, host: str) -> None:
        off = self.rng.choice([-300, 300])
        self.lab.clock(host, off)
        self._expect("clock", host, ("5.0 minutes " + ("ahead" if off > 0 else "behind"),), ("set-ntp",))

    def _expect(self, kind: str, host: str, because: tuple[str, ...], try_: tuple[str, ...], peer: str = "") -> None:
        self.planted.append(Planted(kind, host, because, try_, peer))

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()


def other_pythons() -> list[str]:
    """Interpreters of this computer that are another minor version than ours, as real paths that do not go through a
    shim."""
    patterns = ("~/.pyenv/versions/3.*/bin/python3", "/usr/bin/python3.[0-9]*", "/usr/local/bin/python3.[0-9]*")
    found: dict[str, str] = {}
    for path in itertools.chain.from_iterable(glob.glob(os.path.expanduser(pattern)) for pattern in patterns):
        if not path.endswith("-config"):
            found.setdefault(version(path), path)
    return [path for told, path in sorted(found.items()) if told and told != version(sys.executable)]


def ancient() -> list[str]:
    """Interpreters that cannot even read our code."""
    return sorted(
        glob.glob(os.path.expanduser("~/.pyenv/versions/2.7*/bin/python")) + glob.glob("/usr/bin/python2.7")
    ) + sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.[67].*/bin/python")))


def version(path: str) -> str:
    argv = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def other_tensorflow(lab: Lab, host: str) -> str:
    return other_packages(lab, host, tensorflow_cpu=OTHER_TENSORFLOW)


def other_packages(lab: Lab, host: str, **versions: str) -> str:
    """A virtual environment, on ``host`` only, that has everything of ours but says that some of it is of another
    version."""
    folder = lab.private(host) / "venv"
    site = folder / "lib" / f"python{version(sys.executable)}" / "site-packages"
    for name, number in versions.items():
        told = site / f"{name}-{number}.dist-info"
        told.mkdir(parents=True)
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {number}\n")
    (site / "all.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    real = Path(sys.executable).resolve()
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    return str(lab.home / "venv" / "bin" / "python")
