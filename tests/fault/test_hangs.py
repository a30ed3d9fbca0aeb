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
from launching import BIN, WARM, Launch, free_port, launch_warm, wait_until

pytestmark = pytest.mark.fault

SOON = ("--hang-after", "1", "--hang-timeout", "1")


def hang(folder: Path, fault: Fault, *flags: str) -> Launch:
    (folder / "train.py").write_text(fault.script)
    return launch_warm(folder, "-n", str(fault.ranks), *flags, "train.py")


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
    time.sleep(3.0)  # well beyond --hang-timeout
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
    time.sleep(3.0)  # well beyond --hang-timeout
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
    running.append(
        Launch(("-n", "1:2", "--hang-after", "1", "--hang-timeout", "0", "train.py"), tmp_path, program=WARM)
    )
    wait_until(lambda: listed(running[0]).get("hang"))
    verdict = json.loads((tmp_path / "log" / "hang.json").read_text())
    assert (verdict["culprits"], verdict["works"]) == (["rank 1"], True)
    assert re.match(r"rank 1 is at train\.py:1[23]( in \S+)?; rank 0 waits", verdict["lines"][0])


NODES = """
import os, threading, time
import torch, torch.distributed as dist, torch.nn.functional as F
import phalanx as px
torch.manual_seed(0)
member = os.environ["PHALANX_MEMBER_ID"]

def beat():
    while True:
        open("beat", "w").write("alive")
        time.sleep(0.1)

def load():
    threading.Thread(target=beat, daemon=True).start()
    while not os.path.exists("continues"):
        time.sleep(0.05)  # FAULT

net = torch.nn.Linear(12, 5)
data = torch.utils.data.TensorDataset(torch.randn(1920, 12), torch.randint(0, 5, (1920,)))
model, optimizer, loader = px.distribute(net, torch.optim.SGD(net.parameters(), 0.1), data, global_batch=12)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 30:
        open(f"{member} is at 30", "w").close()
    if step == 90 and IS_FAULTY:
        DO_FAULT
    while IS_FAULTY and step == 100 and not os.path.exists("may end"):
        time.sleep(0.01)
"""


def start_nodes(folder: Path, count: int, is_faulty: str, fault: str, *flags: str) -> list[Launch]:
    """An elastic job of several launchers on this machine, one rank each, and what a rank does at step 90."""
    (folder / "train.py").write_text(NODES.replace("IS_FAULTY", is_faulty).replace("DO_FAULT", fault))
    ips = ",".join(f"127.0.0.{node + 2}" for node in range(count))
    shared = (
        "--ips",
        ips,
        "--nnodes",
        f"1:{count}",
        "-n",
        "1",
        "--http-port",
        free_port(),
        "--hang-after",
        "1",
        *flags,
    )
    logs = [("--node-rank", str(node), "--log-dir", f"log{node}") for node in range(count)]
    return [Launch((*own, *shared, "train.py"), folder, program=WARM) for own in logs]


def hang_of(folder: Path, node: int) -> dict[str, Any]:
    """What the launcher of a node says of the hang there is; empty while there is none."""
    try:
        return json.loads((folder / f"log{node}" / "hang.json").read_text())
    except FileNotFoundError:
        return {}


