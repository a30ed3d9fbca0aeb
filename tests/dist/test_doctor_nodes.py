"""`phalanx doctor` over the nodes of a job, each with its own network; and small containers, in which jobs train."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launching import BIN, launch
from namespaces import ADDRESSES, need_mount_namespaces, two_hosts, with_shared_memory
from phalanx.diagnose.doctor.nodes import MeetingOptions, NodeMeeting
from phalanx.diagnose.doctor.probe import ProbeServer, measure
from phalanx.errors import ConfigError, LaunchError
from phalanx.launch.request import preflight

pytestmark = pytest.mark.dist

DOCTOR = (str(BIN / "phalanx"), "doctor")
QUIET = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    with two_hosts() as both:
        yield both


def doctors(hosts: tuple[list[str], list[str]], *words: str, environment: dict[str, str] | None = None) -> list[str]:
    """Run the doctor on both hosts as a user would; return what each printed."""
    place = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--timeout", "40"]
    running = [
        subprocess.Popen(
            [*inside, *DOCTOR, *place, "--node-rank", str(rank), *words],
            env={**QUIET, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, inside in enumerate(hosts)
    ]
    outcomes = [process.communicate(timeout=90) for process in running]
    assert all(process.returncode in (0, 1) for process in running), outcomes
    assert not any("Traceback" in err for _, err in outcomes), outcomes
    return [out for out, _ in outcomes]


def test_both_nodes_print_one_table_of_all(hosts):
    first, second = doctors(hosts, "--network")
    for shown in (first, second):
        for words in ("0: host-a", "1: host-b", *ADDRESSES, "versions", "clocks", "reach", "/dev/shm", "open files"):
            assert words in shown
        assert re.search(r"every node reaches every other, latency [\d.]+ (µs|ms)", shown)
        assert re.search(r"route +│ cable, 10\.254\.77\.1 +│ cable, 10\.254\.77\.2", shown)
        assert len(re.findall(r"(?:µs|ms), [\d.e+]+ Gbit/s", shown)) == 2


def test_json_has_every_node_and_link(hosts):
    reports = [json.loads(out) for out in doctors(hosts, "--json", "--network")]
    assert reports[0] == reports[1]
    report = reports[0]
    assert [node["host"] for node in report["nodes"]] == ["host-a", "host-b"]
    assert [node["address"] for node in report["nodes"]] == list(ADDRESSES)
    assert {check["name"] for check in report["checks"]} == {"versions", "names", "reach", "clocks"}
    assert all(check["state"] == "ok" for check in report["checks"]), report["checks"]
    assert {(link["from"], link["to"]) for link in report["network"]} == {(0, 1), (1, 0)}
    assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in report["network"])
    assert all(abs(link["clock_ahead_s"]) <= link["clock_error_s"] + 0.05 for link in report["network"])


def test_a_wrong_interface_on_the_nodes_is_a_failure_that_names_it(hosts):
    report = json.loads(doctors(hosts, "--json", environment={"GLOO_SOCKET_IFNAME": "eth7"})[1])
    (check,) = [check for check in report["nodes"][0]["checks"] if check["name"] == "interfaces"]
    assert (check["state"], report["ok"]) == ("failed", False)
    assert "GLOO_SOCKET_IFNAME=eth7 names eth7, which this host lacks" in check["advice"]


def test_a_node_that_does_not_come_is_named(unused_port):
    words = ["--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(unused_port), "--timeout", "1"]
    done = subprocess.run([*DOCTOR, *words], env=QUIET, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "2 of 3 nodes did not come within 1 s: node 1, node 2. Run the same command there" in done.stderr
    done = subprocess.run([*DOCTOR, *words, "--node-rank", "1"], env=QUIET, capture_output=True, text=True, timeout=60)
    assert f"The first node did not answer at 127.0.0.1:{unused_port} within 1 s (Connection refused)" in done.stderr


def test_a_taken_port_is_named(unused_port):
    with socket.create_server(("127.0.0.1", unused_port)):
        options = MeetingOptions(node_rank=0, nnodes=2, master_addr="127.0.0.1", master_port=unused_port, timeout_s=5)
        with pytest.raises(
            LaunchError, match=f"--master-port {unused_port} on 127.0.0.1 is in use by pid {os.getpid()}"
        ):
            NodeMeeting(options)


def test_a_stranger_who_writes_to_the_store_gets_no_say(unused_port):
    """The store asks for no password: what is no report ends the command with a sentence."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    options = MeetingOptions(node_rank=0, nnodes=2, master_addr="127.0.0.1", master_port=unused_port, timeout_s=20)
    meeting = NodeMeeting(options)
    try:
        stranger = TCPStore("127.0.0.1", unused_port, None, False, timeout=timedelta(seconds=5))
        for said in ("[]", "{", '{"node_rank": 1}', "null", "[" * 10_000):
            stranger.set("report/1", said)
            with pytest.raises(ConfigError, match="A node sent"):
                meeting.exchange({}, [], with_bandwidth=False)
            stranger.delete_key("claim/0")
        stranger.add("claim/0", 1)
        with pytest.raises(ConfigError, match="Two nodes say they are node 0"):
            meeting.exchange({}, [], with_bandwidth=False)
        stranger.set("bye/1", "1")
    finally:
        meeting.close()


