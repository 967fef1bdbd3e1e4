"""The findings as a table for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.check.findings import Finding, Link, Pairs, Wanted
from muster.check.network import Slowest, figures, judged

STYLE = {"error": "bold red", "warning": "yellow", "unknown": "cyan"}


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything stands in the way of a run."""
    return int(any(finding.severity == "error" for finding in findings))


def as_json(findings: Sequence[Finding], pairs: Pairs | None = None, slowest: Slowest | None = None) -> str:
    told = {
        "ok": not exit_code(findings),
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


def table(
    wanted: Sequence[Wanted], findings: Sequence[Finding], slowest: Slowest | None = None, seconds: float | None = None
) -> RenderableType:
    """What ``muster check`` prints: a row of findings each, the slowest link, and one line that sums it up."""
    parts: list[RenderableType] = [_finding(finding) for finding in findings]
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
    """Every pair with its figures and verdict, for ``--verbose``."""
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
