"""Bags on real servers: equal to `nn.EmbeddingBag` in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx import fleet, ps
from phalanx.comm import context as context_of
from phalanx.ps.stores.fan_out import FanOut
from ps_servers import SECRET, servers
from ranks import run_ranks

pytestmark = pytest.mark.dist

STEPS, BAGS, IDS, DIM = 4, 6, 12, 3


class Bags(nn.Module):
    """A weighted bag and a largest value over one table, and a dense part."""

    def __init__(self, weighted, largest):
        super().__init__()
        self.weighted, self.largest = weighted, largest
        torch.manual_seed(0)
        self.head = nn.Linear(2 * DIM, 1)

    def pooled(self, ids, offsets, weights):
        return ps.lookup([(self.weighted, ids, offsets, weights), (self.largest, ids, offsets)])

    def forward(self, ids, offsets, weights):
        return self.head(torch.cat(self.pooled(ids, offsets, weights), 1))


class PlainBags(Bags):
    """The same over torch's modules."""

    def pooled(self, ids, offsets, weights):
        return [self.weighted(ids, offsets, weights), self.largest(ids, offsets)]


def batch_of(step, rows):
    """Return ids, offsets, weights and targets of some bags of a global batch; each bag has 0 to 3 ids."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (BAGS,), generator=generator)
    ids = torch.randint(IDS, (int(lengths.sum()),), generator=generator).split(lengths.tolist())
    weights = torch.randn(int(lengths.sum()), generator=generator).split(lengths.tolist())
    target = torch.randn(BAGS, 1, generator=generator)[rows]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[rows].cumsum(0)])
    return torch.cat(ids[rows]), offsets, torch.cat(weights[rows]), target


def train(model, optimizer, rows):
    for step in range(STEPS):
        *batch, target = batch_of(step, rows)
        F.mse_loss(model(*batch), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def first_rows():
    return torch.linspace(-1.0, 1.0, IDS * DIM).view(IDS, DIM)


def torch_bag(mode, weight):
    bag = nn.EmbeddingBag(IDS, DIM, mode=mode, include_last_offset=True)
    bag.weight = nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
    return bag


def train_on_servers():
    context = fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    rows = first_rows() + context.rank  # worker 0's values count
    weighted = ps.EmbeddingBag.from_torch(torch_bag("sum", rows), name="tags")
    model = Bags(weighted, ps.EmbeddingBag(DIM, mode="max", include_last_offset=True, name="tags"))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    model = fleet.distributed_model(model)
    train(model, optimizer, slice(context.rank, None, context.world_size))
    fleet.barrier_worker()
    with torch.no_grad():
        rows = model.weighted(torch.arange(IDS), torch.arange(IDS + 1))
    weight = model.head.weight.detach().clone()
    fleet.stop_worker()
    return rows.tolist(), weight.tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_bags_on_servers_train_as_torchs_in_one_process(workers):
    with servers(2) as cluster:
        env = {"PHALANX_SERVER_ENDPOINTS": ",".join(cluster.endpoints), "PHALANX_JOB_SECRET": SECRET.hex()}
        results = run_ranks(train_on_servers, workers, env=env)
    weight = nn.Parameter(first_rows())
    modules = [torch_bag(mode, weight) for mode in ("sum", "max")]
    model = PlainBags(*modules)
    train(model, torch.optim.SGD(model.parameters(), lr=0.2), slice(None))
    for rows, head in results:
        torch.testing.assert_close(torch.tensor(rows), weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(head), model.head.weight.detach(), rtol=1e-5, atol=1e-6)
    context_of.shutdown()


# --- several tables in one lookup -----------------------------------------------------------------------------------

MODES = ("sum", "mean", "sum")


class SeveralBags(nn.Module):
    """Bags of three tables, of which the last is looked up for nothing."""

    def __init__(self, bags):
        super().__init__()
        self.bags = nn.ModuleList(bags)

    def pooled(self, ids, offsets):
        return ps.lookup([(bag, ids, offsets) for bag in self.bags])

    def forward(self, ids, offsets, _weights):
        first, second, _unused = self.pooled(ids, offsets)
        return (first * second).sum(1, keepdim=True) + first[:, :1]


class SeveralPlainBags(SeveralBags):
    """The same over torch's modules."""

    def pooled(self, ids, offsets):
        return [bag(ids, offsets) for bag in self.bags]


