"""How many logins are under way at one moment where they meet the same sshd: a jump host, or one behind many names.

An sshd refuses a crowd that has not logged in yet, at random, from ten on (MaxStartups 10:30:100 where nobody has
changed it), and a jump host sees the logins to every host behind it. ``ssh -G`` tells which way a login takes, with all
that the user's own configuration says of it.
"""

import contextlib
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from muster.cluster import Cluster, Host
from muster.launch.ssh import destination, options

AT_ONE_SSHD = 4  # logins: others may be at that door too
Ways = Mapping[str, Sequence[str]]


def ways(cluster: Cluster, hosts: Sequence[Host]) -> Ways:
    """The sshds that a login to each host meets, by its name; empty where there are too few hosts to make a crowd."""
    if cluster.launcher != "ssh" or len(hosts) <= AT_ONE_SSHD:
        return {}
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip((host.name for host in hosts), pool.map(lambda host: _way(cluster, host), hosts), strict=True))
    crowded = {door for door, count in Counter(door for way in found.values() for door in way).items() if count > 1}
    return {name: [door for door in way if door in crowded] for name, way in found.items()}


def _way(cluster: Cluster, host: Host) -> list[str]:
    argv = ["ssh", "-G", *options(cluster), "--", destination(host)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):  # the login itself will say what is wrong
        return []
    return doors(done.stdout)


def doors(told: str) -> list[str]:
    """The sshds in what ``ssh -G`` prints: jump hosts (whoever logs in there), a ProxyCommand as it stands, itself."""
    rows = dict(line.partition(" ")[::2] for line in told.splitlines())
    jumps = [jump.removeprefix("ssh://").rpartition("@")[2] for jump in rows.get("proxyjump", "").split(",")]
    command = rows.get("proxycommand", "")
    own = f"{rows['hostname']}:{rows.get('port', '22')}" if "hostname" in rows else ""
    return [door for door in (*jumps, command, own) if door and door != "none"]


class Turns:
    """Lets a few at a time through each door; for logins of which each has a thread."""

    def __init__(self, given: Ways) -> None:
        self._given = given
        doors = sorted({door for way in given.values() for door in way})
        self._free = {door: threading.Semaphore(AT_ONE_SSHD) for door in doors}

    @contextlib.contextmanager
    def take(self, host: str) -> Iterator[None]:
        """Held while a login to ``host`` is under way."""
        with contextlib.ExitStack() as held:
            for door in sorted(set(self._given.get(host, ()))):  # in one order, so that no two wait for each other
                held.enter_context(self._free[door])
            yield


def room(given: Ways, host: str, under_way: Sequence[str]) -> bool:
    """May a login to ``host`` begin beside those ``under_way``? For logins that one loop looks after."""
    busy = Counter(door for other in under_way for door in given.get(other, ()))
    return all(busy[door] < AT_ONE_SSHD for door in given.get(host, ()))
