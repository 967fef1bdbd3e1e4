"""Requests to the ps, all under way at once, and each repeated until it is answered.

A connection that breaks is made again, and whoever uses it is told (``met``) so that it can be to this ps what it was;
then the same request goes out again. A ps applies a push once however often it comes, since pushes carry numbers.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from muster.errors import RunFailed
from muster.ps import wire
from muster.ps.link import Identity, Link, Place
from muster.ps.wire import WireError

NOTICE_AFTER = 5.0  # seconds


class Exchange:
    """``patience``: seconds that a ps may be away before RunFailed is raised. ``notice`` is told whom we wait for.

    ``met`` is called whenever a connection has been made, with ``welcome`` of its link set.
    """

    def __init__(
        self,
        places: Sequence[Place],
        who: Identity,
        met: Callable[[Link], None],
        patience: float,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.who, self.met, self.patience, self.notice, self.clock = who, met, patience, notice, clock
        self.links = [Link(place, who) for place in places]

    def connect(self) -> None:
        for link in self.links:
            self._dial(link)

    def _dial(self, link: Link) -> None:
        link.dial(self.clock() + self.patience, self.clock)
        self.met(link)

    def _back(self, link: Link, error: Exception) -> bool:
        """Connect again after ``error``. What ``met`` asks must not take the place of what was under way.

        False where the ps has refused that, which is its answer then: it would again.
        """
        if link.refused():
            link.close()
            return False
        self.notice(f"{self.who.task} lost {link.place.name} at {link.place} ({error}); connecting again")
        request, landing = link.request, link.landing
        self._dial(link)
        link.request, link.landing = request, landing
        return True

    # --- all at once

    def carry_out(self, links: Iterable[Link]) -> None:
        """Carry out the requests that ``links`` hold, all at once. Raises RunFailed where a ps stays away.

        Each call watches its own links only: what it does to bring one back is such a call too.
        """
        poll = select.poll()
        waiting: dict[int, Link] = {}
        try:
            for link in links:
                self._begin(link, waiting, poll)
            self._await(waiting, poll)
        except BaseException:  # a ps refuses, or Ctrl-C: answers that are under way must not meet a later request
            for link in waiting.values():
                link.close()
            raise

    def _await(self, waiting: dict[int, Link], poll: select.poll) -> None:
        since, due = self.clock(), NOTICE_AFTER
        while waiting:
            events = poll.poll(NOTICE_AFTER * 1000)
            waited = self.clock() - since
            if not events and waited >= due:
                due = 4 * waited  # a long wait is said a few times, not every few seconds
                names = ", ".join(f"{link.place.name} at {link.place}" for link in waiting.values())
                self.notice(f"{self.who.task} waits for {names}, since {waited:.0f} s")
            for fd, _ in events:
                self._turn(fd, waiting, poll)

    def _begin(self, link: Link, waiting: dict[int, Link], poll: select.poll) -> None:
        while True:
            try:
                link.begin()
            except OSError as error:
                if self._back(link, error):
                    continue
                return
            poll.register(link.fileno(), select.POLLIN | select.POLLOUT if link.outbox.views else select.POLLIN)
            waiting[link.fileno()] = link
            return

    def _turn(self, fd: int, waiting: dict[int, Link], poll: select.poll) -> None:
        link = waiting[fd]
        sending = bool(link.outbox.views)
        try:
            whole = link.turn()
        except OSError as error:
            poll.unregister(fd)
            del waiting[fd]
            if self._back(link, error):
                self._begin(link, waiting, poll)
            return
        except WireError as error:
            raise RunFailed(f"{link.place.name} said what it may not", at=str(link.place), because=str(error)) from None
        if whole:
            poll.unregister(fd)
            del waiting[fd]
        elif sending and not link.outbox.views:
            poll.modify(fd, select.POLLIN)

    # --- questions

    def one(self, link: Link, told: Mapping[str, Any]) -> dict[str, Any]:
        """What one ps answers. Raises RunFailed where it refuses."""
        link.ask([wire.message(wire.ASK, dict(told))])
        self.carry_out([link])
        return checked(link).reply.meta

    def all(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same question to every ps; the answers in their order."""
        for link in self.links:
            link.ask([wire.message(wire.ASK, dict(told))])
        self.answered()
        return [link.reply.meta for link in self.links]

    def answered(self) -> None:
        """Carry out what every link holds. Raises RunFailed where a ps refuses."""
        self.carry_out(self.links)
        for link in self.links:
            checked(link)


def checked(link: Link) -> Link:
    """Raises RunFailed where the answer is a refusal."""
    if link.reply.header.kind == wire.REFUSAL:
        told = link.reply.meta
        raise RunFailed(
            str(told.get("why", "refused")), at=f"{link.place.name} at {link.place}",
            because=str(told.get("because", "")), try_=str(told.get("try", "")),
        )  # fmt: skip
    return link
