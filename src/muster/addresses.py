"""host:port, strictly: what TensorFlow and gRPC would take and misunderstand is refused or warned of here."""

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple

from muster.errors import Refused

SCHEMES = ("dns", "unix", "ipv4", "ipv6", "xds", "vsock", "passthrough")  # gRPC reads NAME:PORT of these as a URI


class Address(NamedTuple):
    host: str  # IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def key(self) -> str:
        """Equal for two spellings of one place (as far as spelling goes: names are not resolved)."""
        return f"{key(self.host)}:{self.port}"


def key(host: str) -> str:
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def parse_address(text: str, where: str, host_only: bool = False) -> Address:
    """The host and port that ``text`` names. Raises Refused; ``where`` is the file, line and key it stands in."""
    shown = text if len(text) < 80 else text[:77] + "..."

    def refuse(because: str, try_: str = "write it as host:port, for example 10.0.0.11:2222") -> Refused:
        said = shown.removesuffix(":1") if host_only else shown
        return Refused(f"{said!r} is no {'host' if host_only else 'address'}", at=where, because=because, try_=try_)

    if not text.strip():
        raise refuse("it is empty")
    if text != text.strip() or re.search(r"\s", text):
        raise refuse("it holds a blank", "one address a string" if "," in text else f"write {''.join(text.split())!r}")
    if "://" in text:
        raise refuse("it has a scheme", f"write {text.split('://', 1)[1]!r}")
    if "/" in text or "," in text:
        raise refuse("it holds a slash or a comma", "one host:port a string")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or not rest.startswith(":"):
            raise refuse("an IPv6 address stands in brackets with the port behind them", "write [fd00::5]:2222")
        port_text = rest[1:]
        try:
            ipaddress.IPv6Address(host.split("%")[0])
        except ValueError as error:
            raise refuse(str(error)) from None
    else:
        host, colon, port_text = text.rpartition(":")
        if ":" in host:
            raise refuse("IPv6 without brackets: where the port begins cannot be told", f"write [{host}]:{port_text}")
        if not colon:
            raise refuse("the port is missing", f"write {text}:2222")
        _check_name(host, refuse)
    if not port_text.isascii() or not port_text.isdigit():
        raise refuse(f"{port_text!r} is no port")
    port = int(port_text)
    if not 1 <= port <= 65535:
        swallowed = f"; TensorFlow would silently use {port % 65536}" if port > 65535 else ""
        raise refuse(f"ports go from 1 to 65535{swallowed}", "choose a port from 1024 to 65535")
    return Address(host, port)


def _check_name(host: str, refuse: Callable[[str], Refused]) -> None:
    if not host:
        raise refuse("the host is missing")
    if host.startswith("-"):
        raise refuse("a host does not begin with a dash (ssh would read an option)")
    if len(host) > 253:
        raise refuse(f"a host name has at most 253 characters, this one {len(host)}")
    if bad := re.search(r"[^\w.%-]", host):
        raise refuse(f"{bad[0]!r} cannot stand in a host name")
    if re.fullmatch(r"[\d.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise refuse(str(error)) from None


def odd_name(host: str) -> str:
    """A warning about a name that resolves in the shell and not in gRPC, or an empty string."""
    if host.lower() in SCHEMES:
        return f"gRPC takes {host}:PORT for a URI of scheme {host!r}; use the machine's IP address"
    if not host.isascii():
        try:
            return f"{host} is not ASCII; use its IP address or {host.encode('idna').decode()}"
        except UnicodeError:
            return f"{host} is not ASCII; use its IP address"
    if "_" in host:
        return f"an underscore is not legal in a host name ({host}); if tasks cannot reach it, use its IP address"
    return ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(key(host)).is_loopback
    except ValueError:
        return False
