"""Scripts with parameter servers under the real launcher, in the words of Fleet and in torch's own idiom."""

import pytest

from launching import SPARSE_MODEL, launch_servers_warm, launch_warm, result_of

pytestmark = pytest.mark.dist

MODEL = (
    SPARSE_MODEL
    + """
import json, sys

def loss_of(model, step, rows):
    ids = torch.randint(50, (8, 2), generator=torch.Generator().manual_seed(step))
    return F.mse_loss(model(ids[rows]), (ids[rows].sum(1, keepdim=True) % 2).float())

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
strategy = fleet.DistributedStrategy()
if sys.argv[1] == "sync":
    strategy.a_sync = False
elif sys.argv[1] == "geo":
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 4}

def train():
    ctx = px.init()
    rows = slice(ctx.rank, None, ctx.world_size)
    first = loss_of(model, 0, slice(None)).item()
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step()
    with torch.no_grad():
        last = loss_of(model, 0, slice(None)).item()
    assert last < first, (first, last)
    if ctx.rank == 0:
        print("RESULT", json.dumps(last), flush=True)
"""
)

FLEET = (
    MODEL
    + """
fleet.init(is_collective=False)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    print("SERVED", flush=True)
else:
    fleet.init_worker()
    train()
    fleet.stop_worker()
"""
)

TORCH = (
    MODEL
    + """
model, optimizer, _ = px.distribute(model, optimizer, strategy=strategy)
assert px.init().role.is_worker
train()
"""
)

FAILS = FLEET.replace("    train()\n", "    train()\n    assert not fleet.is_first_worker(), 'a bug of the script'\n")


def test_the_words_of_fleet_train_on_servers(tmp_path):
    (tmp_path / "train.py").write_text(FLEET)
    done = launch_servers_warm(tmp_path, 2, 2, "train.py", "sync")
    assert done.code == 0, done.out + done.err + done.log("workerlog.0")
    assert "SERVED" in done.log("serverlog.1")
    assert "parameter server: mode sync, 2 workers, 2 servers" in done.log("workerlog.0")
    assert "first broadcast" not in done.log("workerlog.0"), "dense parameters live on the servers"


def test_a_server_that_does_not_serve_ends_the_job_at_once(tmp_path):
    (tmp_path / "train.py").write_text(FLEET.replace("fleet.run_server()\n", "sys.exit(0)\n"))
    done = launch_servers_warm(tmp_path, 1, 2, "train.py", "sync")
    assert done.code == 1
    assert "server 0 raised RoleError: the script ended on server 0 without serving" in done.out + done.err


def test_distribute_serves_on_a_server_and_the_same_file_runs_alone(tmp_path):
    (tmp_path / "train.py").write_text(TORCH)
    done = launch_servers_warm(tmp_path, 1, 2, "train.py", "sync")
    assert done.code == 0, done.out + done.err + done.log("workerlog.0")
    assert "all workers have left" in done.log("serverlog.0")
    alone = launch_warm(tmp_path, "--log-dir", "alone", "-n", "1", "train.py", "sync")
    assert alone.code == 0
    # The table is named after its place in the model in both runs, so both start from the same rows.
    log = (tmp_path / "alone" / "workerlog.0").read_text()
    assert result_of(done.log("workerlog.0")) == pytest.approx(result_of(log), abs=1e-5)


def test_a_worker_that_fails_after_training_in_geo_mode_ends_the_job_with_its_error(tmp_path):
    (tmp_path / "train.py").write_text(FAILS)
    done = launch_servers_warm(tmp_path, 2, 2, "train.py", "geo")
    assert done.code == 1
    assert "rank 0 raised AssertionError: a bug of the script" in done.out + done.err
    # It trained: the loss fell, and the servers added up what the copies had learned.
    assert "parameter server: mode geo, 2 workers, 2 servers" in done.log("workerlog.0")
    assert result_of(done.log("workerlog.0")) > 0
