"""The training recipe is right under every placement: whole, DTensor and layer-held parameters against one process."""

import math
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.parallel.memory.activation_checkpointing import apply_recompute
from phalanx.parallel.optim.clip import clip_grad_norm_, clip_steps
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.optim.gradient_accumulation import accumulate_gradients
from phalanx.parallel.optim.lamb import use_lamb
from phalanx.parallel.optim.lars import use_lars
from phalanx.parallel.precision.autocast import apply_precision
from phalanx.parallel.precision.loss_scale import LossScale, gradient_scale
from phalanx.parallel.precision.master_weights import KEY, keep_master_weights
from phalanx.parallel.session import applied_to
from phalanx.plan.value import ModuleRule, Scaler
from ranks import graphs_without_kernels, run_ranks

pytestmark = pytest.mark.dist

SHAPES = {"whole": (5, 3), "mesh": (7, 4), "held": (6, 2)}


def value_of(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(name))
    return torch.randn(SHAPES[name], generator=generator)


class Mixed(nn.Module):
    """A parameter every rank holds whole, one that torch spreads over the ranks, one whose shard a layer holds."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.spread = spread
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(self.place(name, value_of(name, 0))))
        self.held.is_distributed = spread

    def place(self, name: str, value: Tensor) -> Tensor:
        if not self.spread or name == "whole":
            return value
        if name == "held":
            return value.chunk(2)[px.current().rank].clone()
        with warnings.catch_warnings():  # torch's own, on import
            warnings.simplefilter("ignore")
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor
        return distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(0)])

    def set_gradients(self, step: int) -> None:
        for name, param in self.named_parameters():
            param.grad = self.place(name, 3.0 * value_of(name, 10 + step))

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.spread:
            return {name: t.detach().clone() for name, t in tensors.items()}
        return {
            "whole": tensors["whole"].detach().clone(),
            "mesh": tensors["mesh"].detach().full_tensor(),
            "held": px.comm.all_gather(tensors["held"].detach()),
        }


def clipped(spread: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    results = []
    for order in (1.0, 2.0, math.inf):
        net = Mixed(spread)
        net.set_gradients(0)
        norm = clip_grad_norm_(net, 1.5, order)
        results.append((norm, net.gathered({n: p.grad for n, p in net.named_parameters()})))
    return results


def scaled(spread: bool) -> tuple[int, float, dict[str, Tensor]]:
    """Only the last rank's shard overflows, in the second of four steps."""
    net = Mixed(spread)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scale = LossScale(Scaler(initial=16.0, backoff=0.5, backoff_after=1, growth_every=2))
    scale.bind(optimizer)
    for step in range(4):
        optimizer.scale(net.held.sum()).backward()
        net.set_gradients(step)
        for param in net.parameters():  # as a backward pass would leave it
            param.grad *= gradient_scale(param)
        if step == 1 and px.current().rank == px.current().world_size - 1:
            net.held.grad[-1, -1] = math.nan
        optimizer.step()
    return scale.skipped, scale.value, net.gathered(dict(net.named_parameters()))


def stepped(spread: bool, optimizer_of, use):
    net = Mixed(spread)
    optimizer = optimizer_of(net.parameters())
    use(optimizer, names={param: name for name, param in net.named_parameters()}.get)
    for step in range(4):
        net.set_gradients(step)
        optimizer.step()
    state = {}
    for param in net.parameters():
        for name, value in optimizer.state[param].items():
            if name != "step":
                state.setdefault(name, []).append(value)
    return net.gathered(dict(net.named_parameters())), {
        name: net.gathered(dict(zip(SHAPES, values, strict=True))) for name, values in state.items()
    }


def lars(spread: bool):
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return stepped(spread, sgd, partial(use_lars, coeff=0.1, weight_decay=0.01, exclude=["held"]))


def lamb(spread: bool):
    return stepped(spread, partial(torch.optim.AdamW, lr=0.05), partial(use_lamb, weight_decay=0.02))


def averaged(spread: bool):
    net = Mixed(spread)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    ema = EMA(net, 0.7, optimizer=optimizer)
    for step in range(3):
        net.set_gradients(step)
        optimizer.step()
    with ema.swapped():
        inside = net.gathered(dict(net.named_parameters()))
    return inside, net.gathered(ema.state_dict()["shadow"]), net.gathered(dict(net.named_parameters()))


def all_recipes(spread: bool):
    px.init()
    return {recipe.__name__: recipe(spread) for recipe in (clipped, scaled, lars, lamb, averaged)}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(all_recipes, 2, True)


