"""A container on a bridge network has an address that its own machine alone knows. Two mistakes follow from that: the
plan has the container's address, which others never reach; or it has the machine's, which the container cannot bind."""

import ipaddress
from collections.abc import Sequence

from muster.check.findings import Finding, is_address
from muster.check.view import View, listed

# Where Docker and Podman put bridges of their own accord. A container on its machine's network shows that machine's
# addresses, and mostly more than one; one in a pod has an address that others do reach.
POOLS = tuple(map(ipaddress.ip_network, ("172.16.0.0/12", "10.88.0.0/16")))
PUBLISH = "publish its ports (docker run -p) and set {} for it; ports and bind_ports say which lead where"


def not_its_own(view: View, host: str) -> Finding | None:
    """Others dial an address of ``host`` that no interface there has, for it is on a bridge."""
    own = _bridged(view, host)
    w = view.hosts[host]
    if not own:
        return None
    because = f"it is a container with {own}, and nothing there has {w.bind or w.address}, which its tasks are to bind"
    try_ = "docker run --network host; or " + PUBLISH.format('bind = "0.0.0.0"')
    return Finding("error", host, "it cannot listen where others dial it", because, try_, kind="bridge")


def unknown_outside(view: View, host: str) -> tuple[str, str] | None:
    """Because and try, where others fail to reach ``host`` and its address is that of a container on a bridge."""
    address = view.hosts[host].address
    if _bridged(view, host) != address:
        return None
    because = f"{address} is the address of a container on a bridge network, which no other machine knows"
    try_ = "docker run --network host; or " + PUBLISH.format('bind = "0.0.0.0" and the address of its machine')
    return because, try_


def forwarded(view: View, host: str, tasks: Sequence[str]) -> str:
    """What to look at where a port of ``host`` that is passed on to another one is not reached; else nothing."""
    w = view.hosts[host]
    ways = [f"{w.address}:{w.ports[task]} to port {w.bound[task]}" for task in tasks if task in w.bound]
    return f"is {listed(ways)} of {host} passed on (docker run -p, or the router)?" if ways else ""


def _bridged(view: View, host: str) -> str:
    """The only address that ``host`` has, if it looks like that of a container on a bridge; else nothing."""
    told = view.section("interfaces", [host]).get(host, {})
    own = [str(address) for address in told.get("addresses", []) if is_address(str(address))]
    bridged = told.get("container") and len(own) == 1 and any(ipaddress.ip_address(own[0]) in pool for pool in POOLS)
    return own[0] if bridged else ""
