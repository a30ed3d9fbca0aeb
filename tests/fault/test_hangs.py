"""Jobs that really hang under the launcher: who is named, at which line, why, and that the job ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doctor_faults import FAULTS, Fault
from launching import BIN, Launch, free_port, launch, wait_until

pytestmark = pytest.mark.fault

SOON = ("--hang_after", "1", "--hang_timeout", "1")


def hang(folder: Path, fault: Fault, *flags: str) -> Launch:
    (folder / "train.py").write_text(fault.script)
    return launch(folder, "-n", str(fault.ranks), *flags, "train.py")


def report_of(done: Launch) -> str:
    """The frame that says why the job is stalled, its lines joined again where they were wrapped."""
    found = re.search(r"=+ the job is stalled =+\n(.*?)\n=+\n", done.out, re.DOTALL)
    assert found, done.out + done.err
    return re.sub(r"\s+", " ", found[1])


@pytest.fixture(scope="module")
def hung(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Launch]]]:
    """The jobs of the faults that tests ask for, three at a time: they wait most of their time."""
    asked = [
        item.callspec.params["fault"] for item in request.session.items if "hung" in getattr(item, "fixturenames", ())
    ]
    with ThreadPoolExecutor(3) as running:
        yield {fault.name: running.submit(hang, tmp_path_factory.mktemp("hung"), fault, *SOON) for fault in asked}


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name != "endless loop"], ids=lambda fault: fault.name)
def test_the_rank_the_line_and_the_cause_are_named_and_the_job_ends(
    hung: dict[str, Future[Launch]], fault: Fault
) -> None:
    done = hung[fault.name].result()
    report = report_of(done)
    for line in fault.lines:
        assert f"train.py:{line}" in report, report
    for words in fault.words:
        assert words in report, report
    if len(fault.culprits) == 1:
        assert report.startswith(f"rank {fault.culprits[0]} "), report
    assert done.code == 124
    ended = json.loads(done.log("ended.json"))
    assert ended["first"]["kind"] == "hang"
    assert ended["first"]["rank"] in fault.culprits
    assert "failed first" in done.out
    assert "hung: " in done.out


def fault_named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def phalanx(*arguments: object) -> str:
    done = subprocess.run([BIN / "phalanx", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Launch]]:
    """Jobs of a test that do not end by themselves."""
    jobs: list[Launch] = []
    yield jobs
    for job in jobs:
        job.process.terminate()  # does nothing to one that was waited for
        if job.process.stdout is not None and not job.process.stdout.closed:
            job.wait(20.0)
        job.gone_within(5.0)


def start(folder: Path, jobs: list[Launch], script: str, *flags: str, **more: Any) -> Launch:
    (folder / "train.py").write_text(script)
    jobs.append(Launch(("-n", "2", *flags, "train.py"), folder, **more))
    return jobs[-1]


def listed(job: Launch) -> dict[str, Any]:
    """The entry of a job in `phalanx ps`, empty while it has none."""
    jobs = json.loads(phalanx("ps", "--json"))
    return next((entry for entry in jobs if entry["pid"] == job.process.pid), {})


def test_a_rank_that_works_is_named_and_the_job_goes_on_and_everyone_may_ask(
    tmp_path: Path, running: list[Launch]
) -> None:
    fault = fault_named("endless loop")
    job = start(tmp_path, running, fault.script, *SOON)
    wait_until(lambda: listed(job).get("hang"))
    verdict = listed(job)["hang"]["lines"]
    assert re.match(rf"rank 1 is at train\.py:{fault.lines[0]}; rank 0 waits", verdict[0])
    time.sleep(3.0)  # well beyond --hang_timeout
    assert job.process.poll() is None
    assert f"hung: {verdict[0]} (phalanx why " in phalanx("ps")
    answer = phalanx("why", "--pid", job.process.pid)
    assert re.match(r"rank 1 is at train\.py:\d+; rank 0 waits for \d+ s in all_reduce 26 \(float32\[4\]\)", answer)
    facts = json.loads(phalanx("why", listed(job)["job_id"], "--json"))
    assert (facts["hung"], facts["verdict"]["culprits"], facts["verdict"]["works"]) == (True, ["rank 1"], True)


POOL = """
import multiprocessing

