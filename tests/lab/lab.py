"""Several machines on one computer, each with a real sshd, and a network between them that can be made bad.

    with Lab() as lab:                                        # ps0.example.com .. worker2.example.com, and ctl
        lab.run_in("ctl", ["ssh", "-F", str(lab.ssh_config), "ps0.example.com", "hostname"])
        lab.cut("worker0.example.com", "ps1.example.com")     # one direction only

A machine is a network, host name, process, mount and IPC namespace: own address, own /etc/hosts, own process list, own
/tmp, /run and home folder. Its process 1 is sshd itself, so one KILL of one known pid ends all of it, and nothing is
ever ended by name. All machines hang on a bridge in a namespace of its own; this computer's own network gets nothing,
so labs run side by side and no traffic leaves. ``ctl`` is where the tool under test runs. It shares this computer's
processes, so that the pid of a ``popen_in("ctl", ...)`` is the pid of the program itself and can be signalled as a user
would.

Two folders have the same path on all machines: ``home`` (private to each, also ``$HOME``) and ``shared`` (one for all).

By hand: ``python tests/lab/lab.py`` brings five machines up, says how to reach them, and takes them down at end of
file.
"""

import fcntl
import glob
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SEED = ("ps0.example.com", "ps1.example.com", "worker0.example.com", "worker1.example.com", "worker2.example.com")
FOLDERS = Path("/var/tmp")  # not /tmp, which each machine has of its own
NETWORK = "10.77.0"
ETC = ("hosts", "hostname", "resolv.conf", "passwd")  # each machine's own; in passwd only root's home differs
TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "iptables", "ethtool", "nsenter", "unshare", "setpriv")
SSHD = {
    "Port": "22",
    "PidFile": "none",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "PubkeyAuthentication": "yes",
    "PermitRootLogin": "prohibit-password",
    "UsePAM": "no",
    "StrictModes": "no",  # the key file lies below a folder that is not the user's
    "X11Forwarding": "no",
    "AllowTcpForwarding": "yes",
    "MaxStartups": "100:30:200",
    "MaxSessions": "100",
    "UseDNS": "no",
    "PrintMotd": "no",
    "Subsystem": "sftp internal-sftp",
}
_serial = itertools.count()


def why_not() -> str:
    """Why no lab can be had on this computer, or an empty string."""
    if os.geteuid() != 0:
        return "the lab needs root (network namespaces and sshd)"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    return f"the lab needs {', '.join(missing)} (Debian packages: .ci/packages.txt)" if missing else ""


class Machine:
    """One machine: where its files lie on this computer, and the pids that hold it up."""

    def __init__(self, name: str, index: int, prefix: str, folder: Path) -> None:
        self.name, self.index = name, index
        self.address = f"{NETWORK}.{10 + index}"
        self.space = f"{prefix}-{index}"  # of the network namespace
        self.port = f"p{index}"  # of the switch
        self.folder = folder / name
        self.outer: subprocess.Popen[bytes] | None = None  # holds process 1, which dies with it
        self.pid = 0  # pid, on this computer, of the machine's process 1
        self.sshd = dict(SSHD)
        self.environ: dict[str, str] = {}
        self.delays: list[subprocess.Popen[str]] = []

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"


