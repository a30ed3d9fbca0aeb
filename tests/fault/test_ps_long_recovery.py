"""A server that the launcher starts again recovers for longer than workers ask for one that is away."""

import pytest

from launching import SPARSE_MODEL, launch_servers_warm, result_of

pytestmark = pytest.mark.fault

RETRY_S = 12

SCRIPT = (
    SPARSE_MODEL
    + """
import json, os, signal, sys, time
from pathlib import Path
from phalanx.ps.client import table_client
from phalanx.ps.server import recovery

fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
role, pid, replay = px.cluster.Role.detect(), Path("server.pid"), recovery.replay

def slow_replay(directory, first):
    records = list(replay(directory, first))
    for record in records:
        time.sleep(float(sys.argv[1]) / len(records))
        yield record

if role.is_server:
    if role.attempt == 0:
        pid.write_text(str(os.getpid()))
    recovery.replay = slow_replay
    fleet.init_server()
    fleet.run_server()
    sys.exit()

torch.manual_seed(0)
model = Model()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
model = fleet.distributed_model(model)
for step in range(20):
    if fleet.worker_index() == 1 and step == 10:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    ids = torch.randint(50, (8, 2), generator=torch.Generator().manual_seed(2 * step + fleet.worker_index()))
    optimizer.zero_grad()
    F.mse_loss(model(ids), (ids.sum(1, keepdim=True) % 2).float()).backward()
    optimizer.step()
print("RESULT", json.dumps(table_client.current().mode.store.report()["dense/0"].pushed), flush=True)
fleet.stop_worker()
"""
)

DENSE_ROWS = 2
"""One row each for the weight and the bias of the head."""


def test_no_worker_is_lost_and_nothing_is_taken_for_a_hang(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"PHALANX_SERVER_RETRY_S": str(RETRY_S)}
    flags = ("--max-restarts", "1", "train.py", str(RETRY_S + 2))
    done = launch_servers_warm(tmp_path, 1, 2, *flags, environment=environment, timeout_s=150.0)
    assert done.code == 0, done.out + done.err
    assert done.out.count("Starting it again") == 1
    assert "does not answer" not in done.out
    for rank in range(2):
        log = done.log(f"workerlog.{rank}")
        assert f"worker {rank} waits: server 0 recovers: " in log
        assert f"worker {rank}: server 0 answers again" in log
        assert result_of(log) == (1 + 20) * DENSE_ROWS
