"""`VocabEmbedding` and `vocab_cross_entropy`: vocabulary-parallel embedding and loss."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import transfers
from phalanx.comm.collectives import apply_function, ranks_of
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError
from phalanx.parallel.tensor.layers.linear import reduce_output
from phalanx.parallel.tensor.shard_spec import ShardSpec


class VocabEmbedding(nn.Embedding):
    """An embedding of which each rank holds some of the rows.

    Collective over the group, forward and backward. `weight` is (this rank's rows, embedding_dim); `num_embeddings`
    stays that of the whole.

    Input: ids of any shape, the same on every rank. Output: ids' shape + (embedding_dim,), the same on every rank; or
    this rank's part of the sequence, cut along `outputs`.
    """

    spec: ShardSpec
    outputs: int | None
    """Dim along which outputs leave cut, the sequence; whole when None."""

    def configure(self, path: str, inputs: int | None, outputs: int | None) -> None:
        """Take the dim along which outputs leave sharded; see `styles.ShardedLayer`."""
        self.outputs = outputs

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids.

        Raises:
            IndexError: If an id is none of the vocabulary; on all ranks, as their ids are the same.
        """
        if ((input < 0) | (input >= self.num_embeddings)).any():
            raise IndexError(
                f"an embedding of {self.num_embeddings} rows was asked for ids from {int(input.min())} to "
                f"{int(input.max())}. Correct the ids, or make the embedding larger."
            )
        local = input - self.spec.start
        elsewhere = (local < 0) | (local >= self.spec.mine)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._local_padding())
        return reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.outputs, self.spec)

    def _local_padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.spec.start
        return local if 0 <= local < self.spec.mine else None

    def extra_repr(self) -> str:
        """Say what nn.Embedding says, and which part is here."""
        return f"{super().extra_repr()}, rows {self.spec.index} of {len(self.spec.sizes)}"


class _CrossEntropy(torch.autograd.Function):
    """Per-row loss from this rank's slice of the logits; no rank ever has more.

    Per row two numbers travel after the maximum: the sum of exponentials and the target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: Group) -> Tensor:
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        largest = transfers.all_reduce(wide.amax(-1), "max", group)
        shifted = wide - largest.unsqueeze(-1)
        local = target - start
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        both = transfers.all_reduce(torch.stack([exponentials.sum(-1), of_target]), "sum", group)
        total = both[0]
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probability, local, elsewhere = ctx.saved_tensors
        is_local = (~elsewhere).unsqueeze(-1).to(probability.dtype)
        gradient = probability.scatter_add(-1, local, -is_local) * grads[0].unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    group: Group = None,
    axis: str | None = None,
) -> Tensor:
    """Return the cross entropy of logits that are cut over ranks, without putting them together.

    Collective over the ranks, which hold the same rows. Equals `torch.nn.functional.cross_entropy` of the whole logits,
    also for magnitudes of 1e4 and more; computed in float32 at least.

    Args:
        logits: This rank's slice, shape (*, classes of this rank); slices may differ in size, none empty.
        target: Classes of the whole, shape (*), the same on every rank.
        ignore_index: Target of rows that do not count.
        reduction: `mean` over the rows that count, `sum`, or `none`.
        group: Ranks over which logits are cut, in rank order; all when omitted.
        axis: The same by the name of a mesh axis.

    Returns:
        One element, or shape (*) for `none`; the same on every rank.

    Raises:
        ConfigError: If shapes do not fit, a target is no class, or the reduction is unknown; on all ranks alike.
        PeerLostError: If a rank was lost.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"vocab_cross_entropy knows reduction 'mean', 'sum' and 'none', found {reduction!r}.")
    if target.shape != logits.shape[:-1]:
        raise ConfigError(
            f"vocab_cross_entropy of logits {tuple(logits.shape)} needs targets {tuple(logits.shape[:-1])}, found "
            f"{tuple(target.shape)}. Classes are the last dim of logits."
        )
    group, size = ranks_of(group, axis, "vocab_cross_entropy")
    if size == 1:
        rows = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction)
        return rows.view(target.shape) if reduction == "none" else rows
    sizes = transfers.part_sizes(logits, logits.dim() - 1, None, False, group)
    ignored = target == ignore_index
    if (~ignored & ((target < 0) | (target >= sum(sizes)))).any():
        raise ConfigError(
            f"vocab_cross_entropy over {sum(sizes)} classes found targets from {int(target.min())} to "
            f"{int(target.max())}. Correct the targets, or name the value to leave out as ignore_index."
        )
    start = sum(sizes[: torch.distributed.get_rank(group)])
    losses = apply_function(_CrossEntropy, logits, target, start, group).masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()
