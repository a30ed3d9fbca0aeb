"""`ColumnLinear` and `RowLinear`: Megatron's tensor-parallel linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.errors import ConfigError
from phalanx.parallel.tensor.mappings import copy_to, gather_from, reduce_from, scatter_to
from phalanx.parallel.tensor.shard_spec import ShardSpec


class _ShardedLinear(nn.Linear):
    """What the two have in common."""

    spec: ShardSpec
    path: str = ""
    """Its name in the model, for messages."""

    inputs: int | None
    """Dim along which inputs arrive sharded: -1 features, another the sequence; full when None."""

    outputs: int | None
    """Dim along which outputs leave sharded; full when None."""

    def configure(self, path: str, inputs: int | None, outputs: int | None) -> None:
        """Take the dims along which activations arrive and leave sharded; see `styles.ShardedLayer`."""
        self.path, self.inputs, self.outputs = path, inputs, outputs


class ColumnLinear(_ShardedLinear):
    """A linear layer of which each rank computes some of the output features.

    Collective over the group, forward and backward. `weight` is (this rank's features, in_features), `bias` likewise;
    `in_features` and `out_features` stay those of the whole layer.

    Input: (*, in_features), the same on every rank; or cut along `inputs`, and gathered first. Output: (*,
    out_features), the same on every rank; or this rank's features only when `outputs` is -1.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        full = gather_input(input, self.in_features, self.inputs, self.spec)
        part = F.linear(full, self.weight, self.bias)
        return part if self.outputs is not None else gather_from(part, part.dim() - 1, self.spec)

    def extra_repr(self) -> str:
        """Say what nn.Linear says, and which part is here."""
        return f"{super().extra_repr()}, column {self.spec.index} of {len(self.spec.sizes)}"


class RowLinear(_ShardedLinear):
    """A linear layer of which each rank computes a term of every output, from some of the input features.

    Collective over the group, forward and backward. `weight` is (out_features, this rank's features); `bias` is whole
    and added once.

    Input: (*, in_features), the same on every rank; or this rank's features only when `inputs` is -1. Output: (*,
    out_features), the same on every rank; or this rank's part of the sequence, cut along `outputs`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        width = self.in_features if self.inputs is None else self.spec.mine
        require_width(self, input, width)
        part = scatter_to(input, input.dim() - 1, self.spec) if self.inputs is None else input
        total = reduce_output(F.linear(part, self.weight), self.outputs, self.spec)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        """Say what nn.Linear says, and which part is here."""
        return f"{super().extra_repr()}, row part {self.spec.index} of {len(self.spec.sizes)}"


def gather_input(x: Tensor, features: int, inputs: int | None, spec: ShardSpec) -> Tensor:
    """Return the whole input of a layer that is cut by outputs.

    Args:
        x: The input as it arrives.
        features: Size of the last dim of the whole input.
        inputs: Dim along which it arrives cut; None when it is whole.
        spec: Names the group.

    Raises:
        ConfigError: If the last dim of the whole input is another.
    """
    if inputs is None:
        full = copy_to(x, spec.group)
    else:
        full = collectives.all_gather(x, inputs, same_shapes=inputs != -1, group=spec.group)
    if full.shape[-1] != features:
        raise ConfigError(
            f"a column-parallel layer of {features} inputs got {full.shape[-1]} of them. Where the layer before "
            'leaves its output sharded, say so: inputs={axis: Shard(dim=-1)} in the rule of this one, or style "row".'
        )
    return full


def reduce_output(term: Tensor, outputs: int | None, spec: ShardSpec) -> Tensor:
    """Return the sum of the ranks' terms, whole or cut along `outputs`.

    Raises:
        ConfigError: If that dim cannot be cut evenly.
    """
    if outputs is None:
        return reduce_from(term, spec.group)
    parts = len(spec.sizes)
    if term.shape[outputs] % parts:
        raise ConfigError(
            f"a sequence of {term.shape[outputs]} (dim {outputs} of {tuple(term.shape)}) cannot be cut evenly over "
            f"{parts} ranks. Pad it to a multiple of {parts}, or leave style sequence out."
        )
    return collectives.reduce_scatter(term, outputs, group=spec.group)


def require_width(layer: nn.Linear, x: Tensor, width: int) -> None:
    """Raise unless the last dim of an input has this size.

    Raises:
        ConfigError: If it has not; says what the layer takes.
    """
    if x.shape[-1] != width:
        path = getattr(layer, "path", "")
        where = f"{path!r}, " if path else ""
        raise ConfigError(
            f"{where}a {type(layer).__name__} of {layer.in_features} inputs takes {width} of them on this rank, found "
            f"{x.shape[-1]} in an input of shape {tuple(x.shape)}. Look at the layer before it, and at sizes that the "
            "code reads from a sharded activation: after a `sequence` norm, x.shape[1] is this rank's part of the "
            "tokens. Read them from the output of a column layer, or leave the style `sequence` out."
        )
