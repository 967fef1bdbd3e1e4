"""Asks all hosts: first each alone, so that one that hangs costs its own answers only; then the pairs.

Nothing here judges. Everything has a time limit, and the whole has one: what was not measured by then is left for the
verdict to call unknown. Pairs are measured two at a time only where they share no host, so that a link is never slow
because of its own check.
"""

import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from muster.check.channel import Channel, ChannelBroken
from muster.check.findings import Job, Link, Need, Pairs, Reach, Wanted, dialled, needs
from muster.check.network import agreed, doubtful
from muster.check.unreachable import ssh_verdict

Opener = Callable[[Wanted], Channel]
Answers = dict[str, dict[str, Any]]
Progress = Callable[[str], None]
Turn = Callable[[str], AbstractContextManager[None]]

ALONE, CONNECT, MEASURE = 20.0, 3.0, 10.0  # seconds for: one host's facts, one connection, one link
MORE_LOOKS = 12.0  # seconds for measuring doubtful links again
AGAIN = (0.5, 1.5, 4.0, 4.0, 8.0)  # seconds to wait before asking an sshd again that was too busy


@dataclass
class Survey:
    """What was heard: ``facts`` by host and ``pairs``, both as ``verdicts.judge`` takes them."""

    facts: Answers = field(default_factory=dict)
    pairs: Pairs = field(default_factory=Pairs)

    def json(self) -> str:
        """For a recorded check: tests and bug reports start from it."""
        return json.dumps({"facts": self.facts, "pairs": asdict(self.pairs)}, indent=1)


def survey(
    wanted: Sequence[Wanted],
    opener: Opener,
    job: Job | None = None,
    *,
    pairs: bool = True,
    measure: bool = True,
    within: float = 60.0,
    progress: Progress = lambda text: None,
    turn: Turn = lambda host: nullcontext(),
) -> Survey:
    """Asks every host of ``wanted`` through ``opener(wanted)``, at most ``within`` seconds. ``pairs=False``: each
    alone; ``measure=False``: who reaches whom, and no more. ``turn(host)`` is held while a login is under way."""
    round_ = _Round(list(wanted), job or Job(), time.monotonic() + within, progress, turn)
    try:
        round_.alone(opener)
        round_.folders()
        if pairs:
            round_.listen()
            round_.reach()
            if measure:
                round_.measure()
    finally:
        round_.end()
    return Survey(round_.facts, Pairs(tuple(round_.reaches), tuple(round_.links)))


