"""Rules about pairs: can every task reach every port that it needs, which direction is cut, which link is slow, and
what does the slowest cost a step? What follows from a finding about a host is not said again for each of its peers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from muster.check.bridge import forwarded, unknown_outside
from muster.check.findings import LIMITS, Finding, Link, Reach, Severity, roles
from muster.check.view import View, listed


@dataclass(frozen=True)
class Fault:
    """A pair that does not work: ``host`` is the side to look at, or the sender of what gets lost."""

    host: str
    peer: str
    kind: str
    what: str
    because: str
    try_: str


def unreached(view: View, known: Sequence[Finding]) -> Iterator[Finding]:
    """One row per pair that cannot talk; one per host where it is the same with all its peers."""
    failed = [r for r in view.pairs.reaches if r.outcome != "ok" and not _explained(view, r, known)]
    by_pair: dict[tuple[str, str], list[Reach]] = {}
    for reach in failed:
        by_pair.setdefault((reach.need.src, reach.need.dst), []).append(reach)
    faults: dict[frozenset[str], Fault] = {}
    for (src, dst), reaches in by_pair.items():
        if not any(reach.need.task for reach in reaches):
            continue
        faults.setdefault(frozenset((src, dst)), _fault(view, src, dst, reaches, by_pair.get((dst, src), [])))
    yield from _collapsed(view, list(faults.values()))


def _explained(view: View, reach: Reach, known: Sequence[Finding]) -> bool:
    src, dst = reach.need.src, reach.need.dst
    if str(reach.need.bound or reach.need.port) in view.facts.get(dst, {}).get("listen", {}).get("errors", {}):
        return True  # it could not listen there, for a reason that has a row of its own
    loopback = any(f.host == dst and f.kind in ("loopback name", "address") for f in known)
    nameless = any(
        f.host == src and f.kind in ("name", "loopback name") and reach.need.address in f.what for f in known
    )
    return loopback or nameless


def _fault(view: View, src: str, dst: str, there: Sequence[Reach], back: Sequence[Reach]) -> Fault:
    if outside := unknown_outside(view, dst):
        return Fault(dst, src, "bridge", f"{src} cannot reach {dst}", *outside)
    outcomes = {reach.outcome for reach in there}
    ports = listed(sorted({f"{r.need.port} ({r.need.task})" for r in there if r.need.task}))
    if outcomes == {"timeout"}:
        return _silence(view, src, dst, ports, back)
    outcome = sorted(outcomes - {"timeout"})[0]
    said = OUTCOMES.get(outcome, (f"{outcome} when connecting", "look at the firewall between them"))
    because = next((r.because for r in there if r.because), "") or f"{said[0]}, port {ports}"
    try_ = forwarded(view, dst, [r.need.task for r in there]) or said[1]
    return Fault(dst, src, outcome, f"{src} cannot reach {dst}", because, try_)


OUTCOMES = {
    "refused": (
        "the connection was refused though the check listened there",
        "a firewall that rejects, or the address leads to another machine: look at both",
    ),
    "no_route": ("no route to it", "correct address, netmask or gateway on one of them; is it the right network?"),
    "no_name": ("its name is not known there", "add the name to /etc/hosts there, or use addresses"),
    "wrong": ("something else answers there", "a port forward, a proxy or another machine with the same address"),
    "late": ("no answer in time", "is the host overloaded? check again"),
}


def _silence(view: View, src: str, dst: str, ports: str, back: Sequence[Reach]) -> Fault:
    """A connection that timed out. Whoever heard the other's first packet shows which way still works."""
    if _heard(view, dst, by=src):
        return _one_way(view, dst, src, f"{dst} heard {src}, its answers never arrived (port {ports})")
    if _heard(view, src, by=dst):
        return _one_way(view, src, dst, f"{src} heard {dst}, its answers never arrived (port {ports} timed out)")
    if any(reach.outcome == "timeout" for reach in back):
        because = f"connections time out both ways, and neither hears the other (port {ports})"
        try_ = f"is there a network between {src} and {dst}? from {src}: ping {view.hosts[dst].address}"
        return Fault(src, dst, "cut", f"{src} and {dst} cannot talk at all", because, try_)
    works = f"{dst} reaches {src}, but " if _tested(view, dst, src) else ""
    because = f"{works}nothing arrives from {src} at port {ports} of {dst} (timed out)"
    try_ = forwarded(view, dst, list(view.hosts[dst].ports)) or _open(view, src, dst)
    return Fault(dst, src, "filtered", f"{src} cannot reach {dst}", because, try_)