def burn(_):
    while True:
        pass

if rank == 1:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(burn, [0])  # FAULT
dist.all_reduce(x)
"""


def test_a_rank_that_waits_for_processes_of_its_own_works_as_long_as_they_do(
    tmp_path: Path, running: list[Launch]
) -> None:
    job = start(tmp_path, running, fault_named("sleep, gloo").script.partition("\nif rank == 1")[0] + POOL, *SOON)
    wait_until(lambda: listed(job).get("hang"))
    verdict = json.loads((tmp_path / "log" / "hang.json").read_text())
    assert (verdict["culprits"], verdict["works"]) == (["rank 1"], True)
    assert any("a process that it started, is at work" in line for line in verdict["lines"])
    time.sleep(3.0)  # well beyond --hang_timeout
    assert job.process.poll() is None


ELASTIC = """
import os
import torch, torch.nn.functional as F
import phalanx as px
torch.manual_seed(0)
net = torch.nn.Linear(12, 5)
data = torch.utils.data.TensorDataset(torch.randn(960, 12), torch.randint(0, 5, (960,)))
model, optimizer, loader = px.distribute(net, torch.optim.SGD(net.parameters(), 0.1), data, global_batch=16)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    while os.environ["PHALANX_MEMBER_ID"] == "n0.1" and step == 40:
        pass
    optimizer.step()
"""


def test_a_rank_of_an_elastic_job_that_loops_without_end_is_named(tmp_path: Path, running: list[Launch]) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    running.append(Launch(("-n", "1:2", "--hang_after", "1", "--hang_timeout", "0", "train.py"), tmp_path))
    wait_until(lambda: listed(running[0]).get("hang"))
    verdict = json.loads((tmp_path / "log" / "hang.json").read_text())
    assert (verdict["culprits"], verdict["works"]) == (["rank 1"], True)
    assert re.match(r"rank 1 is at train\.py:1[23]( in \S+)?; rank 0 waits", verdict["lines"][0])


def test_a_job_that_goes_on_after_a_report_says_so_and_ends_well(tmp_path: Path, running: list[Launch]) -> None:
    wait = "while not os.path.exists({!r}): time.sleep(0.01)"
    script = fault_named("sleep, gloo").script.replace("time.sleep(1000)", wait.format("reported"))
    script += "steps(50)\n" + wait.format("goes on") + "\n"
    done = start(tmp_path, running, script, "--hang_after", "1", "--hang_timeout", "30")
    wait_until(lambda: listed(done).get("hang"))
    (tmp_path / "reported").touch()
    wait_until(lambda: not listed(done).get("hang"))
    (tmp_path / "goes on").touch()
    assert done.wait().code == 0, done.out
    assert "rank 1 is at train.py" in report_of(done)
    assert "the job makes progress again, after" in done.out


def test_the_first_steps_may_take_longer(tmp_path: Path) -> None:
    script = fault_named("sleep, gloo").script.replace("time.sleep(1000)", "time.sleep(2.5)")
    (tmp_path / "train.py").write_text(script.replace("\nsteps()\n", "\nsteps(2)\n"))
    done = launch(tmp_path, "-n", "2", *SOON, "train.py")
    assert done.code == 0
    assert "the job is stalled" not in done.out


def test_a_job_of_torchrun_is_explained_by_any_of_its_processes(tmp_path: Path, running: list[Launch]) -> None:
    fault = fault_named("deadlocked data worker")
    program = (str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2")
    (tmp_path / "train.py").write_text(fault.script)
    job = Launch(("train.py",), tmp_path, program=program, environment={"TMPDIR": str(tmp_path)})
    running.append(job)
    job.wait_for(tmp_path / "fault")
    wait_until(
        lambda: re.search(r"in Data\.__getitem__.*all_reduce", phalanx("why", "--pid", job.process.pid), re.DOTALL)
    )
    worker = next(n for n, line in enumerate(fault.script.splitlines(), 1) if "# WORKER" in line)
    rank = next(pid for pid in job.alive() if b"RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    for pid in (job.process.pid, rank):
        answer = phalanx("why", "--pid", pid)
        assert f"train.py:{fault.lines[0]} in DataLoader.__next__; rank 0 waits" in answer, answer
        assert f"train.py:{worker} in Data.__getitem__" in answer
        assert "all_reduce" in answer
    assert job.process.poll() is None


def test_a_job_that_goes_on_is_not_called_hung(tmp_path: Path, running: list[Launch]) -> None:
    script = fault_named("sleep, gloo").script.replace("steps()", "steps(1000000)", 2)
    job = start(tmp_path, running, script)
    wait_until(lambda: len(listed(job).get("processes", ())) == 2)
    time.sleep(3.0)
    answer = json.loads(phalanx("why", "--pid", job.process.pid, "--json"))
    assert not answer["hung"], answer["verdict"]


UNREADABLE = """
import sys, time
from phalanx.launch.process.reporter import register_stacks

