"""When a gradient is applied and when its worker is answered: the one place where the modes differ.

Pure: no sockets, no arrays, no clock. Facts come in (a worker joins, leaves, pauses, pushes), effects go out (apply
these gradients as one update, answer this worker). Three ideas carry it:

*A number is the worker's own.* A push says which round it belongs to (sync) or how many steps its worker has done
(bounded), the same number to every ps, and it takes no part in anything earlier. So two ps never disagree about where a
worker is, and workers that wait at one ps for somebody who waits at another cannot come about. Someone who joins asks
every ps and begins with the largest number that it was told.

*A round never waits for somebody who will not come.* It is complete when every active worker that owes it a gradient
has sent one; every change of membership asks again. A gradient that comes after its round was closed is dropped and
counted, and its worker is answered at once with the values that it missed.

*A push is applied once.* Each has a number; a number that was seen is answered and not applied, and a new incarnation
of a worker withdraws what the old one had not yet brought into a closed round.

With clipping by a norm that spans several ps (``exchange``), a complete round is closed but not applied: every ps tells
its sums of squares to its workers, any worker adds them up and tells every ps the factors, and the first to do so
has the round applied. Whoever dies in between, another one completes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from muster.errors import Refused


class Phase(Enum):
    IDLE = "idle"  # known, but takes no part yet
    ACTIVE = "active"
    VALIDATING = "validating"
    DONE = "done"  # out of data
    GONE = "gone"  # its connection ended


class Apply(NamedTuple):
    """Apply the gradients of ``tasks``, averaged by samples in this order, as one update."""

    tasks: tuple[str, ...]


class Answer(NamedTuple):
    """Answer, with the present values where they were asked for. ``late``: its gradient was dropped."""

    task: str
    late: bool = False


class Sums(NamedTuple):
    """Send the sums of squares of the round that is closed and not applied (or was the last to be applied)."""

    task: str


class Forget(NamedTuple):
    """The gradient of ``task`` will not be applied."""

    task: str


Effect = Apply | Answer | Sums | Forget


@dataclass
class Staleness:
    """Updates between a worker's pull and the moment its gradient was applied, its own unseen ones included."""

    count: int = 0
    total: int = 0
    largest: int = 0
    last: int = 0

    def saw(self, stale: int) -> None:
        self.count, self.total, self.last = self.count + 1, self.total + stale, stale
        self.largest = max(self.largest, stale)


@dataclass
class Member:
    task: str
    attempt: int = 0
    phase: Phase = Phase.IDLE
    at: int = 0  # the round or step that it owes next
    push: int = 0  # the last push number that came in whole
    pulled: int = 0  # the version that it was last sent
    applied: int = 0
    dropped: int = 0
    late: bool = False  # its last gradient was dropped
    repeated: int = 0
    ahead: int = 0  # the most steps that it was ahead of the slowest
    staleness: Staleness = field(default_factory=Staleness)

    def told(self) -> dict[str, Any]:
        stale = self.staleness
        return {
            "attempt": self.attempt, "phase": self.phase.value, "at": self.at, "applied": self.applied,
            "dropped": self.dropped, "repeated": self.repeated, "ahead": self.ahead, "staleness": stale.last,
            "staleness_mean": stale.total / stale.count if stale.count else 0.0, "staleness_max": stale.largest,
        }  # fmt: skip