# --- probes -----------------------------------------------------------------------------------------------------------

ANOTHER_CLOCK = """
import sys, time
ahead = float(sys.argv[1])
real = time.time
time.time = lambda: real() + ahead
from phalanx.diagnose.doctor.probe import ProbeServer
print(ProbeServer("127.0.0.1").port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ahead", [-3.0, 120.0])
def test_a_clock_that_is_off_is_measured(ahead):
    command = [sys.executable, "-c", ANOTHER_CLOCK, str(ahead)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = measure("127.0.0.1", int(process.stdout.readline()), with_bandwidth=False)
        process.communicate()
    assert not link.error
    assert abs(link.clock_ahead_s - ahead) < 0.05 + link.clock_error_s


def test_a_port_without_a_probe_server_is_named(unused_port):
    assert measure("127.0.0.1", unused_port, with_bandwidth=True).error == (
        f"127.0.0.1:{unused_port} cannot be reached (Connection refused)"
    )


def test_a_server_that_stops_in_the_middle_is_an_error_not_a_hang():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_half() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(1)
                client.sendall(b"abc")

        thread = threading.Thread(target=answer_half)
        thread.start()
        assert "cannot be reached" in measure("127.0.0.1", listening.getsockname()[1], with_bandwidth=True).error
        thread.join()


@settings(max_examples=50)
@given(data=st.binary(max_size=60) | st.binary(max_size=20).map(lambda tail: b"B" + tail))
def test_whatever_is_sent_to_a_probe_server_it_answers_the_next(data: bytes) -> None:
    server = ProbeServer("127.0.0.1")
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(data)
        assert not measure("127.0.0.1", server.port, with_bandwidth=False).error
    finally:
        server.close()


# --- small containers -------------------------------------------------------------------------------------------------

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
import phalanx as px

torch.manual_seed(0)
ctx = px.init()
data = [(torch.full((1 << 19,), 1.0 * row), torch.tensor([1.0 * row])) for row in range(16)]  # 2 MB each
loader = DataLoader(data, 4, num_workers=2)
model, optimizer = nn.Linear(256, 1), None
if "ours" in sys.argv:
    model, optimizer, loader = px.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6), loader)
seen = []
for x, y in loader:
    loss = nn.functional.mse_loss(model(x[:, :256]), y)
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (x == y).all()
    seen += y[:, 0].tolist()
assert len(seen) == (8 if "ours" in sys.argv else 16), seen
big = torch.ones(30 << 20)  # 120 MB, more than there is room for
torch.distributed.all_reduce(big)
print("RESULT", ctx.rank, int(big[0]), flush=True)
"""


@pytest.mark.parametrize("loader", ["ours", "torch's own"])
def test_batches_that_a_small_shared_memory_does_not_hold_are_warned_of_and_trained(tmp_path: Path, loader: str):
    need_mount_namespaces()
    (tmp_path / "train.py").write_text(TRAIN)
    program = (*with_shared_memory("2m"), str(BIN / "phalanx"), "run")
    done = launch(tmp_path, "-n", "2", "train.py", loader, program=program)
    assert done.code == 0, done.out + done.err
    assert "/dev/shm has 2 MiB free" in done.err + done.out
    assert "docker run --shm-size=8g" in done.err + done.out
    assert "RESULT 0 2" in done.log("workerlog.0")


def test_doctor_warns_of_the_64_mb_of_a_container(tmp_path: Path):
    need_mount_namespaces()
    shown = subprocess.run(
        [*with_shared_memory("64m"), *DOCTOR, "--json"], env=QUIET, capture_output=True, text=True, cwd=tmp_path
    )
    report = json.loads(shown.stdout)
    (check,) = [check for check in report["checks"] if check["name"] == "/dev/shm"]
    assert (check["state"], check["found"]) == ("warning", "64 MiB free of 64 MiB")
    assert "--shm-size" in check["advice"]


def test_few_open_files_are_warned_of_before_a_start(tmp_path: Path):
    (tmp_path / "train.py").write_text("print('RESULT')\n")
    program = ("sh", "-c", 'ulimit -n 200; exec "$@"', "sh", str(BIN / "phalanx"), "run")
    done = launch(tmp_path, "-n", "2", "train.py", program=program)
    assert done.code == 0, done.out + done.err
    assert "A process may open 200 files only" in done.err + done.out


def test_looking_at_the_host_costs_a_start_almost_nothing():
    times = []
    for _ in range(20):
        started = time.perf_counter()
        preflight.look(os.environ)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02  # the others had to wait for a core