def load():
    open("up", "w").write("up")
    time.sleep(1000)

register_stacks()
load()
"""


def test_without_the_right_to_trace_a_rank_writes_its_stacks_itself(
    tmp_path: Path, running: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.launch.hang import stacks

    (tmp_path / "rank.py").write_text(UNREADABLE)
    job = Launch(("rank.py",), tmp_path, program=(sys.executable,))
    running.append(job)
    job.wait_for(tmp_path / "up")
    monkeypatch.setattr(stacks, "_spy", lambda: None)
    for _ in range(2):
        found = stacks.read_stacks(job.process.pid)
        assert [(frame.function, frame.line) for frame in found.main] == [("load", 7), ("<module>", 10)]
    job.process.send_signal(signal.SIGSTOP)
    assert "py-spy is not installed" in stacks.read_stacks(job.process.pid, is_stopped=True).problem
    job.process.kill()
    # A process that did not prepare for the signal would die of it.
    plain = subprocess.Popen(["sleep", "100"])
    try:
        assert stacks.read_stacks(plain.pid).threads == ()
        assert plain.poll() is None
    finally:
        plain.kill()
        plain.wait()


SERVED = """
import os, signal, time
import torch, torch.nn.functional as F
import phalanx as px

table = px.ps.SparseEmbedding(4, init=px.ps.Constant(0.1))
model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randint(0, 50, (100000, 2)), torch.zeros(100000, 1))
model, optimizer, loader = px.distribute(model, optimizer, data, batch_size=4)
for step, (ids, target) in enumerate(loader):
    loss = F.mse_loss(model(ids), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 8:
        open("up", "w").write("up")
"""


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, running: list[Launch]) -> None:
    (tmp_path / "train.py").write_text(SERVED)
    job = Launch(
        ("--server_num", "1", "--worker_num", "1", "--hang_after", "2", "--hang_timeout", "1", "train.py"), tmp_path
    )
    running.append(job)
    job.wait_for(tmp_path / "up")
    servers = [p for p in listed(job)["processes"] if p["role"] == "server"]
    os.kill(servers[0]["pid"], signal.SIGSTOP)
    job.wait()
    report = report_of(job)
    assert re.match(
        r"server 0 does not answer; rank 0 waits for \d+ s in \w+ from server 0 called at train\.py:\d+", report
    )
    assert "server 0: it is stopped by a signal or a debugger" in report
    assert job.code == 124
    assert "server 0 failed first" in job.out


def test_launchers_of_several_hosts_name_the_rank_together(tmp_path: Path, running: list[Launch]) -> None:
    fault = fault_named("sleep, gloo")
    (tmp_path / "train.py").write_text(fault.script)
    port = free_port()
    for node in (1, 2):
        flags = ("--ips", "127.0.0.1,127.0.0.2", "--node_rank", str(node - 1), "-n", "1", "--log_dir", f"log{node}")
        running.append(Launch((*flags, "--http_port", port, *SOON, "train.py"), tmp_path))
    for job in running:
        job.wait()
        report = report_of(job)
        assert re.match(rf"rank 1 \(.+\) is at train\.py:{fault.lines[0]}; rank 0 waits for \d+ s", report), report
        assert job.code == 124
