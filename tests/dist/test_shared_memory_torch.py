"""What torch builds on a process group works unchanged over shared memory, and so do jobs that span hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx as px
from phalanx import _core
from phalanx.comm.shared_memory import hosts
from phalanx.errors import PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.dist


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def batch(rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 8, generator=random).double(), torch.randint(4, (rows,), generator=random)


def reference(size: int) -> nn.Module:
    """Two SGD steps of one process over the batches of all ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sum(F.cross_entropy(model(x), y) for x, y in map(batch, range(size))).div(size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(model: nn.Module, rows: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(model(rows[0]), rows[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(found: dict[str, Any], wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        got = found[name]
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
def test_torch_trains_exactly_over_shared_memory(n: int, tmp_path: Path):
    run_ranks(_torch_parts, n, str(tmp_path))


def _torch_parts(folder: str) -> None:
    context = px.init()
    assert dist.get_backend() == "shm"
    rank, size = context.rank, context.world_size
    wanted = reference(size)
    ddp = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    train(ddp, batch(rank))
    equal(ddp.module.state_dict(), wanted)
    sharded = _fsdp(rank, size, wanted)
    _checkpoint(sharded, wanted, folder)
    _tensor_parallel(size)
    _pipeline(rank, size)
    _functional(rank, size)
    _objects(rank, size)


def _fsdp(rank: int, size: int, wanted: nn.Module) -> nn.Module:
    model = network()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, batch(rank))
    equal(model.state_dict(), wanted)
    return model


def _checkpoint(sharded: nn.Module, wanted: nn.Module, folder: str) -> None:
    dcp.save(sharded.state_dict(), checkpoint_id=folder)
    loaded = {name: torch.zeros_like(value) for name, value in wanted.state_dict().items()}
    dcp.load(loaded, checkpoint_id=folder)
    equal(loaded, wanted)


def _tensor_parallel(size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    wanted, model = network(), network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    rows = batch(9)
    train(wanted, rows)
    train(model, rows)
    equal(model.state_dict(), wanted)
    whole = torch.arange(24.0).view(4, 6)
    parts = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert torch.equal(parts.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    assert torch.equal(parts.redistribute(placements=[Replicate()]).to_local(), whole)


def _pipeline(rank: int, size: int) -> None:
    model = network()
    cut = {2: (2,), 4: (2, 3, 4)}[size]
    bounds = (0, *cut, len(model))
    part = deepcopy(model[bounds[rank] : bounds[rank + 1]])
    schedule = Schedule1F1B(PipelineStage(part, rank, size, torch.device("cpu")), 4, loss_fn=F.cross_entropy)
    x, y = batch(5, rows=8)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y) if rank == size - 1 else schedule.step()
    F.cross_entropy(model(x), y).backward()
    for mine, whole in zip(part.parameters(), model[bounds[rank] : bounds[rank + 1]].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-12, atol=1e-12)


def _functional(rank: int, size: int) -> None:
    x = torch.full((4,), float(rank))
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert torch.equal(total, torch.full((4,), float(sum(range(size)))))
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    gathered = gather(x, 0, dist.group.WORLD)
    assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(4))
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
    part = scatter(gathered.clone(), "sum", 0, dist.group.WORLD)
    assert torch.equal(part, torch.full((4,), float(rank * size)))
    swapped = functional.all_to_all_single(gathered.clone(), None, None, dist.group.WORLD)
    assert torch.equal(swapped, torch.full((4 * size,), float(rank)))


def _objects(rank: int, size: int) -> None:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": r} for r in range(size)]
    said = ["hello" if rank == 1 else None]
    dist.broadcast_object_list(said, src=1)
    assert said == ["hello"]
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,), check_invariants=True)
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.ones(size))


def _hosts(*sizes: int) -> Callable[[int], dict[str, str]]:
    names = [f"host-{i}" for i, size in enumerate(sizes) for _ in range(size)]
    return lambda rank: {"PHALANX_HOST_ID": names[rank]}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (1, 1)])
def test_ranks_of_several_hosts_reduce_within_and_then_between(sizes: tuple[int, ...]):
    outcomes = run_ranks(_several_hosts, sum(sizes), env_of_rank=_hosts(*sizes), expect_failure=True)
    assert [o.message for o in outcomes if o.failed] == []
    for outcome in outcomes:
        assert "init shm+gloo context nranks" in outcome.output


