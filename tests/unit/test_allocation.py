"""What a launcher reads from the environment of a scheduler."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from phalanx.cluster.allocation import Allocation, read_allocation
from phalanx.cluster.role.mpi_srun_role import derived_port
from phalanx.errors import LaunchError, RoleError
from phalanx.launch.request import machine, nodes, options_from_scheduler, request
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options

CPU = Machine(cores=4)
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
POD = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_NODEID": "1",
}


def facts(found: Allocation) -> tuple[Any, ...]:
    return found.node_count, found.node_rank, found.master_addr, found.master_port, found.procs_per_node


@pytest.mark.parametrize(
    ("env", "counts", "expected"),
    [
        ({}, None, (1, None, "", None, None)),
        (PET, None, (2, 1, "job-node-0-0.job", 29400, 4)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, None, (1, None, "", None, 2)),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, None, (2, 1, "job-node-0-0.job", 29400, None)),
        (POD, "nodes", (3, 2, "dlc-master-0", 23456, None)),
        (POD | {"PHALANX_WORLD_SIZE_COUNTS": "nodes"}, None, (3, 2, "dlc-master-0", 23456, None)),
        (POD, "processes", (1, None, "", None, None)),
        (POD | {"PHALANX_WORLD_SIZE_COUNTS": "nodes"}, "processes", (1, None, "", None, None)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None, (1, None, "", None, None)),
        ({"WORLD_SIZE": "4"}, None, (1, None, "", None, None)),
        # Kubeflow says how many nodes there are, so RANK and WORLD_SIZE need no explanation.
        (PET | {"WORLD_SIZE": "8", "RANK": "1"}, None, (2, 1, "job-node-0-0.job", 29400, 4)),
        (STEP, None, (2, 1, "gpu01", derived_port("7.0"), None)),
        (BATCH, None, (2, 0, "gpu01", derived_port("7"), None)),
        (BATCH | {"SLURM_STEP_ID": "4294967290"}, None, (2, 0, "gpu01", derived_port("7"), None)),
        (STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000"}, None, (2, 1, "10.0.0.1", 6000, None)),
        (STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None, (1, None, "", None, None)),
        (PET | {"PHALANX_RANK": "0"}, None, (1, None, "", None, None)),
        (POD | {"TORCHELASTIC_RUN_ID": "x"}, None, (1, None, "", None, None)),
    ],
)
def test_each_scheduler_is_understood(env: dict[str, str], counts: Any, expected: tuple[Any, ...]) -> None:
    assert facts(read_allocation(env, counts)) == expected


def test_the_nodes_are_known_by_name_under_slurm() -> None:
    found = read_allocation(STEP)
    assert found.host_names == ("gpu01", "gpu02")
    assert found.origins["master_addr"] == "SLURM_STEP_NODELIST"
    assert not found.in_batch_script
    assert read_allocation(BATCH).in_batch_script


@pytest.mark.parametrize(
    ("env", "counts", "message"),
    [
        (PET | {"MASTER_ADDR": "other"}, None, "PET_MASTER_ADDR=job-node-0-0.job and MASTER_ADDR=other disagree"),
        (PET | {"MASTER_PORT": "1"}, None, "PET_MASTER_PORT=29400 and MASTER_PORT=1 disagree"),
        (PET | POD, "nodes", "PET_NNODES=2 and WORLD_SIZE=3 disagree about the machines"),
        (PET | {"WORLD_SIZE": "2", "RANK": "0"}, "nodes", "PET_NODE_RANK=1 and RANK=0 disagree"),
        (PET | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, None, "PET_NNODES=2 and SLURM_NNODES=3 disagree"),
        (PET | {"PET_NNODES": "1:4"}, None, "PET_NNODES=1:4 is a range"),
        (
            BATCH | {"SLURM_JOB_NODELIST": "gpu[01-03]"},
            None,
            r"SLURM_NNODES=2, but SLURM_JOB_NODELIST=.* names 3",
        ),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, None, r"4 launchers on 2 node.*--ntasks-per-node=1 phalanx run -n 2"),
        (POD, None, r"RANK=2 and WORLD_SIZE=3 .* --world-size-counts nodes; .* --world-size-counts processes"),
        (POD | {"PHALANX_WORLD_SIZE_COUNTS": "node"}, None, "nodes or processes, found 'node'. Did you mean 'nodes'"),
        ({"WORLD_SIZE": "2"}, "nodes", "count nodes here .--world-size-counts., but RANK is not set"),
    ],
)
def test_what_cannot_be_is_named_with_both_variables(env: dict[str, str], counts: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_allocation(env, counts)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(RoleError, match="PET_NNODES must be an integer, found 'two'"):
        read_allocation(PET | {"PET_NNODES": "two"})


def options(**flags: Any) -> Options:
    return Options(training_script="train.py", **flags)


def test_gaps_are_filled_and_flags_win() -> None:
    filled = options_from_scheduler.fill(options(http_port=6000), PET)
    assert (filled.nnodes, filled.node_rank, filled.master_addr) == (2, 1, "job-node-0-0.job")
    assert (filled.http_port, filled.nproc_per_node) == (6000, 4)
    assert filled.describe_option("nnodes") == "PET_NNODES=2"
    assert filled.describe_option("http_port") == "--http-port 6000"
    assert request.detect_mode(filled) == ("collective", ("PET_NNODES",))
    assert options_from_scheduler.fill(options(nproc_per_node=1), PET).nproc_per_node == 1


@pytest.mark.parametrize("flags", [{"nnodes": 1}, {"ips": "10.0.0.1"}, {"nnodes": 3}])
def test_other_hosts_than_the_schedulers_leave_it_out(flags: dict[str, Any]) -> None:
    assert options_from_scheduler.fill(options(**flags), PET) == options(**flags)


def test_one_node_fills_in_the_processes_only() -> None:
    filled = options_from_scheduler.fill(
        options(), {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29400"}
    )
    assert filled == options(nproc_per_node=2, origins={"nproc_per_node": "PET_NPROC_PER_NODE"})


def test_the_banner_says_where_values_come_from() -> None:
    shown = dict(options_from_scheduler.fill(options(), PET).banner_items())
    assert shown["nproc_per_node"] == "4 (from PET_NPROC_PER_NODE)"
    assert shown["http_port"] == "29400 (from PET_MASTER_PORT)"
    assert shown["ips"] == "job-node-0-0.job and 1 more (from PET_MASTER_ADDR)"
    assert len(shown) == 13


def test_parameter_servers_over_an_allocation_must_be_listed() -> None:
    flags = options(server_num=1, worker_num=2)
    with pytest.raises(LaunchError, match=r"this host only, but PET_NNODES=2 .* --servers ip:port"):
        options_from_scheduler.fill(flags, PET)
    assert options_from_scheduler.fill(flags, PET | {"PET_NNODES": "1"}) == flags


def test_a_batch_script_is_told_how_to_start_on_all_nodes(
    caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    with caplog.at_level(logging.WARNING, "phalanx.launch"):
        options_from_scheduler.fill(options(), BATCH)
    assert "srun --ntasks-per-node=1 phalanx run" in caplog.text


@pytest.fixture
def this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod at 10.0.0.9, in which the first node's name may mean loopback."""
    names = {"localhost": "127.0.0.1", "gpu01": "127.0.1.1", "far": "10.0.0.1"}
    monkeypatch.setattr(machine, "resolve", lambda host: names.get(host, host))
    monkeypatch.setattr(machine, "resolve_within", lambda host, timeout_s: names.get(host, host))
    monkeypatch.setattr(machine, "is_own_address", lambda address: address in ("10.0.0.9", "127.0.0.1", "127.0.1.1"))
    monkeypatch.setattr(machine, "address_towards", lambda peer: "10.0.0.9")


