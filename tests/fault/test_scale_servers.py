"""The number of servers changes while workers train: the tables are those of a calm run."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launching import BIN, SPARSE_MODEL, WARM, Launch, result_of, wait_until

pytestmark = pytest.mark.fault

SCRIPT = (
    SPARSE_MODEL
    + """
import hashlib, json, os, sys, time
from pathlib import Path
from phalanx.ps.client import table_client

is_sync = os.environ["MODE"] == "sync"
fleet.init(strategy=fleet.DistributedStrategy(a_sync=not is_sync))
if fleet.is_server():
    status = Path(os.environ["PHALANX_STATUS_FILE"])
    status.with_suffix(".pid").write_text(str(os.getpid()))
    while Path("hold").exists() and status.name.count(".") == 4:  # one of the new servers
        time.sleep(0.01)
    fleet.init_server()
    fleet.run_server()
    sys.exit()
worker, stop, LR = fleet.worker_index(), Path("stop"), 2**-10

class Sum(nn.Module):
    # Whatever the rows are, each id of a batch gets a gradient of 1: what they are in the end depends on no order.
    def __init__(self):
        super().__init__()
        self.ids = px.ps.SparseEmbedding(4)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, ids):
        return self.ids(ids).sum() + self.bias.sum()

def last_step(step):
    # In mode sync, worker 1 begins step k + 2 when worker 0 has pushed step k + 1: the file is there by then.
    if worker == 0 and Path("scaled").exists() and not stop.exists():
        stop.with_suffix(".part").write_text(str(step + 3))
        stop.with_suffix(".part").rename(stop)
    return int(stop.read_text()) if stop.exists() else step + 1

def train(name):
    torch.manual_seed(0)
    about = {"max_bytes": 1 << 14} if os.environ.get("SPILL") else {}
    entry = {"entry": px.ps.CountFilter(3)} if is_sync else {}
    model = Model() if is_sync else Sum()
    model.ids = px.ps.SparseEmbedding(4, init=px.ps.Constant(1.0), name=name, **entry, **about)
    make = torch.optim.Adam if is_sync else torch.optim.SGD
    optimizer = fleet.distributed_optimizer(make(model.parameters(), lr=LR))
    model = fleet.distributed_model(model)
    step = 0
    while step < last_step(step):
        ids = torch.randperm(500, generator=torch.Generator().manual_seed(2 * step + worker))[:16].view(8, 2)
        optimizer.zero_grad()
        output = model(ids)
        loss = F.mse_loss(output, (ids.sum(1, keepdim=True) % 2).float()) if is_sync else output
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            Path(f"part.{worker}").write_text(f"{os.getpid()} {step}")
            Path(f"part.{worker}").rename(f"trains.{worker}")
    store = table_client.current().mode.store
    store.flush()
    if not is_sync:
        Path(f"done.{worker}").touch()
        while not all(Path(f"done.{w}").exists() for w in range(2)):
            time.sleep(0.01)
    with torch.no_grad():
        rows = model.ids(torch.arange(500)).tolist()
    if is_sync:
        dense = [parameter.tolist() for parameter in model.parameters() if parameter.numel() < 100]
        return {"step": step, "sha256": hashlib.sha256(json.dumps([dense, rows]).encode()).hexdigest()}
    changes = [(1 - value) / LR for row in rows for value in row]
    is_whole = all(change == round(change) for change in changes)
    return {"step": step, "is_whole": is_whole, "sum": sum(changes), "pushed": store.report()[name].pushed}