def test_a_rank_that_is_alive_but_does_not_come_is_named_alike_on_all_nodes_of_an_elastic_job(
    tmp_path: Path, running: list[Launch]
) -> None:
    """Fencing does not end it, for another of its threads writes. The first node is lost before: none collects."""
    job = start_nodes(tmp_path, 3, 'member == "n2.0"', "load()", "--hang-timeout", "30")
    running += job[1:]
    wait_until(lambda: (tmp_path / "n0.0 is at 30").exists())
    job[0].process.kill()
    wait_until(lambda: hang_of(tmp_path, 1) and hang_of(tmp_path, 2))
    job[0].wait().gone_within(5.0)
    verdicts = [hang_of(tmp_path, node) for node in (1, 2)]
    assert verdicts[0]["lines"] == verdicts[1]["lines"]
    line = next(n for n, text in enumerate(NODES.splitlines(), 1) if "# FAULT" in text)
    told = rf"rank 1 \(.+\) is at train\.py:({line - 1}|{line}) in load; rank 0 waits for \d+ s in \w+"
    assert re.match(told, verdicts[0]["lines"][0]), verdicts[0]
    assert verdicts[0]["culprits"] == ["rank 1"]
    # Of its own ranks this node sees that they wait, and no more.
    assert phalanx("why", "--pid", job[1].process.pid).startswith(verdicts[0]["lines"][0])
    (tmp_path / "continues").touch()
    wait_until(lambda: not hang_of(tmp_path, 1) and not hang_of(tmp_path, 2))
    (tmp_path / "may end").touch()
    for node in job[1:]:
        assert node.wait().code == 0, node.out + node.err
        assert re.match(told, report_of(node))
        assert node.out.count("the job is stalled") == 1
        assert "the job makes progress again, after" in node.out


def test_ranks_of_two_nodes_of_an_elastic_job_that_wait_for_each_other_are_named_and_the_job_ends(
    tmp_path: Path,
) -> None:
    """Each says that it waits for the other, so fencing takes none for frozen."""
    job = start_nodes(tmp_path, 2, "True", "dist.recv(torch.ones(4), 1 - dist.get_rank())", "--hang-timeout", "1")
    reports = [report_of(node.wait()) for node in job]
    assert reports[0] == reports[1]
    assert re.match(r"ranks wait for each other: .*recv", reports[0]), reports[0]
    line = next(n for n, text in enumerate(NODES.splitlines(), 1) if "DO_FAULT" in text)
    assert f"train.py:{line}" in reports[0]
    for node, done in enumerate(job):
        assert done.code == 124, done.out + done.err
        ended = json.loads((tmp_path / f"log{node}" / "ended.json").read_text())
        assert ended["first"]["kind"] == "hang"
        done.gone_within(5.0)


def test_a_job_that_goes_on_after_a_report_says_so_and_ends_well(tmp_path: Path, running: list[Launch]) -> None:
    wait = "while not os.path.exists({!r}): time.sleep(0.01)"
    script = fault_named("sleep, gloo").script.replace("time.sleep(1000)", wait.format("reported"))
    script += "steps(50)\n" + wait.format("continues") + "\n"
    done = start(tmp_path, running, script, "--hang-after", "1", "--hang-timeout", "30")
    wait_until(lambda: listed(done).get("hang"))
    (tmp_path / "reported").touch()
    wait_until(lambda: not listed(done).get("hang"))
    (tmp_path / "continues").touch()
    assert done.wait().code == 0, done.out
    assert "rank 1 is at train.py" in report_of(done)
    assert "the job makes progress again, after" in done.out


def test_the_first_steps_may_take_longer(tmp_path: Path) -> None:
    script = fault_named("sleep, gloo").script.replace("time.sleep(1000)", "time.sleep(2.5)")
    (tmp_path / "train.py").write_text(script.replace("\nsteps()\n", "\nsteps(2)\n"))
    done = launch_warm(tmp_path, "-n", "2", *SOON, "train.py")
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
from phalanx.launch.rank.reporter import register_stacks

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
        ("--server-num", "1", "--worker-num", "1", "--hang-after", "2", "--hang-timeout", "1", "train.py"), tmp_path
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
        flags = ("--ips", "127.0.0.1,127.0.0.2", "--node-rank", str(node - 1), "-n", "1", "--log-dir", f"log{node}")
        running.append(Launch((*flags, "--http-port", port, *SOON, "train.py"), tmp_path, program=WARM))
    for job in running:
        job.wait()
        report = report_of(job)
        assert re.match(rf"rank 1 \(.+\) is at train\.py:{fault.lines[0]}; rank 0 waits for \d+ s", report), report
        assert job.code == 124