def _one_way(view: View, sender: str, receiver: str, because: str) -> Fault:
    what = f"nothing that {sender} sends reaches {receiver}"
    try_ = f"let {_ip(view, sender, by=receiver)} through to {receiver}: its firewall, or a route that is missing"
    return Fault(sender, receiver, "cut one way", what, because, try_)


def _open(view: View, src: str, dst: str) -> str:
    ports = ",".join(str(port) for port in sorted(view.hosts[dst].ports.values()))
    return f"open the firewall on {dst}: ufw allow from {_ip(view, src, by=dst)} to any port {ports} proto tcp"


def _heard(view: View, host: str, by: str) -> bool:
    """Does ``host`` hold a connection half open that ``by`` began?"""
    return bool(set(view.facts.get(host, {}).get("half_open", [])) & set(_ips(view, by, host)))


def _ips(view: View, host: str, by: str) -> list[str]:
    """The plain addresses that ``by`` has for ``host``."""
    address = view.hosts[host].address
    found = view.facts.get(by, {}).get("names", {}).get("found", {}).get(address)
    return found if isinstance(found, list) else [address]


def _ip(view: View, host: str, by: str) -> str:
    return listed(_ips(view, host, by))


def _tested(view: View, src: str, dst: str) -> bool:
    return any(r.need.src == src and r.need.dst == dst and r.outcome == "ok" for r in view.pairs.reaches)


def _collapsed(view: View, faults: list[Fault]) -> Iterator[Finding]:
    everyone = _peers((r.need.src, r.need.dst) for r in view.pairs.reaches if r.need.task)
    blamed = blame([(fault.host, fault.peer) for fault in faults], everyone)
    told: set[str] = set()
    for fault in faults:
        host = blamed[frozenset((fault.host, fault.peer))]
        if not host:
            yield Finding("error", fault.host, fault.what, fault.because, fault.try_, kind=fault.kind, peer=fault.peer)
        elif host not in told:
            told.add(host)
            because = f"with {listed(sorted(everyone[host]))} alike: {fault.because}"
            yield Finding(
                "error", host, "the other hosts and it cannot reach each other", because, fault.try_, kind=fault.kind
            )


def blame(bad: Sequence[tuple[str, str]], everyone: Mapping[str, set[str]]) -> dict[frozenset[str], str]:
    """For each bad pair the host that it is put down to: one that has trouble with all its peers and explains most of
    what is not explained yet. "" for the pair itself; and where all pairs are bad it is the network and no host."""
    found = dict.fromkeys(map(frozenset, bad), "")
    if len(found) == sum(map(len, everyone.values())) // 2 and len(everyone) > 2:
        return found
    while True:
        left = _peers(pair for pair in bad if not found[frozenset(pair)])
        guilty = [
            host for host, peers in _peers(bad).items() if peers == everyone[host] and len(left.get(host, ())) > 1
        ]
        if not guilty:
            return found
        most = max(guilty, key=lambda host: len(left[host]))
        for pair in found:
            found[pair] = found[pair] or (most if most in pair else "")


