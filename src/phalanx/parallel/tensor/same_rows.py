"""Ranks that hold layers, or stages, together must read the same rows; of layers, drop and train the same whole ones.

Looked at in the first steps, where a mistake of the script shows; it would train, and be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.collectives import all_gather
from phalanx.comm.groups import Group
from phalanx.data.stream import digest
from phalanx.errors import ConfigError
from phalanx.parallel.describe import is_module_held
from phalanx.parallel.recipe.norms import local_part

logger = logging.getLogger("phalanx.parallel")


class SameRows:
    """A hook before the forward pass of a model that compares inputs and parameters over the ranks of a group.

    Collective in the first passes in training mode; those of a compiled model are not looked at.

    Args:
        axis: Name of their mesh axis.
        group: The ranks.
        holds_layers: Whether they hold layers together: streams and parameters are compared too.
    """

    PASSES = 4
    """Passes that are looked at: the first may be a probe with inputs that are all alike, or gradients be added up over
    several."""

    def __init__(self, axis: str, group: Group, *, holds_layers: bool = True) -> None:
        self._axis, self._group, self._holds_layers = axis, group, holds_layers
        self._left = self.PASSES

    def __deepcopy__(self, _: dict[int, Any]) -> SameRows:
        return SameRows(self._axis, self._group, holds_layers=self._holds_layers)

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Compare.

        Raises:
            ConfigError: If inputs differ; on all ranks of the group.
        """
        if not self._left or not model.training or torch.compiler.is_compiling():
            return
        self._left -= 1
        tensors = [x for x in (*inputs, *named.values()) if type(x) is Tensor and x.layout is torch.strided]
        mine = torch.tensor([[digest(tensors), digest([torch.get_rng_state()])]])
        device = tensors[0].device if tensors else mine.device
        rows, streams = all_gather(mine.to(device), same_shapes=True, group=self._group).cpu().unbind(1)
        if (rows != rows[0]).any():
            raise ConfigError(
                f"ranks along axis {self._axis!r} hold the model together and must read the same rows, but theirs "
                "differ. Give the loader to px.distribute, which shares rows out by px.current().readers."
            )
        if not self._holds_layers:
            return
        if (streams != streams[0]).any():
            self._left = 0
            logger.warning(
                "ranks along axis %r hold layers together, but their random streams differ: they would drop different "
                "units of the same activations. Seed with px.current().readers.index in place of the rank.",
                self._axis,
            )
        elif apart := self._come_apart(model):
            self._left = 0
            logger.warning(
                "parameters that ranks along axis %r hold whole have come apart: %s%s. Their gradients differ, as each "
                "rank uses them for a part: name their module in px.shard, with style column between a column and its "
                "row, with style sequence where tokens are cut. If gradients were clipped by torch, use "
                "px.clip_grad_norm_.",
                self._axis,
                ", ".join(apart[:8]),
                f" and {len(apart) - 8} more" if len(apart) > 8 else "",
            )

    def _come_apart(self, model: nn.Module) -> list[str]:
        """Return the names of whole parameters whose values differ."""
        held = ((name, param) for name, param in model.named_parameters() if not param.is_meta)
        whole = {name: param for name, param in held if not is_module_held(param)}
        if not whole:
            return []
        sums = torch.stack([local_part(param.detach()).abs().sum(dtype=torch.float64) for param in whole.values()])
        everyone = all_gather(sums.unsqueeze(0), same_shapes=True, group=self._group)
        differs = (everyone != everyone[0]).any(0).tolist()
        return [name for name, is_apart in zip(whole, differs, strict=True) if is_apart]


def share_random_stream(group: Group, device_type: str) -> None:
    """Give all ranks of a group the random stream of the first of them. Collective."""
    state = torch.get_rng_state()
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state)
    if device_type == "cuda":
        on_card = torch.cuda.get_rng_state()
        moved = on_card.cuda()
        dist.broadcast(moved, group=group, group_src=0)
        torch.cuda.set_rng_state(moved.cpu())