class Updates:
    """What every mode shares: who is here, what was seen. This class itself is *async*: applied as they come."""

    mode = "async"
    exchange = False
    round = 0  # sync: the round that is being collected
    closed: tuple[str, ...] = ()  # sync: whose gradients make up the round that is closed and not yet applied

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.version = 0  # updates applied: the global step on ps 0

    # --- facts

    def enter(self, task: str, attempt: int) -> list[Effect]:
        """A task has connected. Raises Refused for an incarnation older than one that was here."""
        member = self.members.setdefault(task, Member(task))
        if attempt < member.attempt:
            raise Refused(
                f"{task} attempt {attempt} is over", because=f"attempt {member.attempt} of it has been here since"
            )
        if attempt == member.attempt:
            return []
        effects = self._withdraw(task)
        member.attempt, member.push, member.phase, member.pulled = attempt, 0, Phase.IDLE, self.version
        return effects + self._settle()

    def join(self, task: str, at: int | None = None) -> tuple[int, list[Effect]]:
        """From now on ``task`` takes part, with the number that is returned or a later one.

        ``at`` is the largest number that it was given elsewhere. The worker brings the largest of all to each ps with
        its first pull, and is then owed nothing, and owes nothing, before that.
        """
        member = self.members[task]
        member.at = max(self._first(member), 0 if at is None else at)
        member.phase = Phase.ACTIVE
        return member.at, self._settle()

    def turn(self, task: str, phase: Phase) -> list[Effect]:
        """``task`` validates, is out of data, or is gone: nobody waits for it."""
        member = self.members.get(task)
        if member is None or member.phase is phase:
            return []
        member.phase = phase
        return self._settle()

    def push(self, task: str, number: int, at: int) -> list[Effect]:
        """A gradient came in whole."""
        member = self.members[task]
        if number <= member.push:
            member.repeated += 1
            return self._again(member, at)
        member.push = number
        return self._take(member, at)

    def factors(self, task: str, at: int) -> list[Effect]:
        """``task`` has told the factors for round ``at``."""
        return [self._answer(self.members[task])]

    def closes(self, at: int) -> bool:
        """Whether ``at`` is the round that is closed and waits for factors."""
        return False

    def pull(self, task: str, at: int) -> list[Effect]:
        """``task`` asks for the values as they are at the beginning of round ``at``."""
        return [self._answer(self.members[task])]

    def sent(self, task: str) -> None:
        """``task`` gets the present values with its answer; who only pushes goes on with older ones."""
        self.members[task].pulled = self.version

    def clear(self) -> None:
        """A new layout: everybody joins again."""
        for member in self.members.values():
            member.phase, member.at = Phase.IDLE, 0

    # --- questions

    def active(self) -> list[Member]:
        return [member for member in self.members.values() if member.phase is Phase.ACTIVE]

    def next_for(self, task: str) -> int:
        return self.members[task].at

    def waits(self) -> tuple[set[str], set[str]]:
        """Who waits for an answer, and for whom."""
        return set(), set()

    # --- the rule

    def _first(self, member: Member) -> int:
        return self.version

    def _take(self, member: Member, at: int) -> list[Effect]:
        applied = self._applied(member.task)
        member.at = self.version
        return [applied, self._answer(member)]

    def _again(self, member: Member, at: int) -> list[Effect]:
        return [self._answer(member)]

    def _withdraw(self, task: str) -> list[Effect]:
        return []

    def _settle(self) -> list[Effect]:
        return []

    # --- shared

    def _applied(self, *tasks: str) -> Apply:
        for task in tasks:
            member = self.members[task]
            member.applied += 1
            member.staleness.saw(max(0, self.version - member.pulled))
        self.version += 1
        return Apply(tasks)

    def _answer(self, member: Member, late: bool = False) -> Answer:
        return Answer(member.task, late)


Async = Updates


class Bounded(Updates):
    """Applied as they come, but nobody starts a step more than ``bound`` steps ahead of the slowest active worker."""

    mode = "bounded"

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound
        self.held: set[str] = set()

    def _first(self, member: Member) -> int:
        others = [other.at for other in self.members.values() if other is not member]
        active = [other.at for other in self.active() if other is not member]
        return max(min(active) if active else max(others, default=0), member.at if not active else 0)

    def _take(self, member: Member, at: int) -> list[Effect]:
        applied = self._applied(member.task)
        member.ahead = max(member.ahead, at - self._slowest(at))
        member.at = at + 1
        self.held.add(member.task)
        return [applied, *self._settle()]

    def _again(self, member: Member, at: int) -> list[Effect]:
        return [] if member.task in self.held else [self._answer(member)]

    def _withdraw(self, task: str) -> list[Effect]:
        self.held.discard(task)
        return []

    def _slowest(self, at: int) -> int:
        return min((member.at for member in self.active()), default=at)

    def _settle(self) -> list[Effect]:
        free = [task for task in sorted(self.held) if self._may(self.members[task])]
        self.held.difference_update(free)
        return [self._answer(self.members[task]) for task in free]

    def _may(self, member: Member) -> bool:
        return member.at - self._slowest(member.at) <= self.bound

    def clear(self) -> None:
        super().clear()
        self.held.clear()

    def waits(self) -> tuple[set[str], set[str]]:
        slowest = min((member.at for member in self.active()), default=0)
        return set(self.held), {member.task for member in self.active() if member.at == slowest} - self.held


