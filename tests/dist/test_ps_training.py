"""Models with tables on real servers: equal to one process where the mode promises it; what cannot work is named."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx import fleet, ps
from phalanx.comm import context as context_of
from phalanx.ps import attach
from ps_servers import SECRET, servers
from ranks import run_ranks

pytestmark = pytest.mark.dist

STEPS, ROWS, IDS, DIM = 5, 6, 20, 3


def model_of(**settings):
    torch.manual_seed(0)
    return WideDeep(**settings)


class WideDeep(nn.Module):
    """A sparse part, a dense part, and a layer that some steps do not use."""

    def __init__(self, **settings):
        super().__init__()
        self.deep = ps.SparseEmbedding(DIM, init=ps.Normal(1.0), name="deep", **settings)
        self.wide = ps.SparseEmbedding(1, name="wide", **settings)
        self.body = nn.Sequential(nn.Linear(2 * DIM, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.extra = nn.Linear(DIM, 1)

    def forward(self, ids, use_extra=False):
        deep, wide = ps.lookup([(self.deep, ids), (self.wide, ids)])
        out = self.body(deep.flatten(1)) + wide.sum(1)
        return out + self.extra(deep[:, 0]) if use_extra else out


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(IDS, (ROWS, 2), generator=generator), torch.randn(ROWS, 1, generator=generator)


def loss_of(model, step, rows):
    ids, target = data(step)
    return F.mse_loss(model(ids[rows], use_extra=step == 1), target[rows])


def state_of(model):
    """Everything that was trained, by name."""
    model.eval()
    with torch.no_grad():
        rows = {name: getattr(model, name)(torch.arange(IDS)).tolist() for name in ("deep", "wide")}
    return rows | {
        name: p.tolist() for name, p in model.state_dict().items() if "running" not in name and "batch" not in name
    }


def assert_same(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        theirs, ours = np.array(value), np.array(found[name])
        assert np.linalg.norm(ours - theirs) <= tolerance * max(np.linalg.norm(theirs), 1.0), name


def job(endpoints, secret=SECRET):
    listed = ",".join(endpoints)
    return {
        "PHALANX_SERVER_ENDPOINTS": listed,
        "PADDLE_PSERVERS_IP_PORT_LIST": listed,
        "PHALANX_JOB_SECRET": secret.hex(),
    }


def train(style, configs, kind, settings, sync=True):
    """One worker's training; the body runs in eval mode, so that batch norm does not tell workers apart."""
    strategy = fleet.DistributedStrategy(a_sync=not sync, a_sync_configs=configs)
    context = fleet.init(strategy=strategy)
    model = model_of(seed=4)
    if context.rank:  # worker 0's values count
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    model.body[1].eval()
    optimizer = kind(model.parameters(), **settings)
    if style == "fleet":
        optimizer = fleet.distributed_optimizer(optimizer, strategy)
        model = fleet.distributed_model(model)
    elif style == "optimizer only":
        optimizer = fleet.distributed_optimizer(optimizer)
    else:
        model, optimizer, _ = px.distribute(model, optimizer)
    fleet.init_worker()
    rows = slice(context.rank, None, context.world_size)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step()
    fleet.barrier_worker()
    state = state_of(model)
    fleet.stop_worker()
    return state, attach.current().skipped


def one_process(kind, settings):
    """The same training on the whole batch, in this process, without servers."""
    model = model_of(seed=4)
    model.body[1].eval()
    optimizer = kind(model.parameters(), **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, slice(None)).backward()
        optimizer.step()
    state = state_of(model)
    attach.current().finish()
    context_of.shutdown()
    return state


SGD = (torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    ("style", "configs", "rule", "n"),
    [
        ("fleet", {}, SGD, 1),
        ("optimizer only", {}, SGD, 2),
        ("distribute", {"dense": "all_reduce"}, SGD, 2),
        ("distribute", {}, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), 1),
        ("distribute", {}, (torch.optim.Adam, {"lr": 0.01}), 1),
    ],
)
def test_sync_training_of_two_workers_equals_one_process(style, configs, rule, n):
    with servers(n, workers=2) as endpoints:
        found = run_ranks(train, 2, style, configs, *rule, env=job(endpoints))
    expected = one_process(*rule)
    for state, skipped in found:
        assert_same(state, expected)
        assert skipped == 0
