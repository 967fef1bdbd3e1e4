"""From what the hosts answered to what a person should read. No I/O: the same answers always give the same rows."""

from collections.abc import Mapping, Sequence

from muster.check import fitness, network
from muster.check.findings import Facts, Finding, Job, Link, Need, Pairs, Reach, Wanted, needs
from muster.check.network import Slowest
from muster.check.unreachable import Failure, ssh_verdict
from muster.check.view import View

__all__ = [
    "Failure",
    "Finding",
    "Job",
    "Link",
    "Need",
    "Pairs",
    "Reach",
    "Slowest",
    "Wanted",
    "judge",
    "needs",
    "slowest",
    "ssh_verdict",
]

ORDER = ("error", "unknown", "warning")


def judge(
    wanted: Sequence[Wanted], facts_by_host: Mapping[str, Facts], pairs: Pairs | None = None, job: Job | None = None
) -> list[Finding]:
    """All findings, errors first, then by host in the order of the plan. Empty: the cluster is fit."""
    view = View(wanted, facts_by_host, pairs or Pairs(), job or Job())
    found = [finding for rule in fitness.RULES for finding in rule(view)]
    found += network.unreached(view, found)
    found += [finding for rule in network.RULES for finding in rule(view)]
    place = {w.host: index for index, w in enumerate(wanted)}
    return sorted(found, key=lambda f: (ORDER.index(f.severity), place.get(f.host, len(place))))


def slowest(wanted: Sequence[Wanted], pairs: Pairs, job: Job | None = None) -> Slowest | None:
    """The link that sets the pace of a step; None where none was measured both ways."""
    return network.slowest_link(View(wanted, {}, pairs, job or Job()))
