"""`reset_passes`: let a sharded model's passes, which an error ended, be repeated by this rank alone.

Parameters that are gathered stay gathered, so a repetition exchanges nothing that other ranks do not. Torch has no
public calls for this: its own lets go of what is gathered, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reset_passes(model: nn.Module) -> None:
    """Forget how far the forward or backward pass of a model sharded by ZeRO 1 or 2 has come."""
    for state in _states(model):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for group in state._fsdp_param_groups:
            group._training_state = idle
            group._post_forward_indices.clear()


def is_all_gathered(model: nn.Module) -> bool:
    """Return whether no unit has let go of its parameters yet, as all do at the end of their backward pass."""
    return all(group.is_unsharded for state in _states(model) for group in state._fsdp_param_groups)


def _states(model: nn.Module) -> Iterator[Any]:
    return (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
