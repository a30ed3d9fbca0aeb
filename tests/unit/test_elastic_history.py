"""What changes of the members cost, as it is written and said, and goodput."""

from __future__ import annotations

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic.history import History
from phalanx.launch.elastic.membership import distribute_ranks
from phalanx.launch.slow.goodput import Goodput
from phalanx.launch.slow.stragglers import Losses, Straggler


def view(epoch: int, *ids: str, planned: bool = False, reason: str = "") -> View:
    members = tuple(Member(id=i, host="h", pid=1, log="", node=0) for i in ids)
    return View(epoch=epoch, members=members, store="h:1", reason=reason, planned=planned)


def test_goodput_is_the_time_that_was_neither_start_nor_standstill() -> None:
    history = History(1000.0)
    history.add_view(view(0, "n0.0", "n0.1", planned=True), 1002.0)
    assert history.start_s is None
    for member_id in ("n0.0", "n0.1"):
        history.add_report(member_id, {"epoch": 0, "step": 0, "seconds": 0.0, "redone": 0}, 1003.0)
    history.settle()
    history.add_view(view(1, "n0.0", reason="rank 1 was killed"), 1050.0)
    history.add_report("n0.0", {"epoch": 1, "step": 40, "seconds": 2.0, "redone": 8}, 1052.0)
    (event,) = history.settle()
    assert event.to_json() == {
        "time": 1050.0,
        "kind": "epoch",
        "epoch": 1,
        "step": 40,
        "ranks": 1,
        "planned": False,
        "reason": "rank 1 was killed",
        "lost": ("n0.1",),
        "joined": (),
        "left": (),
        "seconds": {"n0.0": 2.0},
        "redone": 8,
    }
    history.add_view(view(2, "n0.0", "n0.2", planned=True), 1060.0)
    history.add_report("n0.2", {"epoch": 2, "step": 50, "seconds": 9.0, "redone": 0}, 1061.0)
    history.add_report("n0.0", {"epoch": 2, "step": 50, "seconds": 0.5, "redone": 0}, 1061.0)
    assert history.start_s is not None
    slow = Straggler(rank="n0.2", waiters=("n0.0",), lost_s=1.5, causes=())
    goodput = Goodput(
        total_s=100.0,
        start_s=history.start_s,
        losses=Losses(total_s=90.0, stragglers=(slow,)),
        stalls=history.stalls,
        redone=history.redone,
    )
    assert goodput.describe() == (
        "goodput 93.0 %: 1:33 of steps in 1:40; lost: 3.0 s start, 2.0 s n0.1 lost, 1.5 s waits for n0.2, "
        "0.5 s n0.2 joined; 8 samples computed again"
    )


def test_a_view_that_the_next_one_overtakes_is_an_event_too() -> None:
    history = History(0.0)
    history.add_view(view(0, "n0.0", "n0.1", "n0.2", planned=True), 1.0)
    assert history.add_view(view(1, "n0.0", "n0.2"), 2.0) == []
    (overtaken,) = history.add_view(view(2, "n0.0"), 2.1)
    assert (overtaken.view.epoch, overtaken.lost, overtaken.seconds) == (1, ("n0.1",), {})
    assert [event.view.epoch for event in history.settle()] == [2]


def test_ranks_are_distributed_evenly_and_no_node_has_more_than_it_can() -> None:
    assert distribute_ranks(3, {0: 2, 1: 2}) == {0: 2, 1: 1}
    assert distribute_ranks(5, {0: 1, 1: 4}) == {0: 1, 1: 4}
    assert distribute_ranks(9, {0: 2, 1: 2}) == {0: 2, 1: 2}
