"""Nodes agree on the next view, whatever messages are lost and whoever proposes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.view import View
from phalanx.launch.elastic.nodes.consensus import ViewBallot, ViewVote, is_quorum


@pytest.mark.parametrize(
    ("voters", "answered", "dead", "may"),
    [
        ({0, 1, 2}, {0, 1}, set(), True),
        ({0, 1, 2}, {2}, set(), False),
        ({0, 1, 2}, {1, 2}, set(), True),
        ({0, 1}, {0}, set(), True),  # the lowest decides between halves
        ({0, 1}, {1}, set(), False),
        ({0, 1}, {1}, {0}, True),  # ... unless it is known to be dead
        ({0, 1, 2, 3}, {2, 3}, set(), False),
        ({0, 1, 2, 3}, {3}, {0, 1, 2}, True),
        ({0, 1, 2, 3}, set(), set(), False),
        ({0}, set(), {0}, False),
    ],
)
def test_who_may_decide(voters: set[int], answered: set[int], dead: set[int], may: bool) -> None:
    assert is_quorum(voters, answered, dead) == may


def proposal(node: int, epoch: int = 1) -> View:
    return View(epoch=epoch, members=(), store=f"node{node}:1", reason="", planned=False)


NODES = st.lists(st.integers(0, 3), max_size=4, unique=True)


@settings(max_examples=500)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), NODES, NODES), max_size=12))
def test_two_different_views_are_never_decided_for_one_epoch(
    count: int, ballots: list[tuple[int, list[int], list[int]]]
) -> None:
    """Each ballot reaches some nodes when it asks for promises and some when it asks to accept, in any combination."""
    votes = [ViewVote() for _ in range(count)]
    decided = set()
    open_ballots = []
    for turn, (node, first, second) in enumerate(ballots):
        node %= count
        ballot = ViewBallot((turn + 1, node), proposal(node), frozenset(range(count)))
        for voter in [n for n in first if n < count]:
            vote = votes[voter]
            if vote.promise(1, ballot.number):
                ballot.take_promise(voter, vote.accepted, ())
        open_ballots.append((ballot, second))
        # Old ballots arrive late, beside the newer ones.
        for late, reached in open_ballots if turn % 2 else open_ballots[-1:]:
            for voter in [n for n in reached if n < count and late.phase == "accept"]:
                if votes[voter].accept(late.number, late.view) and late.take_acceptance(voter, ()):
                    decided.add(late.view)
    assert len(decided) <= 1


def test_a_vote_on_an_epoch_that_is_over_is_refused() -> None:
    vote = ViewVote()
    assert vote.accept((1, 0), proposal(0, epoch=3))
    assert not vote.promise(2, (9, 1))
    assert not vote.accept((9, 1), proposal(1, epoch=2))
    assert vote.promise(4, (1, 1))
    assert vote.accepted is None