class Lab:
    def __init__(self, machines: Sequence[str] = SEED, prefix: str = "") -> None:
        self.prefix = prefix or f"mu{os.getpid():x}{next(_serial)}"
        self.switch = f"{self.prefix}-sw"
        self.folder = FOLDERS / f"muster-lab-{self.prefix}"
        self.home, self.shared = self.folder / "home", self.folder / "shared"
        self.ssh_config, self.known_hosts = self.folder / "ssh_config", self.folder / "known_hosts"
        self.key = self.folder / "id_ed25519"
        self.names = tuple(machines)
        self._machines = {
            name: Machine(name, index, self.prefix, self.folder) for index, name in enumerate(("ctl", *machines))
        }

    # --- up and down

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:  # also Ctrl-C: half a lab is never left behind
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        sweep()
        for folder in (self.folder, self.home, self.shared):
            folder.mkdir(parents=True)
        (self.folder / "owner").write_text(f"{os.getpid()} {_born(os.getpid())}\n")
        _keygen(self.key)
        shutil.copy(f"{self.key}.pub", self.folder / "authorized_keys")
        self._wire()
        for machine in self._machines.values():
            self._furnish(machine)
        self._write_ssh_files()
        for machine in self._machines.values():
            self._start(machine)
        for machine in self._machines.values():
            self._await(machine, started=1)

    def down(self) -> None:
        for machine in self._machines.values():
            self._stop(machine)
        _remove(self.prefix, self.folder)

    def _wire(self) -> None:
        spaces = [machine.space for machine in self._machines.values()]
        _call(["ip", "-batch", "-"], "".join(f"netns add {space}\n" for space in (self.switch, *spaces)))
        links = "".join(
            f"link add {m.port} type veth peer name eth0 netns {m.space}\nlink set {m.port} master br0 up\n"
            for m in self._machines.values()
        )
        _call(["ip", "-n", self.switch, "-batch", "-"], "link add br0 type bridge\nlink set br0 up\n" + links)
        for machine in self._machines.values():
            lines = f"addr add {machine.address}/24 dev eth0\nlink set lo up\nlink set eth0 up\n" + self._route(
                machine, "eth0"
            )
            _call(["ip", "-n", machine.space, "-batch", "-"], lines)
            # Without this a veth passes 64 KB at a time, and "1 % of the packets" would mean something else.
            _call([*_net(machine), "ethtool", "-K", "eth0", "tso", "off", "gso", "off", "gro", "off"])

    def _route(self, machine: Machine, device: str) -> str:
        """BBR, where it is the default, hides loss; a machine of the lab behaves as most do."""
        return f"route change {NETWORK}.0/24 dev {device} src {machine.address} congctl cubic\n"

    def _furnish(self, machine: Machine) -> None:
        for part in ("tmp", "home", "apart"):
            (machine.folder / part).mkdir(parents=True)
        (machine.folder / "tmp").chmod(0o1777)
        everyone = "".join(f"{m.address} {m.name}\n" for m in self._machines.values())
        (machine.folder / "hosts").write_text("127.0.0.1 localhost\n" + everyone)
        (machine.folder / "hostname").write_text(machine.name + "\n")
        accounts = (line.split(":") for line in Path("/etc/passwd").read_text().splitlines())
        homes = (":".join([*a[:5], str(self.home), *a[6:]]) if a[0] == "root" else ":".join(a) for a in accounts)
        (machine.folder / "passwd").write_text("\n".join(homes) + "\n")
        (machine.folder / "resolv.conf").write_text("")
        _keygen(machine.folder / "host_key")
        self._write_sshd_config(machine)

    def _write_sshd_config(self, machine: Machine) -> None:
        own = {
            "ListenAddress": machine.address,
            "HostKey": str(machine.folder / "host_key"),
            "AuthorizedKeysFile": str(self.folder / "authorized_keys"),
        }
        said = " ".join(f'"{name}={value}"' for name, value in machine.environ.items())
        lines = [f"{key} {value}" for key, value in {**machine.sshd, **own}.items()]
        lines += [f"SetEnv {said}"] if said else []
        (machine.folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def _write_ssh_files(self) -> None:
        keys = ((m, (m.folder / "host_key.pub").read_text().split()[:2]) for m in self._machines.values())
        self.known_hosts.write_text("".join(f"{m.name},{m.address} {' '.join(key)}\n" for m, key in keys))
        self.ssh_config.write_text(
            f"Host {' '.join(self.names)} {NETWORK}.*\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  BatchMode yes\n  ConnectTimeout 5\n"
        )

    def _start(self, machine: Machine) -> None:
        here = machine.folder
        script = "\n".join(
            [
                "set -e",
                f"hostname {machine.name}",
                *(f"[ ! -e /etc/{f} ] || mount --bind {here}/{f} /etc/{f}" for f in ETC),
                f"mount --bind {here}/home {self.home}",
                *([] if machine.name == "ctl" else [*_own_tmp(here), *_own_run()]),
                f"cd {self.home}",
                "exec sleep infinity" if machine.name == "ctl" else f"exec {_sshd()} -D -e -f {here}/sshd_config",
            ]
        )
        inside = ["--uts", "--mount", "--ipc"] + ([] if machine.name == "ctl" else ["--pid", "--mount-proc"])
        argv = ["setpriv", "--pdeathsig", "KILL", *_net(machine), "unshare", *inside, "--fork", "--kill-child"]
        with machine.log.open("ab") as log:
            command = [*argv, "bash", "-c", script]
            machine.outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _stop(self, machine: Machine) -> None:
        _end(machine.delays)
        if machine.outer and machine.pid:
            _kill(machine.pid)  # its parent then reaps it and ends too; the other way round would leave a zombie
            machine.outer.wait()
        elif machine.outer:
            _end([machine.outer])
        machine.outer, machine.pid = None, 0

    def _await(self, machine: Machine, started: int) -> None:
        """Until the machine's process 1 is what it should be, for the ``started``-th time."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            machine.pid = machine.pid or _child(machine.outer.pid if machine.outer else 0)
            if machine.name == "ctl":
                if machine.pid and b"sleep" in _cmdline(machine.pid):
                    return
            elif machine.pid and machine.log.read_bytes().count(b"Server listening on") >= started:
                return
            time.sleep(0.01)
        raise RuntimeError(f"{machine.name} did not come up:\n{machine.log.read_text()}")

    # --- in a machine

    def address(self, host: str) -> str:
        return self._machines[host].address

    def private(self, host: str) -> Path:
        """This computer's path of what ``host`` sees as ``lab.home``."""
        return self._machines[host].folder / "home"

    def argv(self, host: str, argv: Sequence[str], cwd: str | Path | None = None) -> list[str]:
        machine = self._machines[host]
        spaces = ["--net", "--uts", "--mount", "--ipc"]
        where = str(cwd or (os.getcwd() if host == "ctl" else self.home))
        if host != "ctl":  # nsenter then stays, as the parent; what it started must not outlive it
            spaces += ["--pid", "setpriv", "--pdeathsig", "KILL"]
        return ["nsenter", "--target", str(machine.pid), *spaces, "sh", "-c", 'cd "$0" && exec "$@"', where, *argv]

    def run_in(
        self,
        host: str,
        argv: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``argv`` in ``host`` to its end. The exit status is in the result, never raised."""
        return subprocess.run(
            self.argv(host, argv, cwd),
            env=self._env(env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def popen_in(
        self, host: str, argv: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts ``argv`` in ``host`` with three pipes. In ``ctl`` the pid is the program's own."""
        pipe = subprocess.PIPE
        return subprocess.Popen(self.argv(host, argv, cwd), env=self._env(env), stdin=pipe, stdout=pipe, stderr=pipe)

    def _env(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), **(more or {})}

    def processes(self, host: str) -> dict[int, str]:
        """Pid on this computer and command of what runs in ``host``, what holds the machine up left out."""
        machine = self._machines[host]
        outer = machine.outer.pid if machine.outer else 0
        own = {outer, machine.pid, *(delay.pid for delay in machine.delays)}
        found = {pid: _cmdline(pid).replace(b"\0", b" ").decode(errors="replace") for pid in _pids(machine.space)}
        return {pid: command for pid, command in found.items() if pid not in own and command}

    # --- faults of machines

    def crash(self, host: str) -> None:
        """All its processes die at once; the kernel still says goodbye on their connections."""
        self._stop(self._machines[host])

    def power_off(self, host: str) -> None:
        """As crash, but nothing leaves the machine any more: its peers hear nothing."""
        self.unplug(host)
        self.crash(host)

    def freeze(self, host: str) -> None:
        """Its sshd hangs: connections are accepted by the kernel and never answered."""
        os.kill(self._machines[host].pid, signal.SIGSTOP)

    def power_on(self, host: str) -> None:
        machine = self._machines[host]
        machine.log.write_bytes(b"")
        self.plug(host)
        self._start(machine)
        self._await(machine, started=1)

    def unplug(self, host: str) -> None:
        _call(["ip", "-n", self.switch, "link", "set", self._machines[host].port, "down"])

    def plug(self, host: str) -> None:
        _call(["ip", "-n", self.switch, "link", "set", self._machines[host].port, "up"])

    def set_name(self, host: str, name: str, address: str | None) -> None:
        """What ``name`` means on ``host``: ``address``, or nothing at all."""
        file = self._machines[host].folder / "hosts"
        kept = [line for line in file.read_text().splitlines() if name not in line.split()[1:]]
        file.write_text("\n".join([*kept, *([f"{address} {name}"] if address else [])]) + "\n")

    def rename_interface(self, host: str, old: str, new: str) -> None:
        machine = self._machines[host]
        lines = f"link set {old} down\nlink set {old} name {new}\nlink set {new} up\n" + self._route(machine, new)
        _call(["ip", "-n", machine.space, "-batch", "-"], lines)

    def change_host_key(self, host: str) -> None:
        machine = self._machines[host]
        for file in ("host_key", "host_key.pub"):
            (machine.folder / file).unlink()
        _keygen(machine.folder / "host_key")
        self._reload(machine)

    def sshd(self, host: str, **options: str) -> None:
        """Changes lines of the machine's sshd_config, as in ``MaxStartups="1:100:1"``."""
        self._machines[host].sshd.update(options)
        self._reload(self._machines[host])

    def environ(self, host: str, **variables: str) -> None:
        """Variables that every command has which comes in by ssh."""
        self._machines[host].environ.update(variables)
        self._reload(self._machines[host])

    def clock(self, host: str, seconds: float) -> None:
        """Sets the wall clock of all commands that come in by ssh wrong by ``seconds``; the monotonic clock stays."""
        library = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")[0]
        self.environ(host, LD_PRELOAD=library, FAKETIME=f"{seconds:+.0f}s", DONT_FAKE_MONOTONIC="1")

    def unshare_folder(self, host: str) -> None:
        """From now on ``host`` has an empty folder of its own where the others have ``lab.shared``."""
        machine = self._machines[host]
        apart = machine.folder / "apart"
        _call(["nsenter", "--target", str(machine.pid), "--mount", "mount", "--bind", str(apart), str(self.shared)])

    def _reload(self, machine: Machine) -> None:
        self._write_sshd_config(machine)
        before = machine.log.read_bytes().count(b"Server listening on")
        os.kill(machine.pid, signal.SIGHUP)
        self._await(machine, started=before + 1)

    # --- faults of the network

    def delay(
        self, host: str, ms: float, *, loss: float = 0, jitter: float = 0, rate: float = 0, peer: str | None = None
    ) -> None:
        """What ``host`` receives (from ``peer`` only, where named) comes ``ms`` late, less ``loss`` percent of it."""
        machine, delay = self._machines[host], str(Path(__file__).with_name("delay.py"))
        queue = str(len(machine.delays) + 1)
        asked = ["--delay", str(ms), "--loss", str(loss), "--jitter", str(jitter), "--rate", str(rate)]
        child = subprocess.Popen(
            [*_net(machine), sys.executable, delay, queue, *asked], stdout=subprocess.PIPE, text=True
        )
        machine.delays.append(child)
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"delay.py at {host} ended with {child.wait()}")
        rule = ["-i", "eth0", *self._from(peer), "-j", "NFQUEUE", "--queue-num", queue, "--queue-bypass"]
        _call([*_net(machine), "iptables", "-t", "mangle", "-A", "PREROUTING", *rule])

    def calm(self, host: str) -> None:
        """Takes back every ``delay`` at ``host``."""
        machine = self._machines[host]
        _call([*_net(machine), "iptables", "-t", "mangle", "-F", "PREROUTING"])
        _end(machine.delays)

    def rate(self, host: str, mbit: float | None) -> None:
        """The cable of ``host`` carries ``mbit`` each way; None takes that back."""
        machine = self._machines[host]
        for space, device in ((machine.space, "eth0"), (self.switch, machine.port)):
            verb = ["replace", "dev", device, "root"] if mbit else ["del", "dev", device, "root"]
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"] if mbit else []
            _call(["tc", "-n", space, "qdisc", *verb, *limit])

    def cut(self, sender: str, receiver: str, *, reset: bool = False) -> None:
        """Nothing that ``sender`` sends reaches ``receiver``; the other way stays open. ``reset``: answered with
        RST."""
        self._input("-A", sender, receiver, reset)

    def mend(self, sender: str, receiver: str, *, reset: bool = False) -> None:
        self._input("-D", sender, receiver, reset)

    def _input(self, verb: str, sender: str, receiver: str, reset: bool) -> None:
        how = ["-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"] if reset else ["-j", "DROP"]
        _call([*_net(self._machines[receiver]), "iptables", verb, "INPUT", *self._from(sender), *how])

    def _from(self, peer: str | None) -> list[str]:
        return ["-s", self.address(peer)] if peer else []


