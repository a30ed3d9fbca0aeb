"""Two launchers on two addresses of this host form one job."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from launching import Launch, free_port, launch

pytestmark = pytest.mark.dist

MEET = """
import os, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.full((2,), float(rank + 1))
dist.all_reduce(x)
print("rank", rank, "attempt", os.environ["PHALANX_ATTEMPT"], "sum", x[0].item(), "of", os.environ["WORLD_SIZE"],
      os.environ["PADDLE_TRAINER_ENDPOINTS"], os.environ["PADDLE_CURRENT_ENDPOINT"], "node", os.environ["GROUP_RANK"],
      "local", os.environ["LOCAL_RANK"], os.environ["PHALANX_JOB_ID"], flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "raise" and rank == 1 or what == "raise once" and rank == 1 and os.environ["PHALANX_ATTEMPT"] == "0":
    raise ValueError("rank 1 has bad data")
if what == "sleep":
    open(f"up.{rank}", "w").write("x")
    time.sleep(100)
dist.all_reduce(x)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "meet.py").write_text(MEET)
    return tmp_path


def node(folder: Path, rank: int, port: str, *arguments: str) -> Launch:
    hosts = ("--ips", "127.0.0.1,127.0.0.2", "--node-rank", str(rank), "--http-port", port)
    return Launch((*hosts, "--log-dir", f"log{rank}", *arguments), folder)


def both(folder: Path, *arguments: str, counts: tuple[str, str] = ("1", "1")) -> list[Launch]:
    port = free_port()
    running = [node(folder, rank, port, "-n", counts[rank], *arguments) for rank in range(2)]
    for one in running:
        one.wait()
    for one in running:
        one.gone_within(0.5)
    return running


def test_two_hosts_train_as_one_job_and_a_restart_restarts_both(folder: Path) -> None:
    first, second = both(folder, "-v", "--max-restarts", "1", "meet.py", "raise once", counts=("1", "2"))
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "attempt 0 sum 6.0" in (folder / "log1" / "attempt-0" / "workerlog.1").read_text()
    texts = [(folder / log).read_text().split() for log in ("log0/workerlog.0", "log1/workerlog.1", "log1/workerlog.2")]
    assert [(t[3], t[5]) for t in texts] == [("1", "6.0")] * 3
    assert len({t[8] for t in texts}) == 1
    endpoints = texts[0][8].split(",")
    assert [t[9] for t in texts] == endpoints
    assert [e.split(":")[0] for e in endpoints] == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
    assert [(t[11], t[13]) for t in texts] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert len({t[14] for t in texts}) == 1
    assert "Run collective mode. gpu arguments:['--ips'], cuda count:0" in first.out