def _peers(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for a, b in pairs:
        found.setdefault(a, set()).add(b)
        found.setdefault(b, set()).add(a)
    return found


# --- links


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one link: the worst severity and a text for each measure that is over its limit."""

    link: Link
    severity: Severity
    kinds: tuple[str, ...]


def slow(view: View) -> Iterator[Finding]:
    verdicts = [verdict for link in view.pairs.links if (verdict := judged(link))]
    everyone = _peers((link.a, link.b) for link in view.pairs.links)
    blamed = blame([(v.link.a, v.link.b) for v in verdicts], everyone)
    told: set[str] = set()
    for verdict in verdicts:
        host = blamed[frozenset((verdict.link.a, verdict.link.b))]
        if not host:
            yield _slow_row(view, verdict, verdict.link.a, verdict.link.b, "")
        elif host not in told:
            told.add(host)
            worst = max((v for v in verdicts if host in (v.link.a, v.link.b)), key=lambda v: step(view, v.link) or 0)
            yield _slow_row(view, worst, host, "", f"to {listed(sorted(everyone[host]))} alike; the worst: ")
    for link in view.pairs.links:
        if link.error:
            because, try_ = link.error, "check again; raise the time limit"
            yield Finding("unknown", link.a, f"the link to {link.b}", because, try_, kind="unmeasured", peer=link.b)


def judged(link: Link) -> Verdict | None:
    measures = {"rtt ms": trip(link), "loss": link.loss if link.segments >= 200 else None, "mbit": link.mbit}
    found = {name: severity for name, value in measures.items() if (severity := LIMITS[name].severity(value))}
    if not found:
        return None
    return Verdict(link, "error" if "error" in found.values() else "warning", tuple(found))


def agreed(looks: Sequence[Link]) -> Link:
    """What several measurements of one link say together. A busy host makes a link look slower and narrower than it is,
    and never faster: the best round trip and rates count. It also makes TCP send again what was not lost, in one look
    and hardly in the next: the middle loss counts, of two the smaller one. What is wrong with a link is so in each."""
    good = [look for look in looks if not look.error] or looks[:1]
    quick = min(good, key=lambda link: link.rtt_p50 if link.rtt_p50 is not None else inf)
    return replace(
        quick,
        loss_forth=_middle(look.loss_forth for look in good),
        loss_back=_middle(look.loss_back for look in good),
        segments=max(look.segments for look in good),
        mbit_forth=_most(look.mbit_forth for look in good),
        mbit_back=_most(look.mbit_back for look in good),
    )


SURE = 100  # pings, of which one would have found both ends awake


def doubtful(looks: Sequence[Link]) -> bool:
    """Is another look worth its seconds? Yes after one that found anything; after two, if they do not agree, or if it
    is the bandwidth alone, which needs the processors of both ends all the time. No, if even the fastest of many pings
    was too slow: nobody is busy for all of them."""
    if any(look.pings >= SURE and LIMITS["rtt ms"].severity(look.rtt_min) for look in looks):
        return False
    if len(looks) < 2:
        return any(judged(look) for look in looks)
    verdict = judged(agreed(looks))
    if len(looks) > 2 or any(look.error for look in looks):
        return False
    return verdict.kinds == ("mbit",) if verdict else judged(looks[-1]) is not None


def _middle(shares: Iterable[float | None]) -> float | None:
    known = sorted(share for share in shares if share is not None)
    return known[(len(known) - 1) // 2] if known else None


def _most(rates: Iterable[float | None]) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)


def trip(link: Link) -> float | None:
    """The network's share of the round trip. Where the fastest ping is many times faster than the middle one, the rest
    is a busy host and not the link."""
    if link.rtt_p50 is None or link.rtt_min is None:
        return link.rtt_p50
    return link.rtt_p50 if link.rtt_min * 4 >= link.rtt_p50 else link.rtt_min


REMEDIES = {
    "loss": "replace the cable or port, look for a duplex mismatch (ethtool, ip -s link)",
    "rtt ms": "are both in one place? is traffic going through a VPN, Wi-Fi or another site (traceroute)?",
    "mbit": "look at the card's speed (ethtool: 100baseT?), the switch, and who else uses the link",
}


def _slow_row(view: View, verdict: Verdict, host: str, peer: str, which: str) -> Finding:
    link = verdict.link
    remedy = next(REMEDIES[kind] for kind in REMEDIES if kind in verdict.kinds)
    cost = step(view, link)
    because = which + figures(link) + (f"; {_cost(view, cost)}" if cost else "")
    words = {"rtt ms": "slow to answer", "loss": "losing packets", "mbit": "narrow"}
    said = listed([words[kind] for kind in verdict.kinds])
    what = f"the link to {peer} is {said}" if peer else f"all its links are {said}"
    return Finding(verdict.severity, host, what, because, remedy, kind="link", peer=peer)


def figures(link: Link) -> str:
    """ "0.1 ms (p99 0.3), 940 Mbit/s, no loss"."""
    parts = []
    if link.rtt_p50 is not None:
        parts.append(f"{link.rtt_p50:.3g} ms round trip (p99 {link.rtt_p99:.3g})")
    if link.mbit is not None:
        parts.append(f"{link.mbit:,.0f} Mbit/s" if link.mbit >= 10 else f"{link.mbit:.2g} Mbit/s")
    if link.segments:
        ways = [(link.a, link.b, link.loss_forth), (link.b, link.a, link.loss_back)]
        lost = [f"{loss:.1%} lost from {a} to {b}" for a, b, loss in ways if loss]
        parts.append(" and ".join(lost) if lost else "no loss")
    return ", ".join(parts) or link.error


def _cost(view: View, seconds: float) -> str:
    size = f"{view.job.parameters:,} parameters"
    return f"a step of a model of {size} takes {_time(seconds)} over it"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.995 else f"{seconds * 1000:.3g} ms"


def step(view: View, link: Link) -> float | None:
    """Seconds that one step's exchange takes over ``link``: a round trip, and the bytes each way.

    With ps: gradients of one ps' part up, its values down. In a ring of n: 2 (n - 1) / n of all gradients each way.
    """
    if link.rtt_p50 is None or not link.mbit_forth or not link.mbit_back:
        return None
    size = view.job.parameters * 4.0
    workers = sum(1 for w in view.wanted if roles(w) - {"ps", "evaluator"})
    if view.job.engine == "tensorflow" and view.job.kind == "mwms":
        share = size * 2 * (workers - 1) / max(1, workers)
        return 2 * (workers - 1) * link.rtt_p50 / 2000 + share * 8 / ((link.mbit or 1) * 1e6)
    ps = len({task for w in view.wanted for task in (*w.tasks, *w.ports) if task.startswith("ps/")})
    return link.rtt_p50 / 1000 + size / max(1, ps) * 8 * (1 / link.mbit_forth + 1 / link.mbit_back) / 1e6


@dataclass(frozen=True)
class Slowest:
    """The link that sets the pace, with the seconds of a step over it and over the middle one of all links."""

    link: Link
    seconds: float
    usual: float
    parameters: int

    def __str__(self) -> str:
        pace = f"a step of a model of {self.parameters:,} parameters takes at least {_time(self.seconds)} over it"
        usual = f" ({_time(self.usual)} over the middle one)" if self.usual < self.seconds else ""
        return f"{self.link.a} - {self.link.b}: {figures(self.link)}; {pace}{usual}"


def slowest_link(view: View) -> Slowest | None:
    timed = sorted(((s, link) for link in view.pairs.links if (s := step(view, link))), key=lambda pair: pair[0])
    if not timed:
        return None
    return Slowest(timed[-1][1], timed[-1][0], timed[(len(timed) - 1) // 2][0], view.job.parameters)


def misheard(view: View) -> Iterator[Finding]:
    """Hosts that answered at first and then fell silent."""
    for host in view.answered:
        if view.facts[host].get("broke_off"):
            because, try_ = view.facts[host]["broke_off"], "check again; is that host overloaded or its link shaky?"
            yield Finding("error", host, "stopped answering during the check", because, try_, kind="broke off")


RULES: tuple[Callable[[View], Iterator[Finding]], ...] = (misheard, slow)
