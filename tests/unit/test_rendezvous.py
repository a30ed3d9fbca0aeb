"""Waiting for peers, with a store and a clock that do what the test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from phalanx.cluster.rendezvous import Announcement, Expected, check_versions, meet, name_ranks
from phalanx.errors import ConfigError, PeerLostError


class ScriptedStore:
    """Holds keys in memory; waiting moves the clock on, and keys appear at the times the test set."""

    def __init__(self, arrivals: dict[float, tuple[str, str]] | None = None) -> None:
        self.now = 0.0
        self.values: dict[str, str] = {}
        self.arrivals = dict(arrivals or {})

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def get(self, key: str) -> str:
        return self.values[key]

    def has(self, keys: Sequence[str]) -> bool:
        return all(k in self.values for k in keys)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        if not self.has(keys):
            self.now += seconds
            for time in [t for t in self.arrivals if t <= self.now]:
                self.set_once(*self.arrivals.pop(time))
        return self.has(keys)


def announcement(rank: int, torch: str = "2.13.0") -> Announcement:
    return Announcement(rank=rank, host=f"host{rank}", pid=100 + rank, torch=torch, phalanx="0.1")


def expected(n: int) -> list[Expected]:
    return [Expected(rank=r, endpoint=f"10.0.0.{r}:6170", log_file=f"log/workerlog.{r}") for r in range(n)]


def run(
    store: ScriptedStore,
    n: int = 2,
    rank: int = 0,
    timeout_s: float = 10.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Announcement]:
    return meet(
        store, announcement(rank), expected(n), timeout_s=timeout_s, clock=lambda: store.now, log_line=say,
        probe=lambda endpoint: f"{endpoint} did not answer",
    )  # fmt: skip


def test_ranks_that_are_all_there_meet_without_a_word():
    store, said = ScriptedStore(), []
    store.set_once("here/1", announcement(1).to_json())
    assert [a.host for a in run(store, say=said.append)] == ["host0", "host1"]
    assert (store.now, said, store.get("verdict")) == (0.0, [], "go")


def test_a_late_rank_is_named_every_three_seconds_until_it_comes():
    store, said = ScriptedStore({7.0: ("here/1", announcement(1).to_json())}), []
    assert len(run(store, say=said.append)) == 2
    assert said == ["server not ready, wait 3 sec to retry...", "not ready endpoints:['10.0.0.1:6170']"] * 2


def test_ranks_without_known_endpoints_are_named_by_number():
    store, said = ScriptedStore(), []
    with pytest.raises(PeerLostError, match=r"Waited 4 s for 3 ranks; 2 did not come: rank 1; rank 2\. Look"):
        meet(
            store, announcement(0), [Expected(rank=r) for r in range(3)], timeout_s=4.0, clock=lambda: store.now,
            log_line=said.append, probe=str,
        )  # fmt: skip
    assert said[1] == "not ready endpoints:['rank 1', 'rank 2']"


def test_within_ten_seconds_the_missing_are_named_with_address_and_log():
    store, said = ScriptedStore(), []
    with pytest.raises(PeerLostError):
        run(store, say=lambda line: said.append((store.now, line)))
    found = [at for at, line in said if line == LATE]
    assert len(found) == 1
    assert found[0] <= 10.0


LATE = "still waiting for rank 1 (10.0.0.1:6170 did not answer, log log/workerlog.1)"


def test_giving_up_names_the_missing_with_address_and_log():
    with pytest.raises(
        PeerLostError,
        match=r"Waited 10 s for 2 ranks; 1 did not come: rank 1 \(10.0.0.1:6170 did not answer, log log/workerlog.1\)",
    ):
        run(ScriptedStore())


def test_a_rank_that_comes_after_the_others_gave_up_fails_with_their_words():
    store = ScriptedStore()
    with pytest.raises(PeerLostError) as early:
        run(store)
    with pytest.raises(PeerLostError) as late:
        run(store, rank=1)
    assert str(late.value) == str(early.value)


def test_a_rank_still_waiting_obeys_the_verdict_of_another():
    store = ScriptedStore({1.0: ("verdict", json.dumps({"kind": "lost", "message": "rank 1 never came"}))})
    with pytest.raises(PeerLostError, match="rank 1 never came"):
        run(store)
    assert store.now < 2.0


def test_a_rank_that_arrives_at_the_last_moment_is_not_left_behind():
    store = ScriptedStore({10.0: ("here/1", announcement(1).to_json())})
    assert len(run(store)) == 2


def test_two_processes_with_one_rank_stop_everyone():
    store = ScriptedStore()
    store.set_once("here/0", Announcement(rank=0, host="other", pid=7).to_json())
    with pytest.raises(ConfigError, match="Two processes say they are rank 0: host other pid 7 and host host0 pid 100"):
        run(store)
    with pytest.raises(ConfigError, match="Two processes say they are rank 0"):
        run(store, rank=1)


def test_a_second_process_of_a_rank_after_the_start_hurts_only_itself():
    store = ScriptedStore()
    store.set_once("here/1", announcement(1).to_json())
    run(store)
    with pytest.raises(ConfigError, match="Two processes say they are rank 1"):
        meet(
            store, Announcement(rank=1, host="x", pid=1), expected(2), timeout_s=1, clock=lambda: store.now,
            log_line=print, probe=str,
        )  # fmt: skip
    assert store.get("verdict") == "go"


def test_different_versions_are_an_error_that_says_who_has_what():
    with pytest.raises(ConfigError, match=r"same torch, found 2\.13\.0 on ranks 0, 2; 2\.12\.1 on rank 1\. Install"):
        check_versions([announcement(0), announcement(1, torch="2.12.1"), announcement(2)])


def test_an_announcement_survives_the_store_and_reads_well():
    me = Announcement(rank=3, host="h", pid=9, log_file="log/workerlog.3", torch="2.13.0", phalanx="0.1")
    assert Announcement.from_json(me.to_json()) == me
    assert str(me) == "rank 3 (host h, pid 9, log log/workerlog.3)"
    assert (name_ranks([1]), name_ranks([1, 2])) == ("rank 1", "ranks 1, 2")
