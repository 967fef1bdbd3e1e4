"""The findings as a table for people and as JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.check.findings import Facts, Finding, Link, Pairs, Wanted
from muster.check.network import Slowest, figures, judged
from muster.check.view import TENSORFLOWS, listed

STYLE = {"error": "bold red", "warning": "yellow", "unknown": "cyan"}


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything stands in the way of a run."""
    return int(any(finding.severity == "error" for finding in findings))


def as_json(
    findings: Sequence[Finding],
    pairs: Pairs | None = None,
    slowest: Slowest | None = None,
    heard: Mapping[str, Facts] | None = None,
) -> str:
    told = {
        "ok": not exit_code(findings),
        "hosts": {host: described(facts) for host, facts in (heard or {}).items() if "failure" not in facts},
        "findings": [_row(finding) for finding in findings],
        "links": [{**asdict(link), "verdict": _verdict(link)} for link in (pairs.links if pairs else ())],
        "slowest": _slowest(slowest) if slowest else None,
    }
    return json.dumps(told, indent=2, ensure_ascii=False)


def _row(finding: Finding) -> dict[str, str]:
    row = asdict(finding)
    row["try"] = row.pop("try_")
    return row


def _slowest(slowest: Slowest) -> dict[str, object]:
    link = slowest.link
    return {
        "a": link.a,
        "b": link.b,
        "step_seconds": slowest.seconds,
        "middle_seconds": slowest.usual,
        "parameters": slowest.parameters,
    }


def _verdict(link: Link) -> str:
    verdict = judged(link)
    return "unknown" if link.error else verdict.severity if verdict else "ok"


def described(facts: Facts) -> dict[str, object]:
    """What a host is, for programs: system, machine, libc, kernel, cores, python, executable, packages, gpus."""
    told = {name: value for name, value in facts.items() if isinstance(value, Mapping)}
    known = {name: {} if {"late", "broken"} & set(value) else value for name, value in told.items()}
    return {
        **known.get("machine", {}),
        "python": known.get("python", {}).get("version", ""),
        "executable": known.get("python", {}).get("executable", ""),
        "packages": known.get("packages", {}),
        "gpus": [device.get("name", "") for device in known.get("gpus", {}).get("devices", [])],
    }


def hosts(heard: Mapping[str, Facts]) -> RenderableType:
    """One line for all hosts that are alike: what they are, and what their Python has."""
    alike: dict[str, list[str]] = {}
    for host, facts in heard.items():
        if "failure" not in facts:
            alike.setdefault(_words(described(facts)), []).append(host)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(style="dim", overflow="fold")
    for words, names in alike.items():
        rows.add_row(listed(names), Text(words))
    return rows


SHOWN = (*TENSORFLOWS, "keras", "tf_keras", "numpy", "protobuf", "grpcio")


def _words(told: Mapping[str, Any]) -> str:
    machine = " ".join(filter(None, (told.get("system"), told.get("machine"))))
    cores = f"{told['cores']} cores" if told.get("cores") else ""
    count = len(told["gpus"])
    gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else ""
    versions = ", ".join(f"{name} {told['packages'][name]}" for name in SHOWN if name in told["packages"])
    python = f"{told['executable']} {told['python']}".strip() + (f" with {versions}" if versions else "")
    return "; ".join(filter(None, (", ".join(filter(None, (machine, told.get("libc"), cores, gpus))), python)))


def table(
    wanted: Sequence[Wanted],
    findings: Sequence[Finding],
    slowest: Slowest | None = None,
    seconds: float | None = None,
    heard: Mapping[str, Facts] | None = None,
) -> RenderableType:
    """What ``muster check`` prints: what the hosts are, a row of findings each, the slowest link, and one line that
    sums it up."""
    parts: list[RenderableType] = [Padding(hosts(heard), (0, 0, 1, 0))] if heard else []
    parts += [_finding(finding) for finding in findings]
    if slowest:
        parts.append(Text.assemble(("slowest link  ", "dim"), str(slowest)))
    parts.append(Text(_sum(wanted, findings, seconds), style="bold" if findings else "bold green"))
    return Group(*parts)


def _finding(finding: Finding) -> RenderableType:
    style = STYLE[finding.severity]
    head = Text.assemble((f"{finding.severity:<8}", style), (finding.host, "bold"), "  ", finding.what)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for label, text in (("because", finding.because), ("try", finding.try_)):
        if text:
            rows.add_row(label, Text(text))
    return Group(head, Padding(rows, (0, 0, 1, 8)))


def _sum(wanted: Sequence[Wanted], findings: Sequence[Finding], seconds: float | None) -> str:
    took = f" ({seconds:.1f} s)" if seconds is not None else ""
    if not findings:
        return f"{len(wanted)} hosts are fit{took}"
    counts = {severity: sum(f.severity == severity for f in findings) for severity in ("error", "warning", "unknown")}
    plural = {"error": "errors", "warning": "warnings", "unknown": "unknown"}
    said = [f"{n} {severity if n == 1 else plural[severity]}" for severity, n in counts.items() if n]
    return f"{len(wanted)} hosts: {', '.join(said)}{took}"


def links(pairs: Pairs) -> Table:
    """Every pair with its figures and verdict, for ``--links``."""
    shown = Table(box=None, header_style="dim", padding=(0, 2))
    for column in ("from", "to", "link", "verdict"):
        shown.add_column(column)
    for link in sorted(pairs.links, key=lambda link: (link.a, link.b)):
        verdict = _verdict(link)
        shown.add_row(link.a, link.b, figures(link), Text(verdict, style=STYLE.get(verdict, "green")))
    return shown


def text(renderable: RenderableType, width: int = 120) -> str:
    """As plain text, for a log or a test."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as said:
        console.print(renderable)
    return said.get()