@pytest.mark.parametrize("recipe", [clipped, scaled, lars, lamb, averaged])
def test_mixed_placements_equal_one_process(on_two_ranks, recipe) -> None:
    px.init()
    alone = recipe(False)
    for rank in on_two_ranks:
        torch.testing.assert_close(rank[recipe.__name__], alone)


def trained_in_pure_bfloat16():
    """Train under data parallel; return the weights, their copies and how often gradients were reduced."""
    px.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    apply_precision(net, "bfloat16", pure=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    keep_master_weights(optimizer)
    px.distribute(net, optimizer)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(px.current().rank))
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    masters = [state[KEY] for state in optimizer.state_dict()["state"].values() if KEY in state]
    return net.state_dict(), masters, applied_to(net).reducer.steps


def test_pure_precision_stays_equal_on_all_ranks_under_data_parallel() -> None:
    (weights, masters, steps), other = run_ranks(trained_in_pure_bfloat16, 2)
    torch.testing.assert_close((weights, masters, steps), other, rtol=0, atol=0)
    assert steps == 3
    assert weights["0.weight"].dtype == torch.bfloat16
    assert torch.equal(weights["0.weight"], masters[0].bfloat16())
    assert not torch.equal(weights["0.weight"].float(), masters[0])


def merged(k_steps: int, global_batch: int):
    """Train 18 rows; return the weights, and the updates and reductions it took."""
    px.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randn(18, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows)
    _, _, loader = px.distribute(net, optimizer, data, global_batch=global_batch, shuffle=False)
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    accumulate_gradients(optimizer, net, k_steps, quiet=partial(px.no_sync, net))
    for (x,) in loader:
        net(x).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reducer = applied_to(net).reducer
    return net.state_dict(), len(updates), None if reducer is None else reducer.steps


def test_merged_gradients_are_reduced_once_per_update_and_equal_one_large_batch() -> None:
    one, other = run_ranks(merged, 2, 2, 5)  # batches of 5, 5, 5 and 3 rows
    assert one[1:] == other[1:] == (2, 2)
    expected = merged(1, 10)
    for weights, *_ in (one, other):
        torch.testing.assert_close(weights, expected[0], rtol=1e-12, atol=1e-14)


def everything(shard: bool):
    """Recompute, loss scaling, merged gradients, clipping, LAMB and an average, together on one model."""
    context = px.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3, bias=False)).double()
    apply_recompute([ModuleRule(match="0", recompute="full")], net)
    quiet = nullcontext
    if shard:
        with warnings.catch_warnings():  # torch's own, on import
            warnings.simplefilter("ignore")
            from torch.distributed.fsdp import fully_shard
        fully_shard(net[0])
        fully_shard(net)
        quiet = partial(held_sync, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    use_lamb(optimizer, names={param: name for name, param in net.named_parameters()}.get, exclude=["bias"])
    accumulate_gradients(optimizer, net, 2, quiet=quiet)
    scale = LossScale(Scaler(initial=1024.0, growth_every=1))
    scale.bind(optimizer)
    ema = EMA(net, 0.5, optimizer=optimizer)
    rows = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norms = []
    for batch in rows:
        optimizer.zero_grad()
        x = batch.chunk(context.world_size)[context.rank]
        optimizer.scale(net(x).square().sum(1).mean()).backward()
        norms.append(px.clip_grad_norm_(net, 0.3))
        optimizer.step()
    with ema.swapped():
        averages = {name: whole(t) for name, t in net.state_dict().items()}
    return {name: whole(t) for name, t in net.state_dict().items()}, averages, norms[1::2], scale.value


@contextmanager
def held_sync(net):
    net.set_requires_gradient_sync(False)
    yield
    net.set_requires_gradient_sync(True)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def test_techniques_together_on_a_sharded_model_equal_one_process() -> None:
    expected = everything(False)
    for found in run_ranks(everything, 2, True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def stepped_as_one_call(compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    # No bias before the normalisation: its gradient is zero but for rounding, which Adam would enlarge.
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    apply_recompute([ModuleRule(match="[01]", recompute="full")], net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    accumulate_gradients(optimizer, net, 2)
    clip_steps(optimizer, max_norm=0.1)
    use_lamb(optimizer)
    step = px.train_step(net, nn.functional.cross_entropy, optimizer, compiled=compiled)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        step(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
    return net.state_dict()


def compiled_and_eager():
    px.init()
    # On a rank, because torch's compiler warns about torch's own code.
    with graphs_without_kernels():  # techniques go together in the graph
        return stepped_as_one_call(True), stepped_as_one_call(False)


def test_a_compiled_step_equals_an_eager_one() -> None:
    ((compiled, eager),) = run_ranks(compiled_and_eager, 1)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