def test_a_schedulers_variables_alone_make_one_job_of_two_hosts(folder: Path) -> None:
    pods = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": free_port(),
    }
    running = [
        Launch(("-v", "--log-dir", f"log{rank}", "meet.py"), folder, environment=pods | {"PET_NODE_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [one.wait().code for one in running] == [0, 0], running[0].out + running[1].out
    assert "rank 1 attempt 0 sum 3.0 of 2" in (folder / "log1" / "workerlog.1").read_text()
    assert "nproc_per_node: 1 (from PET_NPROC_PER_NODE)" in running[0].out
    assert "ips: 127.0.0.1 and 1 more (from PET_MASTER_ADDR)" in running[1].out
    assert "this is node 1 of 2 (from PET_NODE_RANK, PET_NNODES)" in running[1].out
    for one in running:
        one.gone_within(0.5)


def test_pods_whose_world_size_counts_nodes_make_one_job(folder: Path) -> None:
    pods = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    running = [
        Launch(
            ("--world-size-counts", "nodes", "-n", str(rank + 1), "--log-dir", f"log{rank}", "meet.py"),
            folder,
            environment=pods | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [one.wait().code for one in running] == [0, 0], running[0].out + running[1].out
    assert "rank 2 attempt 0 sum 6.0 of 3" in (folder / "log1" / "workerlog.2").read_text()


def test_a_failure_is_told_on_every_host_with_rank_host_and_log(folder: Path) -> None:
    running = both(folder, "meet.py", "raise")
    for one in running:
        assert one.code == 1
        assert "rank 1 failed first" in one.out
        assert "rank 1 raised ValueError: rank 1 has bad data" in one.out
        assert f"on {socket.gethostname()}, pid" in one.out
        assert "log file: log1/workerlog.1" in one.out
        assert one.out.rstrip().endswith("=" * 88)


def test_a_host_that_comes_late_is_named_meanwhile(folder: Path) -> None:
    port = free_port()
    second = node(folder, 1, port, "-n", "1", "meet.py")
    # The first host starts only once the second has said that it is missing.
    said = []
    assert second.process.stdout is not None
    while not said or "not ready endpoints" not in said[-1]:
        said.append(second.process.stdout.readline())
        assert said[-1], "".join(said)
    first = node(folder, 0, port, "-n", "1", "meet.py").wait()
    second.wait()
    assert (first.code, second.code) == (0, 0)
    text = "".join(said)
    assert "server not ready, wait 3 sec to retry..." in text
    assert f"not ready endpoints:['127.0.0.1:{port}'] (Connection refused)" in text


def test_a_host_that_never_comes_ends_the_wait_with_an_error(folder: Path) -> None:
    port = free_port()
    first = node(folder, 0, port, "--timeout", "4", "-n", "1", "meet.py")
    second = Launch(
        ("--ips", "127.0.0.3,127.0.0.2", "--node-rank", "1", "--http-port", port, "--timeout", "1", "meet.py"), folder
    )
    assert second.wait().code == 1
    assert f"The first host did not answer at 127.0.0.3:{port} within 1 s (Connection refused)" in second.err
    assert first.wait().code == 1
    assert "not ready endpoints:['127.0.0.2'] (not started yet)" in first.out
    assert "1 of 2 hosts did not come within 4 s: 127.0.0.2. Start the job there too" in first.err
    first.gone_within(0.5)


@pytest.mark.fault
@pytest.mark.parametrize("victim", [0, 1])
def test_killing_one_launcher_ends_the_job_on_the_other_host(folder: Path, victim: int) -> None:
    port = free_port()
    running = [node(folder, rank, port, "-n", "1", "meet.py", "sleep") for rank in range(2)]
    for rank in range(2):
        running[rank].wait_for(folder / f"up.{rank}")
    killed = time.monotonic()
    running[victim].process.kill()
    other = running[1 - victim]
    other.wait(30)
    # Sleeping ranks have no connection that breaks: only the silence of the other launcher tells.
    assert time.monotonic() - killed < (3.0 if victim == 0 else 10.0)
    assert other.code == 1
    assert re.search(rf"The launcher on 127\.0\.0\.{victim + 1} \(node {victim}\) is gone", other.err)
    running[victim].wait()
    for one in running:
        one.gone_within(1.0)


def test_a_stop_on_one_host_ends_the_job_on_the_other(folder: Path) -> None:
    port = free_port()
    running = [node(folder, rank, port, "-n", "1", "meet.py", "sleep") for rank in range(2)]
    for rank in range(2):
        running[rank].wait_for(folder / f"up.{rank}")
    running[1].process.send_signal(signal.SIGTERM)
    assert running[1].wait().code == 143
    assert running[0].wait().code == 143
    assert re.search(r"the launcher of node 1 ended by signal 15 \(SIGTERM\)", running[0].out)
    for one in running:
        one.gone_within(0.5)


def test_two_launchers_with_one_place_are_told(folder: Path) -> None:
    port = free_port()
    hosts = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--http-port", port)
    first = Launch((*hosts, "--node-rank", "0", "--log-dir", "log0", "meet.py"), folder)
    second = Launch((*hosts, "--node-rank", "1", "--log-dir", "log1", "meet.py"), folder)
    third = Launch((*hosts, "--node-rank", "1", "--log-dir", "log2", "meet.py"), folder)
    ended = None
    deadline = time.monotonic() + 30
    while ended is None and time.monotonic() < deadline:
        ended = next((one for one in (second, third) if one.process.poll() is not None), None)
        time.sleep(0.02)
    assert ended is not None
    assert "Two launchers say they are node 1. Give every host its own --node-rank." in ended.wait().err
    # The first host last: its store goes with it.
    for one in (third, second, first):
        if one is not ended:
            one.process.send_signal(signal.SIGTERM)
            assert one.wait().code == 143


def test_listed_servers_and_workers_over_two_launchers(folder: Path) -> None:
    (folder / "roles.py").write_text(
        "import os, signal, sys, time\n"
        "role = os.environ['TRAINING_ROLE']\n"
        "print(role, os.environ['PHALANX_RANK'], os.environ['PADDLE_CURRENT_ENDPOINT'],\n"
        "      os.environ['PADDLE_PSERVERS_IP_PORT_LIST'], os.environ['PADDLE_TRAINER_ENDPOINTS'], flush=True)\n"
        "open(f'secret.{role}.{os.environ[\"PHALANX_RANK\"]}', 'w').write(os.environ['PHALANX_JOB_SECRET'])\n"
        "if role == 'PSERVER': signal.pause()\n"
        # The launcher ends the servers when the workers have ended.
        "while not os.path.exists('secret.PSERVER.0'): time.sleep(0.01)\n"
    )
    ports = [free_port() for _ in range(3)]
    servers, workers = f"127.0.0.1:{ports[0]}", f"127.0.0.2:{ports[1]},127.0.0.1:{ports[2]}"
    lists = ("--servers", servers, "--workers", workers, "--http-port", free_port())
    running = [
        Launch((*lists, "--node-rank", str(rank), "--log-dir", f"log{rank}", "roles.py"), folder) for rank in range(2)
    ]
    assert [one.wait().code for one in running] == [0, 0], running[0].out + running[1].out
    secrets = {path.read_text() for path in folder.glob("secret.*")}
    assert [len(secret) for secret in secrets] == [64]
    assert not any(secret in one.out + one.err for secret in secrets for one in running)
    assert (folder / "log0" / "serverlog.0").read_text() == f"PSERVER 0 {servers} {servers} {workers}\n"
    assert (folder / "log1" / "workerlog.0").read_text() == f"TRAINER 0 {workers.split(',')[0]} {servers} {workers}\n"
    assert (folder / "log0" / "workerlog.1").read_text() == f"TRAINER 1 {workers.split(',')[1]} {servers} {workers}\n"
    for one in running:
        one.gone_within(0.5)


def test_the_meeting_port_in_use_names_its_owner(folder: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        done = node(folder, 0, port, "meet.py").wait()
    assert done.code == 2
    assert re.search(rf"--http-port {port} on 127\.0\.0\.1 is in use by pid \d+ \(", done.err)


def test_a_counted_job_of_one_host_needs_no_address(folder: Path) -> None:
    assert launch(folder, "--nnodes", "1", "--master-addr", "127.0.0.1", "-n", "2", "meet.py").code == 0


DIFFERENT = {
    "longer": (("127.0.0.1,127.0.0.2", "127.0.0.1,127.0.0.2,127.0.0.3"), (0, 1)),
    "other place": (("127.0.0.1,127.0.0.2", "127.0.0.1,127.0.0.3,127.0.0.2"), (0, 2)),
    "other order": (("127.0.0.1,127.0.0.2", "127.0.0.2,127.0.0.1"), (0, 0)),
}
"""The lists of hosts on two hosts, and which node each says it is."""


def test_lists_of_hosts_that_differ_are_named_on_both_hosts(folder: Path) -> None:
    started = []
    for kind, (lists, ranks) in DIFFERENT.items():
        port = free_port()
        for number, (ips, rank) in enumerate(zip(lists, ranks, strict=True)):
            log = ("--log-dir", f"{kind} {number}")
            command = ("--ips", ips, "--node-rank", str(rank), "--http-port", port, *log, "meet.py")
            started.append((lists, Launch(command, folder)))
    for lists, launcher in started:
        assert launcher.wait(40).code == 2, launcher.out + launcher.err
        differ = r"--ips is 127[\d.,]+ on .* \(node \d\) and 127[\d.,]+ on .*Start every node with"
        assert re.search(differ, launcher.err)
        assert all(f" {ips} on " in launcher.err for ips in lists)
        launcher.gone_within(0.5)


def test_secrets_that_differ_are_refused_before_the_start(folder: Path) -> None:
    ports = [free_port() for _ in range(2)]
    lists = ("--servers", f"127.0.0.1:{ports[0]}", "--workers", f"127.0.0.2:{ports[1]}", "--http-port", free_port())
    running = [
        Launch(
            (*lists, "--node-rank", str(rank), "--log-dir", f"log{rank}", "meet.py"),
            folder,
            environment={"PHALANX_JOB_SECRET": str(rank) * 64},
        )
        for rank in range(2)
    ]
    for one in running:
        assert one.wait(20).code == 2
        assert re.search(r"PHALANX_JOB_SECRET is \(sha256 \w{8}\) on .* and \(sha256 \w{8}\) on", one.err)
        assert "0" * 64 not in one.out + one.err
