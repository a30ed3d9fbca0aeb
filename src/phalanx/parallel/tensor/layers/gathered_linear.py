"""`GatheredLinear`: linear layers sharded over data-parallel ranks, which gather each other's inputs (arXiv:1404.5997).

The layer gathers the rows of all ranks, computes its part for them, and every rank takes its own rows of the result
(Krizhevsky, arXiv:1404.5997, section 3). Each rank's loss is the mean over its own rows, and a parameter's gradient
here comes from all of them; so gradients are weighted by rows where they enter the layer, and unweighted where they
leave it for layers that data parallel weights by itself. Where gradients are averaged, those that enter are divided by
the number of ranks too, and those that leave multiplied by it: a batch has fewer values than a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import collectives, context, transfers
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError
from phalanx.parallel.data.sample_weights import row_weight, with_gradient_times
from phalanx.parallel.tensor.layers.linear import require_width
from phalanx.parallel.tensor.shard_spec import ShardSpec, even_sizes, hold


class GatheredLinear(nn.Linear):
    """A linear layer of which ranks that read rows of their own hold slices."""

    spec: ShardSpec

    shares: int = 1
    """Ranks over whose losses gradients of the slices are averaged; 1 where they are added up."""

    is_planned: bool = False
    """Whether a Plan made it of a plain layer. Code of its own may read the slice of one that was made as a slice."""

    is_sum: bool = False
    """Whether gradients are summed over the ranks."""

    def configure(self, path: str, inputs: int | None, outputs: int | None) -> None:
        """Note that a Plan made this layer; see `styles.ShardedLayer`."""
        self.is_planned = True

    def gather_input(self, x: Tensor) -> Tensor:
        """Return what other ranks' rows are gathered to; the gradient that leaves here is as data parallel weights."""
        return with_gradient_times(x, lambda: self.shares / (self._row_weight() or 1.0))  # of no row it is zero

    def reduce_output(self, own: Tensor) -> Tensor:
        """Return this rank's rows of the result; the gradient that enters here is weighted by them."""
        return with_gradient_times(own, lambda: self._row_weight() / self.shares)

    def _row_weight(self) -> float:
        """Return how much this rank's rows weigh in the backward pass that runs; 1 for an even share."""
        if not context.is_initialized():
            return 1.0
        process = context.current()
        return row_weight(process, process.readers, is_sum=self.is_sum)


class ModelParallelLinear(GatheredLinear):
    """A linear layer cut by output features over ranks that read rows of their own.

    Collective over the group, forward and backward. Values and gradients equal `nn.Linear(in_dim, class_num)` over the
    rows of all ranks, uneven ones included. `weight` is (this rank's classes, in_dim), `bias` likewise; both are marked
    `is_distributed`.

    Each rank draws the initial values of the whole layer and keeps its slice: under one seed on all ranks the layer is
    the one that `nn.Linear` would make under it, and random numbers after it are too.

    Input: (rows, *, in_dim), this rank's rows. Output: (rows, *, class_num), for them.

    Args:
        in_dim: Input features.
        rank_num: Number of ranks.
        rank_id: This rank's place among them.
        class_num: Output features over all ranks.
        uneven: Let slices differ by one when `class_num` does not divide; the larger ones come first.
        bias: Whether the layer has a bias.
        group: The ranks; all when omitted.

    Raises:
        ValueError: If `class_num` does not divide and `uneven` is not set, or there is no such rank.
    """

    def __init__(
        self,
        in_dim: int,
        rank_num: int,
        rank_id: int,
        class_num: int,
        *,
        uneven: bool = False,
        bias: bool = True,
        group: Group = None,
    ) -> None:
        if not 0 <= rank_id < rank_num:
            raise ConfigError(f"rank_id {rank_id} is none of {rank_num} ranks. Give 0 to rank_num - 1.")
        if class_num % rank_num and not uneven:
            raise ConfigError(
                f"Number of classes must be divisible by the number of ranks, found {class_num} classes and {rank_num} "
                "ranks. Pass uneven=True for slices that differ by one."
            )
        super().__init__(in_dim, class_num, bias)
        self.spec = ShardSpec(group, rank_id, even_sizes(class_num, rank_num))
        for param in self.parameters():
            hold(param, 0, self.spec)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for this rank's rows."""
        require_width(self, input, self.in_features)
        if len(self.spec.sizes) == 1:
            return F.linear(input, self.weight, self.bias)
        rows = rows_of_all(input, self.spec)
        full = collectives.all_gather(self.gather_input(input), 0, sizes=rows, group=self.spec.group)
        part = F.linear(full, self.weight, self.bias)
        own = collectives.all_to_all(part, 0, -1, sizes=rows, arriving=self.spec.sizes, group=self.spec.group)
        return self.reduce_output(own)

    def extra_repr(self) -> str:
        """Say what nn.Linear says, and which part is here."""
        return f"{super().extra_repr()}, column {self.spec.index} of {len(self.spec.sizes)}, rows gathered"