def _several_hosts() -> None:
    context = px.init()
    rank, size = context.rank, context.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for length in (0, 1, 1001, 300_011):
            x = torch.full((length,), rank + 1, dtype=dtype)
            dist.all_reduce(x)
            assert x.eq(size * (size + 1) // 2).all()
    for op, wanted in ((dist.ReduceOp.AVG, (size + 1) / 2), (dist.ReduceOp.MAX, size)):
        x = torch.full((5,), rank + 1.0)
        assert dist.all_reduce(x, op, async_op=True).wait()
        assert x.eq(wanted).all()
    whole = torch.full((5,), rank + 1)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.eq((size + 1) // 2).all()
    _tensors_with_gaps(rank, size)
    ddp = nn.parallel.DistributedDataParallel(network())
    train(ddp, batch(rank))
    equal(ddp.module.state_dict(), reference(size))
    everyone = [torch.empty(2) for _ in range(size)]
    dist.all_gather(everyone, torch.full((2,), float(rank)))
    assert [t[0].item() for t in everyone] == list(range(size))
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
            dist.P2POp(dist.irecv, got := torch.empty(1), (rank - 1) % size),
        ]
    ):
        work.wait()
    assert got.item() == (rank - 1) % size
    near = dist.new_group([size - 2, size - 1])
    if rank >= size - 2:
        dist.all_reduce(x := torch.ones(3), group=near)
        assert x.eq(2).all()
    dist.barrier()


def _tensors_with_gaps(rank: int, size: int) -> None:
    """What gloo would read from the memory between the numbers, and write over it."""
    for is_async in (False, True):
        matrix = torch.full((3, 2), float(rank))
        work = dist.broadcast(matrix[:, 0], size - 1, async_op=is_async)
        assert work is None or work.wait()
        assert matrix.tolist() == [[size - 1, rank]] * 3
        matrix.fill_(rank + 1)
        work = dist.reduce(matrix[:, 1], 0, async_op=is_async)
        assert work is None or work.wait()
        total = size * (size + 1) / 2 if rank == 0 else rank + 1
        assert matrix.tolist() == [[rank + 1, total]] * 3


def test_a_call_between_hosts_that_fails_is_told_to_the_rest_of_the_host():
    """Rank 1 alone has nobody on the other host to hear it from."""
    outcomes = run_ranks(_lose_a_host, 3, env_of_rank=_hosts(2, 1))
    assert outcomes[0]
    assert "left the group" in outcomes[1]


def _lose_a_host() -> str:
    rank = px.init().rank
    dist.all_reduce(torch.ones(3))
    if rank == 2:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


def test_an_errand_that_was_not_begun_ends_with_its_group():
    with open(os.memfd_create("test"), "wb") as memory:
        memory.truncate(_core.SharedGroup.bytes_for(1))
        core = _core.SharedGroup(memory.fileno(), 0, 1, "rank 0", 5.0)
    between = hosts.Between(core, dist.HashStore(), 0, [[0]], timedelta(seconds=5))
    is_over = threading.Event()
    between._thread.submit(is_over.wait)
    errand = between.all_reduce(torch.ones(3), 0)
    with pytest.raises(PeerLostError, match=r"all_reduce between hosts timed out after 0\.01 s"):
        between.wait(errand, 0.01)
    between.close()
    is_over.set()
    between.tend(errand)
    with pytest.raises(RuntimeError, match="the process group was ended before this was done"):
        between.wait(errand, 0.0)


def test_ranks_use_gloo_where_one_of_them_cannot_share_memory():
    for outcome in run_ranks(_without_core, 2, expect_failure=True):
        assert not outcome.failed, outcome.message
        assert (
            outcome.output.count("this group of ranks uses gloo instead of shared memory: rank 1: the native core") == 1
        )
        assert "init gloo context nranks: 2" in outcome.output


def _without_core() -> None:
    import os
    import sys

    if os.environ["RANK"] == "1":
        sys.modules["phalanx._core"] = None  # type: ignore[assignment]
        vars(px).pop("_core", None)  # what ranks are forked from may have it
    px.init()
    dist.all_reduce(x := torch.ones(3))
    assert x.eq(2).all()
    dist.barrier()


def test_another_backend_can_be_asked_for():
    for outcome in run_ranks(_backend, 2, env={"PHALANX_BACKEND": "gloo"}, expect_failure=True):
        assert outcome.value == "gloo"
        assert "init gloo context nranks: 2" in outcome.output
    for outcome in run_ranks(_backend, 2, env={"PHALANX_BACKEND": "glo"}, expect_failure=True):
        assert outcome.error_type == "ConfigError"
        assert "PHALANX_BACKEND=glo is no backend of torch" in outcome.message
        assert "Did you mean 'gloo'?" in outcome.message


def _backend() -> str:
    px.init()
    return str(dist.get_backend())
