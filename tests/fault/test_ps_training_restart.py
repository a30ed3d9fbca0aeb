"""A server or a worker is killed in the middle of training and started again: the script notices nothing."""

import pytest

from launching import SPARSE_MODEL, launch_servers_warm, result_of

pytestmark = pytest.mark.fault

SCRIPT = (
    SPARSE_MODEL
    + """
import json, os, signal, sys
from pathlib import Path
from phalanx.comm import agreement
from phalanx.ps.client import table_client

agreement.SAY_EVERY_S = 0.5  # so soon one that waits looks whether another was started again
victim, mode = sys.argv[1:]
strategy = fleet.DistributedStrategy(a_sync=mode == "async")
fleet.init(strategy=strategy)
role, pid = px.cluster.Role.detect(), Path("server.pid")
if role.is_server:
    if role.attempt == 0:
        pid.write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    sys.exit()

def train(victim):
    torch.manual_seed(0)
    model = Model()
    model.ids = px.ps.SparseEmbedding(4, init=px.ps.Constant(0.1), name=f"ids of {victim}")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    model = fleet.distributed_model(model)
    last = fleet.worker_index() == 1
    # A server that is asked to end looks up a little later: there must be training then.
    for step in range(1_000_000 if victim == "server, asked to end" else 20):
        if last and role.attempt == 0 and step == 10 and victim != "nobody":
            how = signal.SIGTERM if victim == "server, asked to end" else signal.SIGKILL
            os.kill(os.getpid() if victim == "worker" else int(pid.read_text()), how)
        ids = torch.randint(50, (8, 2), generator=torch.Generator().manual_seed(2 * step + last))
        optimizer.zero_grad()
        F.mse_loss(model(ids), (ids.sum(1, keepdim=True) % 2).float()).backward()
        optimizer.step()
    with torch.no_grad():
        return [model.head.weight.tolist(), model.ids(torch.arange(50)).tolist()]

results = [train(each) for each in (["nobody", victim] if victim == "server" else [victim])]
pushed = table_client.current().mode.store.report()["dense/0"].pushed
print("RESULT", json.dumps({"values": results, "pushed": pushed}), flush=True)
if victim == "worker":
    fleet.save_persistables("saved")
    for call in (fleet.barrier_worker, lambda: fleet.metrics.sum(1), lambda: fleet.load("saved")):
        try:
            print("continued with", call(), flush=True)
        except px.errors.PeerLostError as e:
            print("FAILED", e, flush=True)
fleet.stop_worker()
"""
)

DENSE_ROWS = 2
"""One row each for the weight and the bias of the head."""


def start(folder, victim, mode, *flags):
    (folder / "train.py").write_text(SCRIPT)
    return launch_servers_warm(folder, 1, 2, *flags, "train.py", victim, mode, timeout_s=100.0)


def failures(folder, rank):
    log = (folder / "log" / f"workerlog.{rank}").read_text()
    return [line for line in log.splitlines() if line.startswith(("FAILED", "continued"))]


def run(folder, victim, mode):
    done = start(folder, victim, mode, "--max-restarts", "1")
    assert done.code == 0, done.out + done.err
    assert "Starting it again" in done.out
    assert ("recovered from" in done.log("serverlog.0")) == (victim == "server")
    return [result_of(done.log(f"workerlog.{rank}")) for rank in range(2)]


def test_a_killed_server_loses_no_step(tmp_path):
    for result in run(tmp_path, "server", "sync"):
        calm, killed = result["values"]
        assert killed == calm
        assert result["pushed"] == (1 + 20) * DENSE_ROWS


def test_a_killed_worker_takes_up_training_where_the_servers_are(tmp_path):
    results = run(tmp_path, "worker", "async")
    # The first values count as an update.
    continues = "worker 1 continues where an earlier process of it ended: the servers have 11 updates of that."
    assert (tmp_path / "log" / "workerlog.1").read_text().count(continues) == 1
    # The first values; 20 steps of worker 0; 10 of worker 1, and 20 of its second life.
    assert max(result["pushed"] for result in results) == (1 + 20 + 10 + 20) * DENSE_ROWS
    # What needs all workers says so on both sides, and nobody gets a number of one worker alone.
    alone, others = failures(tmp_path, 1), failures(tmp_path, 0)
    for verb, said in zip(("barrier_worker", "all_reduce", "fleet.load"), alone, strict=True):
        assert f"FAILED {verb} needs all 2 workers, and worker 1 was started again alone" in said
        assert "Leave barriers and metrics out where workers may be started again" in said
    assert "was started again alone, and takes part in no collective call any more" in others[0]
    assert "FAILED all_reduce on rank 0 of 2 lost another rank" in others[1]
    assert "if it was started again, no collective call works any more" in others[1]
    assert "which did not come to 'load'. It was started again alone" in others[2]


def test_without_restarts_a_server_that_someone_ends_fails_the_job_and_is_named(tmp_path):
    done = start(tmp_path, "server, asked to end", "async")
    assert done.code == 143
    assert "server 0 failed first" in done.out
    assert "ended by SIGTERM before all workers had left" in done.log("serverlog.0")