class GatheredRowLinear(GatheredLinear):
    """A linear layer cut by input features over ranks that read rows of their own.

    Collective over the group, forward and backward. `weight` is (out_features, this rank's features); `bias` is whole
    and trained as data parallel does. Shapes as of `ModelParallelLinear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for this rank's rows."""
        require_width(self, input, self.in_features)
        rows, group = rows_of_all(input, self.spec), self.spec.group
        part = collectives.all_to_all(
            self.gather_input(input), -1, 0, sizes=self.spec.sizes, arriving=rows, group=group
        )
        own = self.reduce_output(collectives.reduce_scatter(F.linear(part, self.weight), 0, sizes=rows, group=group))
        return own if self.bias is None else own + self.bias

    def extra_repr(self) -> str:
        """Say what nn.Linear says, and which part is here."""
        return f"{super().extra_repr()}, row part {self.spec.index} of {len(self.spec.sizes)}, rows gathered"


def average(model: nn.Module, shares: Mapping[nn.Parameter, int]) -> None:
    """Let gradients of slices be divided by numbers of ranks, on their way through the layers or by hooks of their own.

    Hooks are for slices that something else may read, and for half precision, in which a gradient that is divided
    before it is added up may vanish.

    Args:
        model: The model.
        shares: The ranks by parameter; 1 where gradients are added up.
    """
    holding = {
        module: {shares[own] for own in module.parameters(recurse=False) if own in shares} for module in model.modules()
    }
    layers = [(module, factors) for module, factors in holding.items() if factors]
    for module, factors in layers:
        if isinstance(module, GatheredLinear):
            module.is_sum = factors == {1}
    if all(_divides(module) and len(factors) == 1 for module, factors in layers):
        for module, (count,) in layers:
            assert isinstance(module, GatheredLinear)
            module.shares = count
        return
    for param, count in shares.items():
        if count > 1:
            param.register_hook(partial(torch.mul, other=1.0 / count))


def _divides(module: nn.Module) -> bool:
    """Return whether a layer can divide all gradients of its slices."""
    is_alone = isinstance(module, GatheredLinear) and module.is_planned
    return is_alone and all(param.dtype != torch.float16 for param in module.parameters())


def rows_of_all(x: Tensor, spec: ShardSpec) -> list[int]:
    """Return how many rows every rank has. Collective.

    Raises:
        ConfigError: If `x` has no rows, the group is not that of the layer, or shapes differ elsewhere than along dim 0
            (on all ranks alike).
    """
    ranks = len(spec.sizes)
    size, rank = (dist.get_world_size(spec.group), dist.get_rank(spec.group)) if dist.is_initialized() else (1, 0)
    if (size, rank) != (ranks, spec.index):
        raise ConfigError(
            f"a layer made as part {spec.index} of {ranks} was used on rank {rank} of {size}. Make it with rank_num "
            "and rank_id of its group, and call phalanx.init() before it is used."
        )
    if x.dim() < 2:
        raise ConfigError(f"a layer that gathers rows needs an input (rows, features), found shape {tuple(x.shape)}.")
    return transfers.part_sizes(x, 0, None, False, spec.group)