class Sync(Updates):
    """A round takes one gradient from each active worker and applies their average once.

    With ``spare``, the first ``workers - spare`` close it.
    """

    mode = "sync"

    def __init__(self, workers: int, spare: int = 0, exchange: bool = False) -> None:
        super().__init__()
        self.enough = max(1, workers - spare) if spare else 0  # 0: all of them
        self.exchange = exchange
        self.parts: dict[str, int] = {}  # whose gradient is here, and for which round
        self.closed = ()
        self.waiting: set[str] = set()
        self.pulls: dict[str, int] = {}

    def _first(self, member: Member) -> int:
        if member.phase is Phase.ACTIVE:  # back after a broken connection: the round waits for it still
            return max(member.at, self.round)
        begun = bool(self.parts) or any(other.at > self.round for other in self.active())
        return self.round + 1 if begun else self.round

    def _take(self, member: Member, at: int) -> list[Effect]:
        member.late = at < self.round
        if member.late:
            member.dropped += 1
            return [Forget(member.task), *self._missed(member, at)]
        self.parts[member.task] = member.at = at
        self.waiting.add(member.task)
        return self._settle()

    def _missed(self, member: Member, at: int) -> list[Effect]:
        """Late by one round, its worker still helps to complete that round, for those who could may be gone."""
        if self.exchange and at == self.round - 1:
            return [Sums(member.task)]
        member.at = self.round
        return [self._answer(member, late=True)]

    def _again(self, member: Member, at: int) -> list[Effect]:
        if member.task in self.waiting:
            return []
        if self.exchange and at == self.round - 1:
            return [Sums(member.task)]
        return [self._answer(member, member.late)]

    def _withdraw(self, task: str) -> list[Effect]:
        self.waiting.discard(task)
        self.pulls.pop(task, None)
        return [Forget(task)] if self.parts.pop(task, None) is not None else []

    def _settle(self) -> list[Effect]:
        effects: list[Effect] = self._abandon()
        while self._complete():
            effects += self._close()
        return effects + self._pulled()

    def _abandon(self) -> list[Effect]:
        """All whose gradients make up the closed round are gone, so nobody will tell the factors."""
        if any(member.task in self.closed for member in self.active()):
            return []
        lost, self.closed = self.closed, ()
        for task in lost:
            self.members[task].dropped += 1
            self.members[task].late = True
        return [Forget(task) for task in lost]

    def _complete(self) -> bool:
        if self.closed:
            return False
        owing = [m for m in self.active() if m.at <= self.round and m.task not in self.parts]
        here = [task for task, at in self.parts.items() if at == self.round]
        if not here and not owing:
            return self._skip()
        return bool(here) and (not owing or 0 < self.enough <= len(here))

    def _skip(self) -> bool:
        """Nobody is left who could fill this round: go on to the first that somebody is in."""
        ahead = [*self.parts.values(), *(m.at for m in self.active()), *self.pulls.values()]
        later = min((at for at in ahead if at > self.round), default=self.round)
        moved, self.round = later > self.round, later
        return moved and self._complete()

    def _close(self) -> list[Effect]:
        tasks = tuple(sorted((task for task, at in self.parts.items() if at == self.round), key=_place))
        for task in tasks:
            del self.parts[task]
        self.round += 1
        if self.exchange:
            self.closed = tasks
            answered, self.waiting = self.waiting & set(tasks), self.waiting - set(tasks)
            return [Sums(task) for task in sorted(answered)]
        return self._finish(tasks)

    def _finish(self, tasks: tuple[str, ...]) -> list[Effect]:
        effects: list[Effect] = [self._applied(*tasks)]
        for task in sorted(self.waiting & set(tasks)):
            self.members[task].at = self.round
            effects.append(self._answer(self.members[task]))
        self.waiting.difference_update(tasks)
        return effects

    def factors(self, task: str, at: int) -> list[Effect]:
        """Those for a round before the one that is closed now say nothing: theirs was applied long ago.

        Their worker is answered all the same: another ps may have a round that waits for it.
        """
        effects: list[Effect] = []
        if self.closes(at):
            effects, self.closed = self._finish(self.closed), ()
        member = self.members[task]
        member.at = max(member.at, self.round)
        return [*effects, self._answer(member, member.late), *self._settle()]

    def closes(self, at: int) -> bool:
        return bool(self.closed) and at == self.round - 1

    def pull(self, task: str, at: int) -> list[Effect]:
        self.pulls[task] = at
        self.members[task].at = max(self.members[task].at, at)
        return self._settle()

    def _pulled(self) -> list[Effect]:
        ready = [task for task, at in self.pulls.items() if at <= self.round and not (self.closed and at == self.round)]
        for task in ready:
            del self.pulls[task]
        return [self._answer(self.members[task]) for task in ready]

    def clear(self) -> None:
        super().clear()
        self.round = self.version
        self.parts, self.closed, self.waiting, self.pulls = {}, (), set(), {}
        for member in self.members.values():
            member.at = self.round

    def waits(self) -> tuple[set[str], set[str]]:
        owing = {m.task for m in self.active() if m.at <= self.round and m.task not in self.parts}
        return self.waiting | set(self.pulls), owing


def _place(task: str) -> tuple[str, int]:
    role, _, index = task.partition("/")
    return role, int(index) if index.isdigit() else 0


def updates(mode: str, workers: int, spare: int = 0, bound: int | None = None, exchange: bool = False) -> Updates:
    """The rule for a mode of the run. Raises Refused for a mode that there is not."""
    if mode == "async":
        return Async()
    if mode == "sync":
        return Sync(workers, spare, exchange)
    if mode == "bounded":
        return Bounded(1 if bound is None else bound)
    raise Refused(f"There is no mode called {mode}", try_="use async, sync or bounded")