results = [train(name) for name in (("scaled", "calm") if is_sync else ("scaled",))]
print("RESULT", json.dumps([os.getpid(), *results]), flush=True)
fleet.stop_worker()
"""
)


@contextlib.contextmanager
def training(folder: Path, servers: int, mode: str = "sync", *flags: str, **environment: str) -> Iterator[Launch]:
    """Run a job until the block ends, which sees to it that it has ended."""
    (folder / "train.py").write_text(SCRIPT)
    arguments = ("--server_num", str(servers), "--worker_num", "2", *(flags or ("--max_restarts", "3")), "train.py")
    job = Launch(arguments, folder, program=WARM, environment={"MODE": mode, **environment})
    try:
        for worker in range(2):
            wait_until((folder / f"trains.{worker}").exists)
        yield job
    finally:
        if job.process.poll() is None:
            job.process.kill()


def order(job: Launch, count: int) -> list[str]:
    return [str(BIN / "phalanx"), "scale-servers", str(job.process.pid), str(count), "--json"]


def scale(job: Launch, count: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(order(job, count), capture_output=True, text=True, check=False)


def refusal(job: Launch, count: int) -> str:
    """Return why the number of servers stays as it is."""
    refused = scale(job, count)
    assert refused.returncode == 1, refused.stdout
    return refused.stderr


def pid_of(job: Launch, server: str) -> int:
    """Return the process of a server by the name of its status file; 0 while it has not begun."""
    path = job.cwd / "log" / f"status.server.{server}.pid"
    return int(path.read_text() or 0) if path.exists() else 0


@contextlib.contextmanager
def scaling(job: Launch, count: int) -> Iterator[subprocess.Popen[str]]:
    """Change the number of servers for the first time. In the block the new ones have begun, and have no tables yet."""
    hold = job.cwd / "hold"
    hold.touch()
    with subprocess.Popen(order(job, count), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        try:
            wait_until(lambda: all(pid_of(job, f"{rank}.1") for rank in range(count)))
            yield command
        finally:
            hold.unlink()
        if command.returncode is None:
            command.communicate(timeout=60.0)


def end(job: Launch) -> list[Any]:
    """Let the workers train three steps more, and then the calm run in mode sync; return what each worker printed."""
    (job.cwd / "scaled").touch()
    done = job.wait(100.0)
    done.gone_within(1.0)
    assert done.code == 0, done.out + done.err
    return [result_of(done.log(f"workerlog.{worker}")) for worker in range(2)]


def progress(job: Launch) -> list[list[int]]:
    """Return pid and steps of each worker, but for its last ten steps."""
    return [[int(word) for word in (job.cwd / f"trains.{worker}").read_text().split()] for worker in range(2)]


def train_on(job: Launch) -> None:
    """Wait until both workers have made 20 steps more."""
    before = progress(job)
    wait_until(lambda: all(now[1] > then[1] + 20 for now, then in zip(progress(job), before, strict=True)))


def check_sums(job: Launch) -> None:
    """See that every gradient that the servers count is in the rows, once."""
    for _, result in end(job):
        assert result["is_whole"]
        assert result["sum"] == 4 * result["pushed"]


@pytest.mark.parametrize("about", [{}, {"SPILL": "1"}], ids=["memory", "files"])
def test_other_numbers_of_servers_have_the_rows_of_a_calm_run(tmp_path: Path, about: dict[str, str]) -> None:
    with training(tmp_path, 2, **about) as job:
        pids = [pid for pid, _ in progress(job)]
        for before, count in ((2, 3), (3, 1), (1, 2)):
            report = scale(job, count)
            assert report.returncode == 0, report.stderr
            outcome = json.loads(report.stdout)
            assert (outcome["before"], outcome["servers"]) == (before, count)
            train_on(job)
        for pid, (same_pid, scaled, calm) in zip(pids, end(job), strict=True):
            assert pid == same_pid
            assert scaled == calm
        events = (tmp_path / "log" / "events.launcher.0.jsonl").read_text().splitlines()
        changes = [(event["kind"], event["before"], event["servers"]) for event in map(json.loads, events)]
        assert changes == [("servers", 2, 3), ("servers", 3, 1), ("servers", 1, 2)]
        assert sorted(p.name for p in (tmp_path / "log" / "servers").iterdir()) == ["layout-3", "layout.json"]


def test_async_training_loses_no_push_and_counts_none_twice(tmp_path: Path) -> None:
    with training(tmp_path, 2, "async") as job:
        for count in (3, 1):
            assert scale(job, count).returncode == 0
            train_on(job)
        results = [result for _, result in end(job)]
    pushed = 16 * sum(result["step"] for result in results)
    for result in results:
        assert (result["is_whole"], result["pushed"], result["sum"]) == (True, pushed, 4 * pushed)


@pytest.mark.parametrize("server", ["0", "0.1"], ids=["an old one", "a new one"])
def test_a_server_that_is_killed_in_the_middle_leaves_the_job_with_those_it_has(tmp_path: Path, server: str) -> None:
    with training(tmp_path, 2) as job:
        with scaling(job, 3) as command:
            os.kill(pid_of(job, server), signal.SIGKILL)
            # Those that have not read their tables are ended at once.
            _, refused = command.communicate(timeout=60.0)
            assert command.returncode == 1
        assert (
            f"The job keeps its 2 servers: {'new ' if server == '0.1' else ''}server 0 was killed by SIGKILL; read"
            in refused
        )
        train_on(job)
        assert scale(job, 1).returncode == 0
        train_on(job)
        for _, scaled, calm in end(job):
            assert scaled == calm


def test_a_worker_that_is_killed_in_the_middle_is_started_again_beside_the_servers_there_are(tmp_path: Path) -> None:
    with training(tmp_path, 2, "async") as job:
        with scaling(job, 1) as command:
            pid = progress(job)[1][0]
            os.kill(pid, signal.SIGKILL)
            _, refused = command.communicate(timeout=60.0)
            assert command.returncode == 1
        assert "The job keeps its 2 servers: rank 1 was killed by SIGKILL; read" in refused
        wait_until(lambda: progress(job)[1][0] != pid)
        assert scale(job, 3).returncode == 0
        train_on(job)
        check_sums(job)


def test_workers_of_a_job_that_is_stopped_in_the_middle_leave_at_once(tmp_path: Path) -> None:
    with training(tmp_path, 2, "async", "--max_restarts", "3", "--worker_num", "1:2") as job, scaling(job, 3):
        job.process.send_signal(signal.SIGTERM)
        done = job.wait(20.0)
    done.gone_within(1.0)
    assert done.code == 0, done.out + done.err
    for worker in range(2):
        assert f"worker {worker} leaves: it was asked to by SIGTERM" in done.log(f"workerlog.{worker}")
    assert not (tmp_path / "log" / "servers" / "layout-1").exists()


def test_new_servers_and_workers_that_are_killed_afterwards_are_started_again(tmp_path: Path) -> None:
    with training(tmp_path, 2, "async") as job:
        assert scale(job, 3).returncode == 0
        pid = progress(job)[0][0]
        for victim in (pid_of(job, "2.1"), pid):
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: progress(job)[0][0] != pid)
        train_on(job)
        check_sums(job)
        assert job.log("serverlog.2").count("recovered from") == 2


def test_the_whole_job_is_started_again_with_the_new_number_of_servers(tmp_path: Path) -> None:
    with training(tmp_path, 2, "async") as job:
        assert scale(job, 3).returncode == 0
        launcher, pids = job.process.pid, [pid for pid, _ in progress(job)]
        os.kill(int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: all(now[0] != pid for now, pid in zip(progress(job), pids, strict=True)))
        assert "The job has 3 servers already." in refusal(job, 3)
        assert scale(job, 2).returncode == 0
        train_on(job)
        check_sums(job)
        assert "restart 1 of 3" in job.out


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with training(tmp_path, 2) as job:
        with scaling(job, 3) as command:
            assert "is being changed: the new servers read them. Wait until" in refusal(job, 1)
            restart = [BIN / "phalanx", "restart-servers", str(job.process.pid)]
            refused = subprocess.run(restart, capture_output=True, text=True, check=False)
            assert "The number of servers is being changed" in refused.stderr
            listed = subprocess.run([BIN / "phalanx", "ps"], capture_output=True, text=True, check=True).stdout
            assert "2 servers -> 3 servers: the new servers read them" in listed
        assert command.returncode == 0
        assert "The job has 3 servers already." in refusal(job, 3)
        end(job)


def test_a_job_whose_servers_keep_no_state_has_as_many_as_before(tmp_path: Path) -> None:
    with training(tmp_path, 2, "sync", "--max_restarts", "0") as job:
        assert "has no servers whose number can change: phalanx run --max-restarts 1" in refusal(job, 3)
        end(job)
