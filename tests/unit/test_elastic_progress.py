"""What the members of a new membership epoch agree on, from how far each of them is."""

from __future__ import annotations

import pytest

from phalanx.errors import PeerLostError
from phalanx.parallel.elastic.progress import Agreement, MemberProgress, ShardProgress, share_out


def test_progress_survives_json() -> None:
    optimizers = ShardProgress(0, 3, ((1, 3), (2, 3)), is_stale=True), ShardProgress(2, 1, ((0, 2),))
    progress = MemberProgress(3, (1, 2, 2), is_whole=True, optimizers=optimizers)
    assert MemberProgress.from_json(progress.to_json()) == progress


def test_replicas_of_a_lost_member_go_to_those_that_have_fewest() -> None:
    assert share_out([(0, 1), (3,)], 4) == ((0, 1, 1), (3, 2))


def test_nothing_is_shared_out_twice_where_one_has_taken_over_before() -> None:
    """One member had finished the recovery before, and computed replica 1; the other had not heard of it."""
    agreement = Agreement.of([MemberProgress(7, (0, 1)), MemberProgress(7, (2,))], 4)
    assert agreement.shares == ((0, 1, 1), (2, 3))


def test_members_between_two_global_batches_go_on_with_a_joiner() -> None:
    agreement = Agreement.of(
        [MemberProgress(5, is_between=True), MemberProgress(5, is_between=True), MemberProgress(0, is_joining=True)], 4
    )
    assert (agreement.members, agreement.source, agreement.shares) == ((0, 1, 2), 0, None)


def test_a_joiner_waits_while_a_global_batch_is_open() -> None:
    agreement = Agreement.of([MemberProgress(0, is_joining=True), MemberProgress(5, (0,)), MemberProgress(5, (2,))], 4)
    assert agreement.members == (1, 2)
    assert agreement.shares == ((0, 1), (2, 3))


def test_a_joiner_waits_while_the_others_make_a_call_again() -> None:
    agreement = Agreement.of([MemberProgress(5, calls=1), MemberProgress(5), MemberProgress(0, is_joining=True)], 4)
    assert (agreement.members, agreement.shares) == ((0, 1), None)


def test_a_joiner_gets_the_state_of_a_member_that_has_every_update() -> None:
    agreement = Agreement.of(
        [
            MemberProgress(4, (0, 1), is_whole=True),
            MemberProgress(5, is_between=True),
            MemberProgress(0, is_joining=True),
        ],
        4,
    )
    assert (agreement.committed, agreement.source, agreement.shares) == (5, 1, None)


def test_a_member_that_gave_up_a_commit_is_left_behind_and_a_joiner_is_not() -> None:
    behind, ahead, joiner = MemberProgress(4), MemberProgress(5), MemberProgress(0, is_joining=True)
    agreement = Agreement.of([behind, ahead, joiner], 4)
    assert [agreement.leaves_behind(progress) for progress in (behind, ahead, joiner)] == [True, False, False]


def test_sums_that_all_have_are_committed() -> None:
    agreement = Agreement.of([MemberProgress(5, (0,), is_whole=True), MemberProgress(5, (1,), is_whole=True)], 3)
    assert (agreement.is_whole, agreement.shares) == (True, None)


def test_sums_that_one_member_lacks_are_not_committed() -> None:
    agreement = Agreement.of([MemberProgress(5, (0,), is_whole=True), MemberProgress(5, (1,))], 3)
    assert not agreement.is_whole
    assert agreement.shares == ((0, 2), (1, 1))


def test_a_member_that_is_behind_gets_its_part_of_the_global_batch_that_others_have_begun() -> None:
    agreement = Agreement.of([MemberProgress(5, (0, 1), is_whole=True), MemberProgress(6, (2, 3))], 4)
    assert (agreement.committed, agreement.shares) == (6, ((0, 1), (2, 3, 3)))


def test_without_a_member_that_has_the_state_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(PeerLostError, match="all ranks that had the training state were lost"):
        Agreement.of([MemberProgress(0, is_joining=True)], 4)