def _own_tmp(here: Path) -> list[str]:
    """A private /tmp, in which the project and its interpreter are still seen where they lie below /tmp themselves."""
    below = [p for p in {Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()} if Path("/tmp") in p.parents]
    keep = [p for p in below if not any(other in p.parents for other in below)]
    binds = [f"mkdir -p {here}{p} && mount --bind {p} {here}{p}" for p in keep]
    return [*binds, f"mount --rbind {here}/tmp /tmp"]


def _own_run() -> list[str]:
    return ["mount -t tmpfs -o mode=755 run /run", "mkdir -m 755 /run/sshd"]


def _sshd() -> str:
    return (
        shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")) or "/usr/sbin/sshd"
    )


def _net(machine: Machine) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{machine.space}"]


def _call(argv: Sequence[str], stdin: str = "") -> str:
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}\n{stdin}")
    return done.stdout


def _keygen(file: Path) -> None:
    _call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.parent.name, "-f", str(file)])


def _child(pid: int) -> int:
    """The one child of ``pid``: unshare's, which is process 1 of the machine."""
    try:
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended; whoever waits for the machine will say so
        return 0
    return int(told[0]) if told else 0


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended since it was listed
        return b""


def _born(pid: int) -> str:
    """Start time of ``pid`` in clock ticks since boot, or "": with the pid, it names a process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _pids(space: str) -> list[int]:
    return [int(pid) for pid in _call(["ip", "netns", "pids", space]).split()]


def _end(children: "list[subprocess.Popen[str]] | list[subprocess.Popen[bytes]]") -> None:
    """KILLs our own ``children``, waits until they are gone, and forgets them."""
    for child in children:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()
    children.clear()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended by itself: just as well
        pass


def _spaces(prefix: str) -> list[str]:
    names = (line.split()[0] for line in _call(["ip", "netns", "list"]).splitlines() if line.strip())
    return [name for name in names if name.startswith(prefix + "-")]


def _remove(prefix: str, folder: Path) -> None:
    """Ends what still runs in the namespaces of a lab, then removes them and its folder."""
    for space in _spaces(prefix):
        until = time.monotonic() + 5
        while (left := _pids(space)) and time.monotonic() < until:
            for pid in left:
                _kill(pid)
            time.sleep(0.01)
        _call(["ip", "netns", "del", space])
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Removes labs whose owner was killed before it could. One at a time: two test runs may start together."""
    folders = os.open(FOLDERS, os.O_RDONLY)
    try:
        fcntl.flock(folders, fcntl.LOCK_EX)
        for folder in FOLDERS.glob("muster-lab-*"):
            if _orphaned(folder):
                _remove(folder.name.removeprefix("muster-lab-"), folder)
    finally:
        os.close(folders)


def _orphaned(folder: Path) -> bool:
    try:
        pid, born = (folder / "owner").read_text().split()
    except (OSError, ValueError):  # another lab that is just coming up or going down
        return False
    return _born(int(pid)) != born


def _by_hand(names: Sequence[str]) -> Iterator[str]:
    with Lab(names or SEED) as lab:
        reach = " ".join(lab.argv("ctl", ["ssh", "-F", str(lab.ssh_config)]))
        yield f"machines  {' '.join(lab.names)}\nreach     {reach} HOST"
        yield f"shared    {lab.shared}\nend       Ctrl-D"
        sys.stdin.read()


if __name__ == "__main__":
    if why_not():
        sys.exit(why_not())
    for text in _by_hand(sys.argv[1:]):
        print(text, flush=True)
