"""Where a task listens, as opposed to what others dial: behind a container's bridge or a router these are two places.

A host has one address that others dial, and one range of ports. Where something forwards them, the file says to what:
``bind``, the address to listen on, and ``bind_ports``, a range as long as ``ports``. A plan speaks of what is dialled;
the bound place is worked out here, from a host and one of its ports, whoever chose that port. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping

from muster.addresses import Address, key
from muster.cluster import Host, Run, host_ports, port_range
from muster.errors import Refused

ANY = ("0.0.0.0", "::")


def ports_of(host: Host, run: Run) -> range:
    """The ports that others may dial on ``host``."""
    return host_ports(host.ports, f"hosts {host.name}.ports") if host.ports else port_range(run.ports, "run.ports")


def bound(host: Host, port: int) -> Address:
    """Where a task of ``host`` listens that others dial at ``port``."""
    if not host.bind_ports:
        return Address(host.bind or host.address, port)
    dialled, behind = host_ports(host.ports, "ports"), host_ports(host.bind_ports, "bind_ports")
    return Address(host.bind or host.address, behind[dialled.index(port)] if port in dialled else port)


def candidates(seat: Address, hosts: Iterable[Host], task: str, at: str) -> list[Host]:
    """The hosts that an exact seat may mean. Several may share an address, each with ports of its own.

    Raises Refused where the host is known and nothing leads from that port to it.
    """
    named = [host for host in hosts if key(seat.host) in (key(host.address), key(host.name))]
    found = [host for host in named if not host.bind_ports or seat.port in host_ports(host.ports, "ports")]
    if named and not found:
        host = named[-1]
        raise Refused(
            f"{task} announces port {seat.port} of {host.name}, and nothing leads from there to it",
            at=at,
            because=f"{host.name} has ports {host.ports}, which lead to {host.bind_ports}",
            try_="a port of that range, or a wider one in ports and bind_ports",
        )
    mine = {host.name for host in found if host.ports and seat.port in host_ports(host.ports, "ports")}
    found.reverse()
    return sorted(found, key=lambda host: (host.name not in mine, key(host.name) != key(seat.host)))


def free_ports(run: Run, hosts: list[Host], busy: Mapping[str, frozenset[int]]) -> dict[str, Iterator[int]]:
    """By host, the ports that may be given to its tasks, each once.

    ``busy`` are ports of the machine itself, which is to say bound ones. Hosts that share an address (containers behind
    several sshd) share what others dial there; unless their ports are forwarded, they share the machine's ports too.
    """
    given: dict[str, set[int]] = {}
    shared: dict[str, set[int]] = {}
    for host in hosts:
        given.setdefault(key(host.address), set())
        if not host.bind_ports:
            shared.setdefault(key(host.address), set()).update(busy.get(host.name, ()))

    def of(host: Host) -> Iterator[int]:
        taken = busy.get(host.name, frozenset()) if host.bind_ports else shared[key(host.address)]
        for port in ports_of(host, run):
            if port not in given[key(host.address)] and bound(host, port).port not in taken:
                given[key(host.address)].add(port)
                yield port

    return {host.name: of(host) for host in hosts}


def apart(launcher: str, places: Iterable[tuple[str, str]]) -> bool:
    """Whether tasks at ``places`` (host, address) need a network between them.

    To the local launcher several hosts are names of this machine. Over ssh two hosts at one address are two containers.
    """
    known = set(places)
    return len({address for _, address in known}) > 1 or (launcher != "local" and len({host for host, _ in known}) > 1)


def own_seat(
    addresses: Mapping[str, list[str]], role: str, index: int, host: Host, at: Address
) -> dict[str, list[str]]:
    """``addresses`` as the task itself must have them: TensorFlow listens on the port that its own entry says.

    That entry leads to itself within its own machine, since what others dial may not be dialled from inside.
    """
    inside = "127.0.0.1" if host.bind in ANY else at.host
    own = {job: list(row) for job, row in addresses.items()}
    own[role][index] = str(Address(inside, at.port))
    return own
