"""The rules of the modes, played on two ps at once where it matters, without sockets and in any order of arrival."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from muster.errors import Refused
from muster.ps.updates import Answer, Apply, Async, Bounded, Effect, Forget, Phase, Sums, Sync, Updates, updates

A, B, C = "worker/0", "worker/1", "worker/2"


def begun(rule: Updates, tasks: Sequence[str] = (A, B, C)) -> Updates:
    for task in tasks:
        rule.enter(task, 1)
    for task in tasks:
        rule.join(task)
    return rule


def test_async_applies_as_they_come() -> None:
    rule = begun(Async())
    assert rule.push(A, 1, 0) == [Apply((A,)), Answer(A)]
    assert rule.push(B, 1, 0) == [Apply((B,)), Answer(B)]
    assert rule.version == 2
    assert rule.members[B].staleness.last == 1


def test_a_retry_is_answered_and_not_applied() -> None:
    rule = begun(Async())
    rule.push(A, 1, 0)
    assert rule.push(A, 1, 0) == [Answer(A)]
    assert rule.version == 1 and rule.members[A].repeated == 1


def test_a_dead_incarnation_is_refused() -> None:
    rule = begun(Async())
    rule.enter(A, 2)
    with pytest.raises(Refused, match="attempt 1 is over"):
        rule.enter(A, 1)


def test_a_round_takes_one_gradient_of_each_in_the_order_of_the_workers() -> None:
    rule = begun(Sync(3))
    assert rule.push(C, 1, 0) == []
    assert rule.push(A, 1, 0) == []
    assert rule.push(B, 1, 0) == [Apply((A, B, C)), Answer(A), Answer(B), Answer(C)]
    assert rule.version == rule.round == 1 and rule.next_for(C) == 1


@pytest.mark.parametrize("phase", [Phase.GONE, Phase.DONE, Phase.VALIDATING])
def test_whoever_goes_does_not_hang_the_round(phase: Phase) -> None:
    rule = begun(Sync(3))
    rule.push(A, 1, 0)
    rule.push(B, 1, 0)
    assert rule.turn(C, phase) == [Apply((A, B)), Answer(A), Answer(B)]
    assert rule.push(A, 2, 1) == []
    assert rule.push(B, 2, 1)[0] == Apply((A, B))


def test_the_last_one_alone_goes_on() -> None:
    rule = begun(Sync(3))
    rule.turn(A, Phase.GONE)
    rule.turn(B, Phase.DONE)
    assert rule.push(C, 1, 0) == [Apply((C,)), Answer(C)]


def test_a_whole_push_of_a_worker_that_died_counts_once() -> None:
    rule = begun(Sync(3))
    rule.push(A, 1, 0)
    rule.turn(A, Phase.GONE)
    rule.push(B, 1, 0)
    assert rule.push(C, 1, 0)[0] == Apply((A, B, C))
    assert rule.members[A].applied == 1


def test_a_new_incarnation_withdraws_what_the_old_one_had_open() -> None:
    rule = begun(Sync(3))
    rule.push(A, 1, 0)
    assert rule.enter(A, 2) == [Forget(A)]
    rule.push(B, 1, 0)
    assert rule.push(C, 1, 0)[0] == Apply((B, C))


def test_a_retry_while_the_round_is_open_waits_on() -> None:
    rule = begun(Sync(2), (A, B))
    rule.push(A, 1, 0)
    assert rule.push(A, 1, 0) == []
    assert rule.push(B, 1, 0) == [Apply((A, B)), Answer(A), Answer(B)]
    assert rule.push(A, 1, 0) == [Answer(A)]


def test_who_joins_comes_into_the_next_round() -> None:
    rule = begun(Sync(3), (A, B))
    rule.push(A, 1, 0)
    rule.enter(C, 1)
    at, effects = rule.join(C)
    assert (at, effects) == (1, [])
    assert rule.pull(C, at) == []  # the values of round 1 are not there yet
    assert rule.push(B, 1, 0) == [Apply((A, B)), Answer(A), Answer(B), Answer(C)]
    rule.push(A, 2, 1)
    rule.push(B, 2, 1)
    assert rule.push(C, 1, 1)[0] == Apply((A, B, C))


def test_who_comes_back_before_it_was_missed_is_waited_for() -> None:
    rule = begun(Sync(2), (A, B))
    rule.push(B, 1, 0)
    assert rule.join(A, 0) == (0, [])
    assert rule.push(A, 1, 0)[0] == Apply((A, B))


def test_who_joins_where_nobody_is_left_does_not_wait() -> None:
    rule = begun(Sync(3), (A,))
    rule.push(A, 1, 0)
    rule.turn(A, Phase.GONE)
    rule.enter(B, 1)
    rule.join(B, 5)
    assert rule.pull(B, 5) == [Answer(B)]
    assert rule.push(B, 1, 5) == [Apply((B,)), Answer(B)]


def test_spare_closes_with_the_first_and_drops_the_late() -> None:
    rule = begun(Sync(3, spare=1))
    rule.push(A, 1, 0)
    assert rule.push(C, 1, 0) == [Apply((A, C)), Answer(A), Answer(C)]
    assert rule.push(B, 1, 0) == [Forget(B), Answer(B, late=True)]
    assert rule.members[B].dropped == 1 and rule.next_for(B) == 1


def test_spare_needs_no_more_than_are_left() -> None:
    rule = begun(Sync(3, spare=1))
    rule.turn(A, Phase.GONE)
    rule.turn(B, Phase.GONE)
    assert rule.push(C, 1, 0)[0] == Apply((C,))


def test_bounded_holds_back_who_is_too_far_ahead() -> None:
    rule = begun(Bounded(2), (A, B))
    assert rule.push(A, 1, 0) == [Apply((A,)), Answer(A)]
    assert rule.push(A, 2, 1) == [Apply((A,)), Answer(A)]
    assert rule.push(A, 3, 2) == [Apply((A,))]
    assert rule.waits() == ({A}, {B})
    assert rule.push(A, 3, 2) == []  # a retry is held too
    assert rule.push(B, 1, 0) == [Apply((B,)), Answer(A), Answer(B)]


@pytest.mark.parametrize("phase", [Phase.GONE, Phase.DONE, Phase.VALIDATING])
def test_bounded_does_not_wait_for_who_is_not_there(phase: Phase) -> None:
    rule = begun(Bounded(0), (A, B))
    rule.push(A, 1, 0)
    assert rule.turn(B, phase) == [Answer(A)]


def test_bounded_lets_somebody_who_comes_back_begin_where_the_slowest_is() -> None:
    rule = begun(Bounded(3), (A, B))
    rule.turn(B, Phase.GONE)
    for step in range(20):
        rule.push(A, step + 1, step)
    rule.enter(B, 2)
    assert rule.join(B)[0] == 20
    assert rule.push(A, 21, 20)[-1] == Answer(A)


def test_factors_apply_the_closed_round_once() -> None:
    rule = begun(Sync(2, exchange=True), (A, B))
    rule.push(A, 1, 0)
    assert rule.push(B, 1, 0) == [Sums(A), Sums(B)]
    assert rule.version == 0
    assert rule.factors(B, 0) == [Apply((A, B)), Answer(B)]
    assert rule.factors(A, 0) == [Answer(A)]
    assert rule.version == 1


def test_another_worker_completes_a_round_whose_first_one_died() -> None:
    rule = begun(Sync(2, exchange=True), (A, B))
    rule.push(A, 1, 0)
    rule.push(B, 1, 0)
    assert rule.turn(A, Phase.GONE) == []
    assert rule.factors(B, 0) == [Apply((A, B)), Answer(B)]


def test_a_closed_round_is_given_up_when_all_its_workers_died() -> None:
    rule = begun(Sync(3, exchange=True), (A, B))
    rule.push(A, 1, 0)
    rule.push(B, 1, 0)
    rule.enter(C, 1)
    at, _ = rule.join(C)
    assert rule.pull(C, at) == []
    rule.turn(A, Phase.GONE)
    assert rule.turn(B, Phase.GONE) == [Forget(A), Forget(B), Answer(C)]
    assert rule.push(C, 1, at) == [Sums(C)]


def test_the_late_help_to_complete_the_round_that_they_missed() -> None:
    rule = begun(Sync(3, spare=1, exchange=True))
    rule.push(A, 1, 0)
    rule.push(B, 1, 0)
    assert rule.push(C, 1, 0) == [Forget(C), Sums(C)]
    assert rule.factors(C, 0) == [Apply((A, B)), Answer(C, late=True)]


def test_factors_for_a_round_that_is_over_do_not_touch_the_next_one() -> None:
    """C is late and computes factors of round 0, while A and B have gone on: round 1 waits for its own."""
    rule = begun(Sync(3, spare=1, exchange=True))
    for number in (1, 2):
        rule.push(A, number, number - 1)
        rule.push(B, number, number - 1)
        if number == 1:
            rule.factors(A, 0)
            rule.factors(B, 0)
            assert rule.push(C, 1, 0) == [Forget(C), Sums(C)]
    assert rule.factors(C, 0) == [Answer(C, late=True)] and rule.next_for(C) == 2
    assert rule.factors(A, 1) == [Apply((A, B)), Answer(A)]


def test_a_retry_in_a_closed_round_helps_to_complete_it_though_its_worker_has_joined_again() -> None:
    rule = begun(Sync(2, exchange=True), (A, B))
    rule.push(A, 1, 0)
    rule.push(B, 1, 0)
    rule.join(A, 0)
    assert rule.push(A, 1, 0) == [Sums(A)]


def test_there_is_no_other_mode() -> None:
    with pytest.raises(Refused, match="async, sync or bounded"):
        updates("synch", 3)


class Worker:
    """A worker as the client plays it, towards several ps."""

    def __init__(self, task: str, fleet: list[Updates]) -> None:
        self.task, self.fleet, self.attempt = task, fleet, 0
        self.dead = True

    def start(self) -> list[tuple[int, list[Effect]]]:
        self.attempt, self.number, self.dead, self.steps = self.attempt + 1, 0, False, 0
        self.waits, self.summed = set[int](), set[int]()
        done = [(k, rule.enter(self.task, self.attempt)) for k, rule in enumerate(self.fleet)]
        self.at, effects = self.fleet[0].join(self.task)
        done.append((0, effects))
        for k, rule in enumerate(self.fleet[1:], 1):
            at, effects = rule.join(self.task, self.at)
            self.at = max(self.at, at)
            done.append((k, effects))
        self.todo = [(k, "pull") for k in range(len(self.fleet))]
        self.waits = set(range(len(self.fleet)))
        return done

    def act(self, chance: random.Random) -> tuple[int, list[Effect]]:
        """One message to one ps: they may arrive in any order, and the worker may die between any two."""
        if not self.todo:
            self.number, self.summed = self.number + 1, set[int]()
            self.todo = [(k, "push") for k in range(len(self.fleet))]
            self.waits = set(range(len(self.fleet)))
        k, what = self.todo.pop(chance.randrange(len(self.todo)))
        rule = self.fleet[k]
        if what == "pull":
            return k, rule.pull(self.task, self.at)
        if what == "factors":
            assert self.known or not rule.closes(self.at), "it waits for factors that nobody can know"
            return k, rule.factors(self.task, self.at)
        return k, rule.push(self.task, self.number, self.at)

    def hear(self, k: int, effect: Effect) -> None:
        if isinstance(effect, Answer):
            self.waits.discard(k)
            self.next = max(getattr(self, "next", 0), self.fleet[k].next_for(self.task))
            if not self.waits:
                self.at, self.next, self.steps = max(self.at, self.next), 0, self.steps + 1
        elif isinstance(effect, Sums):
            self.summed.add(k)
        if self.waits and self.summed == self.waits:
            self.known = len(self.summed) == len(self.fleet)
            self.todo, self.summed = [(j, "factors") for j in self.waits], set()


@pytest.mark.parametrize("mode", ["async", "sync", "spare", "bounded", "exchange", "both"])
@pytest.mark.parametrize("seed", range(12))
def test_nobody_ever_hangs(mode: str, seed: int) -> None:
    """Random deaths and returns in random order, two ps: every live worker goes on to make steps."""
    chance = random.Random(seed)
    kinds = {
        "async": Async, "sync": lambda: Sync(4), "spare": lambda: Sync(4, spare=1),
        "bounded": lambda: Bounded(1), "exchange": lambda: Sync(4, exchange=True),
        "both": lambda: Sync(4, spare=1, exchange=True),
    }  # fmt: skip
    fleet: list[Updates] = [kinds[mode]() for _ in range(2)]
    workers = {f"worker/{i}": Worker(f"worker/{i}", fleet) for i in range(4)}

    def tell(k: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Answer | Sums) and not workers[effect.task].dead:
                workers[effect.task].hear(k, effect)

    for _ in range(4000):
        worker = workers[chance.choice(list(workers))]
        if worker.dead:
            if chance.random() < 0.05:
                for k, effects in worker.start():
                    tell(k, effects)
        elif chance.random() < 0.003:
            worker.dead = True
            for k, rule in enumerate(fleet):
                tell(k, rule.turn(worker.task, Phase.GONE))
        elif worker.todo or not worker.waits:
            tell(*worker.act(chance))
    before = {task: worker.steps for task, worker in workers.items() if not worker.dead}
    for _ in range(2000):
        live = [worker for worker in workers.values() if not worker.dead and (worker.todo or not worker.waits)]
        if not live:
            break
        tell(*chance.choice(live).act(chance))
    for task, steps in before.items():
        assert workers[task].steps > steps + 5, (task, [vars(rule) for rule in fleet])
    for rule in fleet:
        for member in rule.members.values():
            if mode == "bounded":
                assert member.ahead <= 1
