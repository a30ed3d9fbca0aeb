"""What a node starts: command lines and variables of the three launch kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import BackendError, SpecError
from phalanx.jobs.attempt.launch_command import LaunchCommand, Rendezvous, build_command, distinct_hosts, loopback_hosts
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.cli.flags import command
from phalanx.launch.request import machine, request
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options

HOSTS = ("10.0.0.1", "10.0.0.2")


def started(node: int = 0, hosts: tuple[str, ...] = HOSTS, **said: Any) -> LaunchCommand:
    said = {"name": "j", "command": "python train.py --lr 0.1", "resources": {"nodes": 2, "procs_per_node": 3}, **said}
    place = Rendezvous(node, hosts, 7000)
    return build_command(TrainingJob.model_validate(said), place, python="/py", logs=Path("/logs"))


def test_our_launcher_starts_the_processes_of_a_node() -> None:
    found = started(1)
    assert found.argv == (
        *("/py", "-m", "phalanx.launch", "--log-dir", "/logs", "-n", "3"),
        *("--ips", "10.0.0.1,10.0.0.2", "--node-rank", "1", "--http-port", "7000"),
        *("train.py", "--lr", "0.1"),
    )
    assert found.variables == {"PYTHONUNBUFFERED": "1", "PHALANX_STOP_GRACE_S": "30"}


def test_one_node_needs_no_addresses() -> None:
    alone = {"nodes": 1, "procs_per_node": 2}
    assert started(hosts=("10.0.0.1",), resources=alone).argv[5:9] == ("--nnodes", "1", "-n", "2")
    assert "--standalone" in started(hosts=("10.0.0.1",), resources=alone, launch="torchrun").argv


def test_torchrun_counts_processes_and_env_counts_nodes() -> None:
    under_torch = started(1, launch="torchrun")
    assert under_torch.argv == (
        *("/py", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1"),
        *("--master-addr=10.0.0.1", "--master-port=7000", "--nproc-per-node=3"),
        *("--no-python", "/py", "-m", "phalanx.jobs.node.rank", "/logs", "/py", "train.py", "--lr", "0.1"),
    )
    # Its ranks get RANK and WORLD_SIZE from torchrun: six processes.
    assert "WORLD_SIZE" not in under_torch.variables
    as_it_is = started(1, launch="env", command="python 'my train.py' -v")
    assert as_it_is.argv == ("python", "my train.py", "-v")
    assert as_it_is.variables == {
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000", "RANK": "1", "WORLD_SIZE": "2"},
        "PYTHONUNBUFFERED": "1",
    }


def test_flags_of_python_become_variables_and_modules_stay_modules() -> None:
    found = started(command="python -u -OO -m my.train x")
    assert found.argv[-3:] == ("-m", "my.train", "x")
    assert found.variables["PYTHONOPTIMIZE"] == "2"


def test_cores_asked_for_are_shared_by_the_processes() -> None:
    resources = {"nodes": 2, "procs_per_node": 3, "cpu": 8}
    assert started(resources=resources).variables["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in started(resources=resources, env={"OMP_NUM_THREADS": "5"}).variables


def test_servers_of_one_node_are_counted() -> None:
    found = started(hosts=("10.0.0.1",), resources={"nodes": 1, "procs_per_node": 2}, servers={"count": 3})
    assert found.argv[5:9] == ("--server-num", "3", "--worker-num", "2")


def test_servers_of_several_nodes_are_dealt_over_them() -> None:
    found = started(1, resources={"nodes": 2, "procs_per_node": 1}, servers={"count": 3})
    assert found.argv[5:13] == (
        *("--servers", "10.0.0.1:7001,10.0.0.2:7002,10.0.0.1:7003"),
        *("--workers", "10.0.0.1:7004,10.0.0.2:7004", "--node-rank", "1", "--http-port", "7000"),
    )


def test_servers_with_hosts_of_their_own_come_first_for_the_launcher() -> None:
    hosts = ("w0", "w1", "s0")
    for node, rank in ((0, "1"), (1, "2"), (2, "0")):
        found = started(node, hosts, resources={"nodes": 2, "procs_per_node": 1}, servers={"count": 1})
        assert found.argv[6] == "s0:7001"
        assert found.argv[8] == "w0:7002,w1:7002"
        assert found.argv[10] == rank


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_beside_servers_compute_on_the_cards_that_the_job_asks_for(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the job to the variables of each process, as the launcher of each node makes them."""
    script = tmp_path / "train.py"
    script.touch()
    hosts = HOSTS[:nodes] + ("10.0.0.9",) * (nodes > 1)
    monkeypatch.setattr(machine, "resolve", lambda host: host)
    monkeypatch.setattr(machine, "is_own_address", lambda address: True)
    resources = {"nodes": nodes, "procs_per_node": 2, "gpu": 2}
    for node in range(len(hosts)):
        is_server = node == nodes
        words = started(node, hosts, command=f"python {script}", resources=resources, servers={"count": 1}).argv[3:]
        values = command.make_context("run", list(words)).params
        asked = Options(**{name: value for name, value in values.items() if name in Options.__dataclass_fields__})
        gpus = () if is_server else ("4", "6")
        here = Machine(cores=4, gpus=gpus, has_cuda_build=not is_server)
        found = request.resolve(asked, here)
        assert found.gpus == (() if is_server else (("4",), ("6",)))
        assert found.counts["worker"] == (0 if is_server else 2)
    assert "--gpus" not in started(0, hosts, resources=resources | {"gpu": 0}, servers={"count": 1}).argv


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"resources": {"procs_per_node": 3, "gpu": 2}},
            "resources.procs_per_node: 3 processes of a node need a GPU each, and resources.gpu is 2. Make",
        ),
        (
            {"command": "torchrun train.py"},
            "starts torchrun, and the job starts a launcher itself. Write",
        ),
        ({"command": "./run.sh"}, "starts no Python program. Write `python train.py ...`"),
        ({"command": "python -X dev train.py"}, "gives Python -X dev, which launchers cannot hand on"),
        ({"servers": {"count": 60}}, "63 servers and workers of a node need a port each, and a job has 39"),
    ],
)
def test_what_no_node_could_start_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        started(**said)


def test_nodes_on_one_machine_get_addresses_that_differ() -> None:
    """As of two slurmd on one host, whose names are one address."""
    assert distinct_hosts(HOSTS, "j", 1) == HOSTS
    found = distinct_hosts(("10.0.0.1", "10.0.0.1"), "j", 1)
    assert found == loopback_hosts("j", 1, 2)
    assert len(set(found)) == 2
    with pytest.raises(BackendError, match=r"nodes 0 and 2 have one address, 10.0.0.1, .* NodeAddr"):
        distinct_hosts(("10.0.0.1", "10.0.0.2", "10.0.0.1"), "j", 1)


def test_every_attempt_on_this_machine_has_addresses_of_its_own() -> None:
    assert loopback_hosts("a", 1, 2) == loopback_hosts("a", 1, 2)
    seen = {loopback_hosts("a", number, 1) for number in range(1, 50)}
    assert len(seen) == 49
    assert all(host.startswith("127.") and not host.startswith("127.0.") for (host,) in seen)
