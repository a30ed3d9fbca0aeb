"""The training recipe is right under every placement: whole, DTensor and layer-held parameters against one process."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.parallel.recipe.clip import clip_grad_norm_
from ranks import run_ranks

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


def all_recipes(spread: bool):
    px.init()
    return {recipe.__name__: recipe(spread) for recipe in (clipped,)}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(all_recipes, 2, True)


@pytest.mark.parametrize("recipe", [clipped])
def test_mixed_placements_equal_one_process(on_two_ranks, recipe) -> None:
    alone = recipe(False)
    for rank in on_two_ranks:
        torch.testing.assert_close(rank[recipe.__name__], alone)
