"""`free_parameters`: free the parameters of a model that belong to the pipeline stages of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from phalanx.errors import PlanError


def check_not_shared(model: nn.Module, owners: Mapping[str, int]) -> None:
    """Raise unless each parameter is in one stage.

    Raises:
        PlanError: Names one that is not, and the stages.
    """
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if owners[other] != owners[name]:
            raise PlanError(
                f"{other!r} of stage {owners[other]} and {name!r} of stage {owners[name]} are one parameter, which two "
                "stages cannot share. Untie them, or let pipeline_configs cuts keep both in one stage."
            )


def free_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Move parameters and buffers to the meta device, in place: names and keys stay, memory is freed."""
    replaced: dict[int, nn.Parameter] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        param = getattr(module, own)
        if isinstance(param, nn.Parameter):
            if id(param) not in replaced:  # layers of one stage that share it still do
                replaced[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                replaced[id(param)].__dict__.update(param.__dict__)
            module._parameters[own] = replaced[id(param)]
        else:
            module._buffers[own] = torch.empty_like(param, device="meta")
