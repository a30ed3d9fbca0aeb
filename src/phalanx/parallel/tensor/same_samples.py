"""`SameSamplesCheck`: tensor-parallel or pipeline ranks get the same samples, and share their random stream.

Looked at in the first steps, where a mistake of the script shows; it would train, and be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.comm.collectives import all_gather
from phalanx.comm.groups import Group
from phalanx.data.stream.stream_batches import digest
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.parallel")


class SameSamplesCheck:
    """A hook before the forward pass of a model that compares inputs and random streams over the ranks of a group.

    Collective in the first passes in training mode; those of a compiled model are not looked at.

    Args:
        axis: Name of their mesh axis.
        group: The ranks.
        holds_layers: Whether they hold layers together: streams are compared too.
    """

    PASSES = 4
    """Passes that are looked at: the first may be a probe with inputs that are all alike, or gradients be added up over
    several."""

    def __init__(self, axis: str, group: Group, *, holds_layers: bool = True) -> None:
        self._axis, self._group, self._holds_layers = axis, group, holds_layers
        self._left = self.PASSES

    def __deepcopy__(self, _: dict[int, Any]) -> SameSamplesCheck:
        return SameSamplesCheck(self._axis, self._group, holds_layers=self._holds_layers)

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


def share_random_stream(group: Group, device_type: str) -> None:
    """Give all ranks of a group the random stream of the first of them. Collective."""
    state = torch.get_rng_state()
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state)
    device = torch.device(device_type)
    if accelerator.is_accelerator(device):
        on_device = accelerator.random_state(device).to(device)
        dist.broadcast(on_device, group=group, group_src=0)
        accelerator.set_random_state(device, on_device.cpu())
