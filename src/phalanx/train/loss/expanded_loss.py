"""`SoftmaxCrossEntropyExpand`: cross entropy from elementary operations, on full or sharded logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.comm import transfers
from phalanx.comm.groups import along_axis
from phalanx.errors import ConfigError, DataError
from phalanx.parallel.session import applied_to
from phalanx.parallel.tensor.layers.linear import ColumnLinear
from phalanx.parallel.tensor.mappings import reduce_from
from phalanx.parallel.tensor.shard_spec import ShardSpec
from phalanx.plan.styles import STYLES
from phalanx.plan.value import matches


class SoftmaxCrossEntropyExpand(nn.Module):
    """The mean cross entropy of a batch, from max, sub, exp, sum, log, one-hot, mul and mean.

    Equals `torch.nn.functional.cross_entropy`, and is finite at logits of magnitude 1e4, as no small probability is
    ever made to take its logarithm. Logits may be sharded by classes over the ranks of a mesh axis (the style `vocab`
    of `px.shard`): a `Model` detects that, a custom loop passes `axis="model"`. The maximum, the sum of
    exponentials and the label's logit of each sample then travel; no rank ever has all logits. Collective in that case.

    Args:
        sparse: Whether labels are classes, shape (N,) or (N, 1) and any whole-number dtype; else one probability for
            each class, shape (N, C).
        axis: Mesh axis over which logits are sharded; full when None.

    Input: logits (N, classes of this rank) and labels. Output: one element, float32 at least.

    Raises:
        ConfigError: If labels do not fit the logits.
        DataError: If a label is no class; names the sample. On a card nothing waits to look, and the loss is NaN.
    """

    def __init__(self, sparse: bool = False, *, axis: str | None = None) -> None:
        super().__init__()
        self.sparse = sparse
        self.axis = axis
        self.spec: ShardSpec | None = None
        """How logits are cut; set by whoever knows the layer that makes them, before `axis`."""

    def forward(self, logit: Tensor, label: Tensor) -> Tensor:
        """Return the mean loss of the samples."""
        if logit.dim() != 2:
            raise ConfigError(
                f"SoftmaxCrossEntropyExpand takes logits of shape (rows, classes), found {tuple(logit.shape)}."
            )
        spec = self._logits_spec(logit)
        wide = logit.to(torch.promote_types(logit.dtype, torch.float32))
        largest = wide.detach().amax(-1, keepdim=True)
        if spec is not None:
            largest = transfers.all_reduce(largest, "max", spec.group)
        shifted = wide - largest
        of_label = _at_classes(shifted, label, spec) if self.sparse else _at_probabilities(shifted, label, spec)
        both = torch.stack([shifted.exp().sum(-1), of_label])
        if spec is not None:
            both = reduce_from(both, spec.group)
        total, of_label = both[0], both[1]
        if self.sparse:
            return (total.log() - of_label).mean()
        return (total.log() * label.to(wide.dtype).sum(-1) - of_label).mean()

    def _logits_spec(self, logit: Tensor) -> ShardSpec | None:
        if self.spec is not None:
            return self.spec if len(self.spec.sizes) > 1 else None
        if self.axis is None:
            return None
        group, size = along_axis(self.axis, "SoftmaxCrossEntropyExpand")
        if size == 1:
            return None
        sizes = transfers.part_sizes(logit, 1, None, False, group)
        return ShardSpec(group, torch.distributed.get_rank(group), tuple(sizes))


def _at_classes(shifted: Tensor, label: Tensor, spec: ShardSpec | None) -> Tensor:
    """Return the value at each row's class, shape (N,); where another rank holds it, 0."""
    rows, classes = len(shifted), shifted.shape[1] if spec is None else sum(spec.sizes)
    if label.shape not in ((rows,), (rows, 1)) or label.is_floating_point() or label.dtype == torch.bool:
        raise ConfigError(
            f"SoftmaxCrossEntropyExpand(sparse=True) of {rows} rows takes classes as whole numbers of shape ({rows},) "
            f"or ({rows}, 1), found {label.dtype} of shape {tuple(label.shape)}. For one probability for each class "
            "write sparse=False."
        )
    flat = label.reshape(-1, 1).long()
    is_class = (flat >= 0) & (flat < classes)
    if _can_be_looked_at(label) and not is_class.all():
        row = int((~is_class).nonzero()[0, 0])
        raise DataError(
            f"The label of row {row} is {int(flat[row])}, but the logits have {classes} classes (0 to {classes - 1}). "
            "Correct the label, or build the model with more classes."
        )
    start = 0 if spec is None else spec.start
    onehot = flat == torch.arange(start, start + shifted.shape[1], device=shifted.device)
    # Filled rather than multiplied: a logit of minus infinity times 0 is not 0.
    return shifted.masked_fill(~onehot, 0).sum(-1).masked_fill(~is_class.squeeze(1), torch.nan)


def _can_be_looked_at(label: Tensor) -> bool:
    """Return whether there are values to look at, and nobody waits for them."""
    return label.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(label, FakeTensor)


def _at_probabilities(shifted: Tensor, label: Tensor, spec: ShardSpec | None) -> Tensor:
    """Return each row's mean under labels that say one probability for each class, over this rank's classes."""
    expected = (len(shifted), shifted.shape[1] if spec is None else sum(spec.sizes))
    if tuple(label.shape) != expected:
        raise ConfigError(
            f"SoftmaxCrossEntropyExpand(sparse=False) takes one probability for each class, shape {expected}, found "
            f"{tuple(label.shape)}. For classes as whole numbers write sparse=True."
        )
    return (shifted * (label if spec is None else spec.part(label, 1))).sum(-1)


def logits_spec(model: nn.Module) -> ShardSpec | None:
    """Return how a distributed model's logits are sharded over ranks by classes; None if they are full."""
    applied = applied_to(model)
    if applied is None:
        return None
    styled = [
        rule.match
        for rule in applied.plan.modules
        if rule.style is not None and STYLES[rule.style].keeps_logits_sharded
    ]
    for name, module in model.named_modules():
        is_styled = any(matches(pattern, name) for pattern in styled)
        if is_styled and isinstance(module, ColumnLinear) and module.outputs is not None:
            return module.spec
    return None