def train_several_tables():
    context = fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    bags = [torch_bag(mode, first_rows()) for mode in MODES]
    model = SeveralBags(ps.EmbeddingBag.from_torch(bag, name=f"table{i}") for i, bag in enumerate(bags))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model = fleet.distributed_model(model)
    train(model, optimizer, slice(context.rank, None, context.world_size))
    fleet.barrier_worker()
    with torch.no_grad():
        rows = model.pooled(torch.arange(IDS), torch.arange(IDS + 1))
    fleet.stop_worker()
    return [table.tolist() for table in rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_several_tables_in_one_lookup_train_as_torchs_in_one_process(workers):
    with servers(2) as cluster:
        env = {"PHALANX_SERVER_ENDPOINTS": ",".join(cluster.endpoints), "PHALANX_JOB_SECRET": SECRET.hex()}
        results = run_ranks(train_several_tables, workers, env=env)
    model = SeveralPlainBags(torch_bag(mode, first_rows()) for mode in MODES)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), slice(None))
    assert torch.equal(model.bags[2].weight, first_rows())
    assert not torch.equal(model.bags[1].weight, first_rows())
    for tables in results:
        for table, bag in zip(tables, model.bags, strict=True):
            torch.testing.assert_close(torch.tensor(table), bag.weight.detach(), rtol=1e-5, atol=1e-6)
    context_of.shutdown()


# --- plain forwards in one request ----------------------------------------------------------------------------------

TABLES = 6


class Plain(nn.Module):
    """A module for each column of ids, called one after the other."""

    def __init__(self):
        super().__init__()
        self.columns = nn.ModuleList(
            ps.SparseEmbedding(DIM, init=ps.Normal(1.0), name=f"column{i}") for i in range(TABLES)
        )
        torch.manual_seed(0)
        self.head = nn.Linear(TABLES * DIM, 1)

    def forward(self, ids):
        return self.head(torch.cat([column(ids[:, i]) for i, column in enumerate(self.columns)], 1))


def count_requests(is_distributed, sync):
    """Return the losses of a worker, and how many pulls each step sent to the server."""
    context = fleet.init(strategy=fleet.DistributedStrategy(a_sync=not sync))
    model = Plain()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if is_distributed:
        model = fleet.distributed_model(model)
    sent, losses = [], []
    send = FanOut.send

    def noted(fan_out):
        sent.extend(fan_out.part(server).op for server in fan_out.servers)
        send(fan_out)

    FanOut.send = noted
    counts = []
    for step in range(5):
        ids = torch.randint(IDS, (8, TABLES), generator=torch.Generator().manual_seed(step))
        sent.clear()
        loss = model(ids[context.rank :: context.world_size]).square().mean()
        counts.append(sent.count("pull"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fleet.stop_worker()
    return losses, counts


@pytest.mark.parametrize(("sync", "workers"), [(True, 2), (False, 1)])
def test_a_distributed_model_pulls_all_its_tables_with_one_request(sync, workers):
    results = []
    for is_distributed in (True, False):
        with servers(1) as cluster:
            env = {"PHALANX_SERVER_ENDPOINTS": cluster.endpoints[0], "PHALANX_JOB_SECRET": SECRET.hex()}
            results.append(run_ranks(count_requests, workers, is_distributed, sync, env=env))
    for (losses, counts), (expected, separate) in zip(*results, strict=True):
        assert losses == expected
        assert separate == [TABLES] * 5
        assert counts == [TABLES, TABLES, 1, 1, 1]
