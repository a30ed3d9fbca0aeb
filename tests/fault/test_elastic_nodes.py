"""Nodes of an elastic job are lost, cut off, taken away and added while the others continue."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from benchmarks import network_spaces
from elastic_launch import JOB, ElasticLaunch, ids, no_launcher_left, start_nodes
from launching import RUN, Launch, free_port
from phalanx.launch.elastic.control import ask
from phalanx.launch.job import registry

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures(no_launcher_left.__name__)]


@pytest.fixture
def port() -> str:
    return free_port()


def kill_node(job: ElasticLaunch, node: int, number: int = signal.SIGKILL) -> None:
    job.nodes[node].process.send_signal(number)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_node_whose_launcher_is_killed_is_left_out_whichever_it_is(tmp_path: Path, port: str, lost: int) -> None:
    job = start_nodes(tmp_path, 3, port, "--nnodes", "1:3", "-n", "1")
    stay = [f"n{node}.0" for node in range(3) if node != lost]
    for node in range(3):
        first = job.wait_for_view(f"n{node}.0", 0)
        assert ids(first) == ["n0.0", "n1.0", "n2.0"]
    kill_node(job, lost)
    views = [job.wait_for_view(member, 1) for member in stay]
    assert views[0] == views[1]
    assert (ids(views[0]), views[0]["planned"]) == (stay, False)
    assert f"127.0.0.{lost + 2} (node {lost}) is gone: its launcher has ended" in views[0]["reason"]
    # The store of the view is one that lives.
    host, _, store_port = views[0]["store"].rpartition(":")
    assert host == f"127.0.0.{2 if lost else 3}"
    socket.create_connection((host, int(store_port)), timeout=1).close()
    job.end()
    codes = [launcher.code for launcher in job.nodes]
    assert codes == [-9 if node == lost else 0 for node in range(3)]


def test_a_node_that_comes_later_adds_its_ranks(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 3, port, "--nnodes", "2:3", "-n", "1", "--timeout", "5", nodes=[0, 1])
    first = job.wait_for_view("n1.0", 0)
    assert ids(first) == ["n0.0", "n1.0"]
    assert job.environment("n1.0")["WORLD_SIZE"] == "2"
    job.start_node(2)
    grown = job.wait_for_view("n2.0", 1)
    assert (ids(grown), grown["planned"]) == (["n0.0", "n1.0", "n2.0"], True)
    assert job.seen("n2.0")[1]["joining"]["store"] == first["store"]
    # Lost and started again it joins under another name.
    kill_node(job, 2)
    assert ids(job.wait_for_view("n0.0", 2)) == ["n0.0", "n1.0"]
    job.start_node(2)
    again = job.wait_for_view("n2.1", 3)
    assert ids(again) == ["n0.0", "n1.0", "n2.1"]
    job.end()
    assert [launcher.code for launcher in job.nodes] == [0, 0, -9, 0]


def test_a_killed_rank_is_replaced_on_its_node(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "2")
    assert ids(job.wait_for_view("n1.1", 0)) == ["n0.0", "n0.1", "n1.0", "n1.1"]
    job.kill("n1.0")
    assert ids(job.wait_for_view("n0.0", 1)) == ["n0.0", "n0.1", "n1.1"]
    assert ids(job.wait_for_view("n1.2", 2)) == ["n0.0", "n0.1", "n1.1", "n1.2"]
    job.end()
    assert [launcher.code for launcher in job.nodes] == [0, 0]


def test_a_frozen_rank_of_another_node_is_killed_there(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1", "--max-restarts", "0")
    job.wait_for_view("n1.0", 0)
    job.wait_for_view("n0.0", 0)
    pid = job.kill("n1.0", signal.SIGSTOP)
    job.say("n0.0", suspect={"epoch": 0, "ids": ["n1.0"], "waited_s": 1.0, "step": 3})
    view = job.wait_for_view("n0.0", 1)
    assert f"rank 1 (n1.0, pid {pid}) is frozen: stopped by a signal" in view["reason"]
    assert not Path(f"/proc/{pid}").exists()
    job.end()


def test_a_frozen_launcher_is_left_out_once_ranks_wait_for_its_node(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1")
    job.wait_for_view("n1.0", 0)
    job.wait_for_view("n0.0", 0)
    kill_node(job, 1, signal.SIGSTOP)
    asked = time.monotonic()
    job.say("n0.0", suspect={"epoch": 0, "ids": ["n1.0"], "waited_s": 1.0, "step": 3})
    view = job.wait_for_view("n0.0", 1)
    assert time.monotonic() - asked > 0.9
    assert ids(view) == ["n0.0"]
    # It wakes up, learns that the others continued, and ends.
    kill_node(job, 1, signal.SIGCONT)
    other = job.nodes[1].wait()
    other.gone_within(0.5)
    assert other.code != 0
    job.end()
    assert job.nodes[0].code == 0


def test_the_higher_half_of_two_does_not_go_on_by_itself(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1")
    job.wait_for_view("n1.0", 0)
    kill_node(job, 0, signal.SIGSTOP)
    job.say("n1.0", suspect={"epoch": 0, "ids": ["n0.0"], "waited_s": 1.0, "step": 3})
    other = job.nodes[1].wait()
    assert other.code == 1
    refused = next(m["refused"] for m in job.seen("n1.0") if "refused" in m)
    assert "node 1 is cut off: of nodes [0, 1] it reaches [1] only" in refused["why"]
    kill_node(job, 0, signal.SIGCONT)
    assert ids(job.wait_for_view("n0.0", 1)) == ["n0.0"]
    job.end()
    assert job.nodes[0].code == 0


def test_a_node_that_is_taken_away_leaves_at_a_step_and_the_others_go_on(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "2")
    job.wait_for_view("n1.1", 0)
    kill_node(job, 0, signal.SIGTERM)
    view = job.wait_for_view("n1.0", 1)
    assert (ids(view), view["planned"]) == (["n1.0", "n1.1"], True)
    assert "n0.0 leaves (node 0 is about to be taken away)" in view["reason"]
    assert job.nodes[0].wait().code == 0
    job.nodes[0].gone_within(0.5)
    # Its store goes with it, so that of a node that stays is used at once.
    assert view["store"].rpartition(":")[0] == "127.0.0.3"
    job.kill("n1.0")
    assert ids(job.wait_for_view("n1.1", 2)) == ["n1.1"]
    job.end()
    assert job.nodes[1].code == 0


def test_a_second_request_kills_the_ranks_of_a_node_that_is_taken_away_and_no_others(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1")
    job.wait_for_view("n1.0", 0)
    job.wait_for_view("n0.0", 0)
    job.say("n1.0", sleep=60.0)
    job.wait_until(lambda: not (tmp_path / "say.n1.0").exists())
    kill_node(job, 1, signal.SIGTERM)
    job.wait_for_view("n0.0", 1)
    kill_node(job, 1, signal.SIGTERM)
    asked = time.monotonic()
    job.nodes[1].wait(10.0).gone_within(0.5)
    assert time.monotonic() - asked < 8.0
    assert job.nodes[0].process.poll() is None
    job.end()
    assert job.nodes[0].code == 0


def test_a_node_that_is_taken_away_gets_no_ranks_when_the_job_is_scaled(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1:2")
    job.wait_for_view("n1.1", 0)
    job.wait_for_view("n0.0", 0)
    for member in ("n1.0", "n1.1"):
        job.say(member, sleep=3.0)  # it leaves later, so that the node is there while the job is scaled
        job.wait_until(lambda member=member: not (tmp_path / f"say.{member}").exists())
    kill_node(job, 1, signal.SIGTERM)
    assert ids(job.wait_for_view("n0.0", 1)) == ["n0.0", "n0.1"]
    (listed,) = [entry for entry in registry.collect() if entry["pid"] == job.nodes[0].process.pid]
    ask(listed["control"], {"scale": 4})
    job.nodes[1].wait(20.0).gone_within(0.5)
    assert job.nodes[1].code == 0
    assert not (tmp_path / "seen.n1.2").exists()
    job.end()
    assert job.nodes[0].code == 0


@pytest.mark.skipif(not network_spaces.are_possible(), reason="needs root to make network namespaces")
def test_nodes_that_know_the_first_one_only_begin_together(tmp_path: Path) -> None:
    with network_spaces.NetworkSpaces(3) as spaces:
        first = spaces.addresses[0]
        shared = ("--http-port", "29500", "--nnodes", "1:3", "--master-addr", first, "-n", "1")
        job = start_counted(tmp_path, shared, spaces)
        for node in range(3):
            assert ids(job.wait_for_view(f"n{node}.0", 0)) == ["n0.0", "n1.0", "n2.0"]
        job.end()
        assert [launcher.code for launcher in job.nodes] == [0, 0, 0]


def start_counted(folder: Path, shared: tuple[str, ...], spaces: network_spaces.NetworkSpaces) -> ElasticLaunch:
    """Start a launcher in each namespace, the last one when the others have met."""
    (folder / "job.py").write_text(JOB)
    secret = {"PHALANX_JOB_SECRET": "ab" * 32}

    def flags(node: int) -> tuple[str, ...]:
        return ("--node-rank", str(node), "--log-dir", f"log{node}", *shared, "job.py")

    launcher = Launch(flags(0), folder, program=(*spaces.enter(0), *RUN), environment=secret)
    job = ElasticLaunch(launcher, [launcher], shared)
    for node in (1, 2):
        job.start_node(node, program=(*spaces.enter(node), *RUN), environment=secret)
        time.sleep(2.0 if node == 1 else 0.0)
    return job


def test_nodes_that_are_taken_away_together_end_the_job(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1")
    job.wait_for_view("n1.0", 0)
    for node in (0, 1):
        kill_node(job, node, signal.SIGTERM)
    for launcher in job.nodes:
        launcher.wait().gone_within(0.5)
    assert all(launcher.code in (0, 128 + signal.SIGTERM) for launcher in job.nodes)


def test_an_error_of_every_rank_is_reported_on_every_node(tmp_path: Path, port: str) -> None:
    job = start_nodes(tmp_path, 2, port, "--nnodes", "1:2", "-n", "1")
    job.wait_for_view("n1.0", 0)
    job.say("n1.0", **{"raise": "no such column"})
    job.wait_for_view("n0.0", 1)
    job.say("n0.0", **{"raise": "no such column"})
    for launcher in job.nodes:
        launcher.wait().gone_within(0.5)
        assert launcher.code == 1
        assert "ValueError: no such column" in launcher.out.partition("failed first")[2]


@pytest.mark.skipif(not network_spaces.are_possible(), reason="needs root to make network namespaces")
@pytest.mark.parametrize("lost", [0, 2])
def test_the_larger_part_of_a_network_that_is_cut_goes_on_and_the_other_ends(tmp_path: Path, lost: int) -> None:
    with network_spaces.NetworkSpaces(3) as spaces:
        job = start_in_spaces(tmp_path, spaces)
        stay = [node for node in range(3) if node != lost]
        for node in range(3):
            job.wait_for_view(f"n{node}.0", 0)
        spaces.unplug(lost)
        for node in range(3):
            others = [f"n{lost}.0"] if node != lost else [f"n{other}.0" for other in stay]
            job.say(f"n{node}.0", suspect={"epoch": 0, "ids": others, "waited_s": 2.0, "step": 3})
        for node in stay:
            view = job.wait_for_view(f"n{node}.0", 1)
            assert ids(view) == [f"n{other}.0" for other in stay]
        assert job.nodes[lost].wait().code == 1
        assert f"node {lost} is cut off: of nodes [0, 1, 2] it reaches [{lost}] only" in (
            job.nodes[lost].out + job.nodes[lost].err
        )
        job.end()
        assert [job.nodes[node].code for node in stay] == [0, 0]


@pytest.mark.skipif(not network_spaces.are_possible(), reason="needs root to make network namespaces")
def test_silence_is_noticed_where_no_rank_waits(tmp_path: Path) -> None:
    with network_spaces.NetworkSpaces(2) as spaces:
        job = start_in_spaces(tmp_path, spaces)
        job.wait_for_view("n1.0", 0)
        job.wait_for_view("n0.0", 0)
        spaces.unplug(1)
        view = job.wait_for_view("n0.0", 1)
        assert "(node 1) is gone or cut off: no sign of life for 6 s" in view["reason"]
        assert job.nodes[1].wait().code == 1
        job.end()


def start_in_spaces(folder: Path, spaces: network_spaces.NetworkSpaces) -> ElasticLaunch:
    """Start a launcher in each namespace, with one rank each."""
    return start_nodes(
        folder,
        len(spaces.addresses),
        "29500",
        *("--nnodes", f"1:{len(spaces.addresses)}", "-n", "1"),
        ips=spaces.addresses,
        enter=spaces.enter,
    )