@pytest.mark.parametrize("name", ["localhost", "gpu01"])
def test_the_first_pod_may_be_told_loopback_as_its_own_name(this_pod: None, name: str) -> None:
    env = PET | {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": name}
    assert nodes.collective_nodes(options_from_scheduler.fill(options(), env), CPU).address == "10.0.0.9"
    own = Machine(cores=4, pod_ip="10.0.0.8")
    assert nodes.collective_nodes(options_from_scheduler.fill(options(), env), own).address == "10.0.0.8"


def test_other_nodes_reach_the_first_by_its_name(this_pod: None) -> None:
    found = nodes.collective_nodes(options_from_scheduler.fill(options(), STEP | {"MASTER_ADDR": "far"}), CPU)
    assert (found.hosts, found.address, found.rank) == (("10.0.0.1",), "10.0.0.9", 1)
    assert [found.name(rank) for rank in (0, 1)] == ["gpu01", "gpu02"]


def test_a_first_host_that_means_nothing_here_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str) -> str:
        raise LaunchError(f"{host} is unknown")

    monkeypatch.setattr(machine, "resolve", unknown)
    with pytest.raises(LaunchError, match=r"SLURM_JOB_NODELIST=gpu01 is the first host .* Set MASTER_ADDR"):
        nodes.collective_nodes(options_from_scheduler.fill(options(), BATCH), CPU)


def test_a_name_that_comes_to_be_known_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    clock = iter(range(100))
    answers = iter([None, None, None, None, "10.0.0.1"])

    def resolve(host: str) -> str:
        if (answer := next(answers)) is None:
            raise LaunchError(f"{host} is unknown")
        return answer

    monkeypatch.setattr(machine, "resolve", resolve)
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    with caplog.at_level(logging.INFO, "phalanx.launch"):
        assert machine.resolve_within("pod-0", 60.0) == "10.0.0.1"
    assert caplog.messages == [
        "server not ready, wait 3 sec to retry...",
        "not ready endpoints:['pod-0'] (no host of this name yet)",
    ]


def test_mistakes_name_the_variable_they_came_from(this_pod: None) -> None:
    with pytest.raises(LaunchError, match=r"PET_NODE_RANK=2 is outside 0\.\.1"):
        nodes.collective_nodes(options_from_scheduler.fill(options(), PET | {"PET_NODE_RANK": "2"}), CPU)
    env = PET | {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "far"}
    with pytest.raises(LaunchError, match="PET_NODE_RANK=0 is the host of PET_MASTER_ADDR=far, which is not"):
        nodes.collective_nodes(options_from_scheduler.fill(options(), env), CPU)
    env = {name: value for name, value in PET.items() if name != "PET_NODE_RANK"}
    with pytest.raises(LaunchError, match=r"PET_NNODES=2 needs .* but --node-rank is missing"):
        nodes.collective_nodes(options_from_scheduler.fill(options(), env), CPU)
