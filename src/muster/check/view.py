"""What the rules see: the plan, and of each host that answered, its facts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from muster.check.findings import (
    OLDEST_PYTHON,
    Facts,
    Finding,
    Job,
    Pairs,
    Wanted,
    chief_host,
    trains,
    usual,
)

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")


@dataclass(frozen=True)
class View:
    wanted: Sequence[Wanted]
    facts: Mapping[str, Facts]
    pairs: Pairs
    job: Job
    hosts: Mapping[str, Wanted] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", {w.host: w for w in self.wanted})

    @cached_property
    def chief(self) -> str:
        return chief_host(self.wanted)

    @cached_property
    def answered(self) -> list[str]:
        """Hosts that could be asked anything at all."""
        return [w.host for w in self.wanted if w.host in self.facts and "failure" not in self.facts[w.host]]

    @cached_property
    def training(self) -> list[str]:
        return [host for host in self.answered if trains(self.hosts[host], self.job)]

    def section(self, name: str, among: Sequence[str] | None = None) -> dict[str, Any]:
        """Section ``name`` of each host that has it; late and broken ones have a rule of their own."""
        hosts = self.answered if among is None else among
        told = {host: self.facts[host].get(name) for host in hosts}
        return {host: value for host, value in told.items() if value and not {"late", "broken"} & set(value)}

    def packages(self, host: str) -> Mapping[str, str] | None:
        """What is installed there, which may be nothing; None where it is not known."""
        told = self.facts[host].get("packages")
        return None if not isinstance(told, Mapping) or {"late", "broken"} & set(told) else told

    @cached_property
    def pythons(self) -> dict[str, tuple[int, ...]]:
        return {host: numbers(told["version"])[:2] for host, told in self.section("python").items()}

    @cached_property
    def wrong_python(self) -> set[str]:
        """Hosts whose interpreter is another one than it should be: what they lack otherwise follows from that."""
        reference = usual({host: v for host, v in self.pythons.items() if host in self.training}, self.chief)
        return {
            host
            for host, version in self.pythons.items()
            if version < OLDEST_PYTHON or (host in self.training and version != reference)
        }

    def tensorflow(self, host: str) -> str:
        """Distribution and version, as in "tensorflow-cpu 2.21.0"; "" for none."""
        packages = self.packages(host) or {}
        found = [f"{name} {packages[name]}" for name in TENSORFLOWS if name in packages]
        return found[0] if found else ""


Rule = Callable[[View], Iterator[Finding]]


def numbers(version: str) -> tuple[int, ...]:
    """(2, 21, 0) of "2.21.0rc1": the leading digits of each part."""
    parts = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and 3 more"."""
    if len(names) <= 1:
        return "".join(names)
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
