"""Who belongs to an elastic job: views, joins, departures and the least number of ranks, without processes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic import membership_state
from phalanx.launch.elastic.joiners import WINDOW_S, RestartBudget
from phalanx.launch.elastic.membership import Membership, SizeLimits

STORE = "127.0.0.1:1"


def member(k: int) -> Member:
    return Member(id=f"n0.{k}", host="h", pid=100 + k, log=f"log/workerlog.{k}", node=0)


def started(count: int, *, least: int = 1, most: int | None = None) -> Membership:
    membership = Membership(SizeLimits(least, most or count))
    for k in range(count):
        membership.add(member(k))
    membership.start([f"n0.{k}" for k in range(count)], STORE)
    return membership


def next_view(membership: Membership) -> View | None:
    view = membership.next_view({0: STORE})
    if view is not None:
        membership.adopt(view)
    return view


def scale(membership: Membership, size: int) -> None:
    membership.scale({0: size}, f"scaled to {size} ranks", (membership.version[0] + 1, 0))


def taken_up(membership: Membership) -> None:
    for member_id in membership.active:
        membership.take_up(member_id, membership.view.epoch)


def test_a_loss_makes_a_view_without_the_rank_and_a_joiner_one_with_it() -> None:
    membership = started(3)
    assert membership.lose("n0.1", "rank 1 was killed")
    view = next_view(membership)
    assert view is not None
    assert (view.epoch, view.ids, view.planned, view.reason) == (1, ("n0.0", "n0.2"), False, "rank 1 was killed")
    assert membership.missing(0) == 0  # until the others have recovered
    taken_up(membership)
    assert membership.missing(0) == 1
    membership.add(member(3))
    assert (membership.missing(0), next_view(membership)) == (0, None)
    membership.admit("n0.3")
    view = next_view(membership)
    assert view is not None
    assert (view.epoch, view.ids, view.planned, view.reason) == (2, ("n0.0", "n0.2", "n0.3"), True, "n0.3 joins")


def test_a_loss_does_not_wait_for_a_planned_view_to_be_taken_up() -> None:
    membership = started(3, most=4)
    membership.add(member(3))
    membership.admit("n0.3")
    assert next_view(membership) is not None
    membership.lose("n0.0", "killed")
    view = next_view(membership)
    assert view is not None
    assert (view.epoch, view.ids, view.planned) == (2, ("n0.1", "n0.2", "n0.3"), False)


def test_a_second_planned_view_waits_until_the_first_is_taken_up() -> None:
    membership = started(2, most=4)
    for k in (2, 3):
        membership.add(member(k))
    membership.admit("n0.2")
    next_view(membership)
    membership.admit("n0.3")
    assert next_view(membership) is None
    for member_id in ("n0.0", "n0.1"):
        assert not membership.take_up(member_id, 1)
    assert next_view(membership) is None
    assert membership.take_up("n0.2", 1)
    view = next_view(membership)
    assert view is not None
    assert view.ids == ("n0.0", "n0.1", "n0.2", "n0.3")


def test_a_member_that_dies_while_it_leaves_makes_the_others_notice() -> None:
    membership = started(3)
    scale(membership, 2)
    view = next_view(membership)
    assert view is not None
    assert (view.ids, view.planned) == (("n0.0", "n0.1"), True)
    assert membership.lose("n0.2", "killed")
    view = next_view(membership)
    assert view is not None
    assert (view.epoch, view.ids, view.planned) == (2, ("n0.0", "n0.1"), False)
    taken_up(membership)
    assert membership.missing(0) == 0


def test_scaling_up_again_keeps_those_that_were_to_leave() -> None:
    membership = started(4)
    membership.lose("n0.0", "killed")
    next_view(membership)  # departures wait for it
    scale(membership, 1)
    scale(membership, 3)
    taken_up(membership)
    assert next_view(membership) is None
    membership.add(member(4))
    scale(membership, 4)
    assert membership.surplus_joiners(0) == []
    scale(membership, 3)
    assert membership.surplus_joiners(0) == ["n0.4"]


@pytest.mark.parametrize("finishes", [[], ["n0.0"]])
def test_the_least_number_of_ranks_counts_those_that_finished(finishes: list[str]) -> None:
    membership = started(3, least=2)
    for member_id in finishes:
        membership.finish(member_id)
    membership.lose("n0.1", "killed")
    assert next_view(membership) is not None
    membership.lose("n0.2", "killed too")
    assert next_view(membership) is None
    assert "killed too" in membership.refusal


def test_the_last_rank_to_be_lost_fails_a_job_whose_others_finished() -> None:
    membership = started(2)
    membership.finish("n0.0")
    membership.lose("n0.1", "killed")
    assert next_view(membership) is None
    assert membership.refusal == "killed: no rank is left"


def test_replacements_are_counted_in_all_or_in_ten_minutes() -> None:
    budget = RestartBudget(None)
    for second in range(3):
        assert budget.remaining(second) > 0
        budget.spend(second)
    assert budget.remaining(3) == 0
    assert budget.remaining(WINDOW_S) == 1
    strict = RestartBudget(1)
    strict.spend(0)
    assert strict.remaining(10 * WINDOW_S) == 0


class World:
    """A membership, the processes that live, and the last view that ranks were told."""

    def __init__(self, least: int, count: int) -> None:
        self.least, self.count = least, count
        self.membership = started(count, least=least)
        self.alive = {f"n0.{k}" for k in range(count)}
        self.last = self.membership.start(sorted(self.alive), STORE)
        self.next_id = count

    def pick(self, number: int) -> str:
        known = sorted(self.alive)
        return known[number % len(known)] if known else "n0.0"

    def lose(self, number: int) -> None:
        member_id = self.pick(number)
        self.alive.discard(member_id)
        self.membership.lose(member_id, f"{member_id} was killed")

    def finish(self, number: int) -> None:
        member_id = self.pick(number)
        self.alive.discard(member_id)
        self.membership.finish(member_id)

    def admit(self, number: int) -> None:
        self.membership.admit(self.pick(number))

    def take_up(self, number: int) -> None:
        self.membership.take_up(self.pick(number), self.membership.view.epoch)

    def depart(self, number: int) -> None:
        self.membership.depart([self.pick(number)], "by its own wish")

    def scale(self, number: int) -> None:
        size = self.least + number % (self.count - self.least + 1)
        scale(self.membership, size)
        for member_id in self.membership.surplus_joiners(0):
            self.alive.discard(member_id)
            self.membership.lose(member_id, "not needed")

    def start(self, _: int) -> None:
        for _ in range(self.membership.missing(0)):
            self.membership.add(member(self.next_id))
            self.alive.add(f"n0.{self.next_id}")
            self.next_id += 1

    def tell(self, _: int) -> None:
        view = next_view(self.membership)
        if view is None:
            return
        assert view.epoch == self.last.epoch + 1
        assert len(set(view.ids)) == len(view.ids) <= self.count
        assert set(view.ids) <= self.alive
        stay = [i for i in self.last.ids if i in view.ids]
        assert list(view.ids[: len(stay)]) == stay, "those who stay keep their order, joiners come last"
        assert view.planned or set(view.ids) <= set(self.last.ids)
        assert len(set(view.ids) | (self.membership.finished & set(self.last.ids))) >= self.least
        self.last = view


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [World.lose, World.finish, World.admit, World.take_up, World.scale, World.depart, World.start, World.tell]
        ),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS, st.integers(1, 3), st.integers(1, 4))
def test_whatever_happens_views_are_of_the_living_and_epochs_grow(
    steps: list[tuple[Callable[[World, int], None], int]], least: int, count: int
) -> None:
    world = World(min(least, count), count)
    for act, number in steps:
        act(world, number)
    if world.membership.refusal:
        assert next_view(world.membership) is None
        assert world.membership.missing(0) == 0


def test_changes_of_the_size_come_to_the_same_on_all_nodes_in_whatever_order_they_are_told() -> None:
    grown, shrunk = ({0: 3}, "scaled to 3 ranks", (2, 0)), ({0: 1}, "scaled to 1 rank", (1, 1))
    ends = []
    for order in ([grown, shrunk], [shrunk, grown], [grown]):
        membership = started(3)
        for change in order:
            membership.scale(*change)
        ends.append((membership.targets, membership.departures))
    assert ends == [({0: 3}, {})] * 3


def test_a_node_that_missed_a_change_of_the_size_learns_it_and_its_older_one_does_not_count() -> None:
    behind, ahead = started(3), started(3)
    for membership in (behind, ahead):
        scale(membership, 1)
    scale(ahead, 2)
    for source, target in ((behind, ahead), (ahead, behind)):
        membership_state.merge(target, json.loads(json.dumps(membership_state.to_json(source))))
    assert behind.targets == ahead.targets == {0: 2}
    assert list(behind.departures) == list(ahead.departures) == ["n0.2"]
    scale(behind, 3)
    assert behind.departures == {}