class _Round:
    """One check under way. A host that stops answering is dropped from what follows."""

    def __init__(self, wanted: list[Wanted], job: Job, until: float, progress: Progress, turn: Turn) -> None:
        self.wanted, self.job, self.until, self.progress, self.turn = wanted, job, until, progress, turn
        self.token = secrets.token_hex(16)
        self.opened: list[Channel] = []
        self.over, self.lock = False, threading.Lock()
        self.channels: dict[str, Channel] = {}  # those that still answer
        self.facts: Answers = {}
        self.reaches: list[Reach] = []
        self.links: list[Link] = []

    # --- each alone

    def alone(self, opener: Opener) -> None:
        self.progress(f"asking {len(self.wanted)} hosts")
        names = dialled(self.wanted)
        _at_once([lambda w=w: self._first(w, opener, names) for w in self.wanted])  # type: ignore[misc]

    def _first(self, w: Wanted, opener: Opener, names: list[str]) -> None:
        """Facts of one host. An sshd that was only too busy is asked again, its limit is on logins at one moment."""
        request = {
            "ask": "facts",
            "names": names,
            "ports": w.listens(),
            "cwd": w.cwd,
            "script": w.script,
            "checkpoints": w.checkpoints,
            "env": dict(w.env),
        }
        for pause in (*AGAIN, None):
            try:
                with self.turn(w.host):
                    channel = self._open(w, opener)
                    channel.ask({"ask": "clock"}, min(ALONE, self._left()))  # it has let us in
                facts = channel.ask(request, min(ALONE, self._left()))
                # Asked again by itself: the first answer took as long as a login and all the rest of the facts.
                sent = time.time()
                facts["clock"] = channel.ask({"ask": "clock"}, min(ALONE, self._left()))
            except ChannelBroken as broken:
                channel.close()
                self.facts[w.host] = {"failure": {"returncode": broken.returncode, "stderr": broken.stderr}}
                busy = ssh_verdict(broken.stderr, broken.returncode).kind == "busy sshd"
                if not busy or pause is None or self._left() < pause:
                    return
                time.sleep(pause * random.uniform(0.5, 1.5))  # or all who were refused come back together
            else:
                self.facts[w.host] = {**facts, "asked": [sent, time.time()]}
                self.channels[w.host] = channel
                return

    def _open(self, w: Wanted, opener: Opener) -> Channel:
        """A channel that ``end`` closes, also when the check is broken off at this very moment."""
        channel = opener(w)
        with self.lock:
            self.opened.append(channel)
            over = self.over
        if over:
            channel.close()
        return channel

    def _left(self) -> float:
        return max(0.1, self.until - time.monotonic())

    # --- a folder is shared if a file written by one is seen by the others

    def folders(self) -> None:
        hosts = [w for w in self._fit() if w.checkpoints and _there(self.facts[w.host].get("checkpoints"))]
        if len(hosts) < 2:
            return
        self.progress(f"is the checkpoint folder shared by {len(hosts)} hosts?")
        self.marks = {w.host: f".muster-check-{self.token[:8]}-{index}" for index, w in enumerate(hosts)}
        every = list(self.marks.values())
        self._nonce(hosts, "write", lambda host: [self.marks[host]])
        self._nonce(hosts, "read", lambda host: every)
        self._nonce(hosts, "remove", lambda host: [self.marks[host]])

    def _nonce(self, hosts: list[Wanted], do: str, marks: Callable[[str], list[str]]) -> None:
        where = {w.host: w.checkpoints for w in hosts}
        answers = self.each(
            {
                h: {"ask": "nonce", "do": do, "checkpoints": where[h], "marks": marks(h)}
                for h in where
                if h in self.channels
            }
        )
        owner = {mark: host for host, mark in self.marks.items()}
        for host, answer in answers.items():
            done = answer.get("done", {})
            nonce = self.facts[host].setdefault("nonce", {})
            if answer.get("broken") or done.get("late"):
                nonce["late"] = True
            elif do == "write":
                nonce["write"] = done[self.marks[host]]
            elif do == "read":
                nonce["read"] = {owner[mark]: said for mark, said in done.items()}

    # --- pairs

    def listen(self) -> None:
        asked = {w.host: {"ask": "listen", "token": self.token, "ports": w.listens()} for w in self._fit() if w.ports}
        for host, answer in self.each(asked).items():
            self.facts[host]["listen"] = answer

    def reach(self) -> None:
        able = {w.host for w in self._fit()}
        needed = [need for need in needs(self.wanted, self.job) if need.src in able and self._listens(need)]
        self.progress(f"{len(needed)} connections")
        self._reach_all(needed)
        if any(reach.outcome == "timeout" for reach in self.reaches):
            self._which_way()

    def _which_way(self) -> None:
        """A connection that timed out was lost on its way there or on its way back. Each side says whom it heard; a
        side that nobody had reason to dial gets a port for it, and is dialled."""
        tried = {(r.need.src, r.need.dst) for r in self.reaches}
        lost = {(r.need.dst, r.need.src) for r in self.reaches if r.outcome == "timeout"} - tried
        address = {w.host: w.address for w in self.wanted}
        towards = {dst: {"ask": "spare", "token": self.token, "towards": address[src]} for src, dst in sorted(lost)}
        spares = {dst: answer for dst, answer in self.each(towards).items() if "port" in answer}
        needed = [Need(src, dst, "", spares[dst]["address"], spares[dst]["port"]) for src, dst in lost if dst in spares]
        self._reach_all(needed)
        for host, answer in self.each({host: {"ask": "half_open"} for host in self.channels}).items():
            self.facts[host]["half_open"] = answer.get("from", [])

    def _reach_all(self, needed: list[Need]) -> None:
        by_src: dict[str, list[Need]] = {}
        for need in needed:
            by_src.setdefault(need.src, []).append(need)
        answers = self.each({src: self._dial(these) for src, these in by_src.items()}, CONNECT + 5)
        for src, these in by_src.items():
            self.reaches += [_reach(need, answers[src].get(need.id)) for need in these if src in answers]

    def _dial(self, these: list[Need]) -> dict[str, Any]:
        targets = [{"id": need.id, "address": need.address, "port": need.port} for need in these]
        return {"ask": "reach", "token": self.token, "within": CONNECT, "targets": targets}

    def _listens(self, need: Need) -> bool:
        told = self.facts.get(need.dst, {}).get("listen")
        return told is not None and str(need.bound or need.port) not in told.get("errors", {})

    def measure(self) -> None:
        """Each pair of hosts once, from the side that gets through."""
        pending: dict[frozenset[str], Need] = {}
        for reach in self.reaches:
            if reach.outcome == "ok" and reach.need.task:
                pending.setdefault(frozenset((reach.need.src, reach.need.dst)), reach.need)
        self.progress(f"measuring {len(pending)} links")
        waiting, busy, changed = list(pending.values()), set[str](), threading.Condition()

        def work() -> None:
            while need := _take(waiting, busy, changed):
                try:
                    self.links.append(self._link(need))
                    if self.links[-1].error:  # a host that died meanwhile is not waited for in all its pairs
                        self.each({need.dst: {"ask": "clock"}}, CONNECT)
                finally:
                    with changed:
                        busy.difference_update((need.src, need.dst))
                        changed.notify_all()

        _at_once([work] * max(1, len(self.channels) // 2))
        self._more_looks(pending)

    def _more_looks(self, needed: Mapping[frozenset[str], Need]) -> None:
        """A link that looks bad is measured again, longer and while nothing else runs: a fault stays, a busy moment
        does not. Few links, and not for long: where most are bad it is the network, and there is nothing to doubt."""
        until = time.monotonic() + MORE_LOOKS
        for index, link in enumerate(self.links):
            looks = [link]
            while doubtful(looks) and time.monotonic() < until:
                self.progress(f"{link.a} - {link.b} once more")
                looks.append(self._link(needed[frozenset((link.a, link.b))], patient=True))
            self.links[index] = agreed(looks)

    def _link(self, need: Need, patient: bool = False) -> Link:
        within = min(MEASURE, self._left() - 2)
        if within < 1 or not {need.src, need.dst} <= set(self.channels):
            return Link(need.src, need.dst, error="time was up" if within < 1 else "no answer")
        target = {"address": need.address, "port": need.port}
        request = {"ask": "measure", "token": self.token, "target": target, "within": within, "patient": patient}
        answer = self.each({need.src: request}, within + 4).get(need.src, {"error": "no answer"})
        return _measured(need, answer)

    def each(self, requests: Mapping[str, dict[str, Any]], within: float = 8.0) -> Answers:
        """Asks these hosts at the same time. A host that fails is missing in the answer, and is not asked again."""
        answers: Answers = {}

        def one(host: str) -> None:
            try:
                answers[host] = self.channels[host].ask(requests[host], min(within, self._left() + 2))
            except ChannelBroken as broken:
                self.facts[host]["broke_off"] = str(broken)
                self.channels.pop(host).close()

        _at_once([lambda host=host: one(host) for host in requests if host in self.channels])  # type: ignore[misc]
        return answers

    def _fit(self) -> list[Wanted]:
        """Hosts that still answer, with a Python that can take part."""
        return [w for w in self.wanted if w.host in self.channels and not self.facts[w.host].get("too_old")]

    def end(self) -> None:
        with self.lock:
            self.over, opened = True, list(self.opened)
        _at_once([channel.close for channel in opened])


def _take(waiting: list[Need], busy: set[str], changed: threading.Condition) -> Need | None:
    """The next pair whose hosts are both free; waits for one; None when all are taken."""
    with changed:
        while waiting:
            for need in waiting:
                if not busy & {need.src, need.dst}:
                    waiting.remove(need)
                    busy.update((need.src, need.dst))
                    return need
            changed.wait()
        return None


def _at_once(calls: Iterable[Callable[[], None]]) -> None:
    work = list(calls)
    if not work:
        return
    pool = ThreadPoolExecutor(len(work))
    try:
        for future in [pool.submit(call) for call in work]:
            future.result()
    finally:  # after Ctrl-C nobody waits for a host that hangs: ``end`` closes its channel, and its thread ends
        pool.shutdown(wait=False, cancel_futures=True)


def _ports(w: Wanted) -> list[tuple[str, str, int]]:
    return [(task, w.address, port) for task, port in w.ports.items()]


def _there(told: Any) -> bool:
    return isinstance(told, dict) and bool(told.get("exists"))


def _reach(need: Need, answer: dict[str, Any] | None) -> Reach:
    if answer is None or answer.get("late") or answer.get("broken"):
        return Reach(need, "late", str((answer or {}).get("broken", "")))
    tried = answer.get("tried", {})
    told = ", ".join(f"{where} {outcome}" for where, outcome in tried.items()) if len(tried) > 1 else ""
    return Reach(need, answer["outcome"], answer.get("because") or told)


def _measured(need: Need, answer: dict[str, Any]) -> Link:
    if "rtt_ms" not in answer:
        return Link(need.src, need.dst, error=str(answer.get("error") or answer.get("broken")))
    rtt, loss, mbit = answer["rtt_ms"], answer["loss"], answer["mbit"]
    return Link(
        need.src,
        need.dst,
        rtt_p50=rtt["p50"],
        rtt_p99=rtt["p99"],
        rtt_min=rtt["min"],
        pings=rtt["pings"],
        loss_forth=_share(loss["forth"]),
        loss_back=_share(loss["back"]),
        segments=loss["forth"]["sent"],
        mbit_forth=mbit["forth"],
        mbit_back=mbit["back"],
    )


def _share(counts: Mapping[str, int]) -> float | None:
    return counts["lost"] / counts["sent"] if counts["sent"] else None
