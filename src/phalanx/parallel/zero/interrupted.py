"""`reset_forward`: let a sharded model's forward pass, which an error ended, begin again.

Parameters that the pass has gathered stay gathered, so its repetition exchanges nothing that other ranks do not.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reset_forward(model: nn.Module) -> None:
    """Forget how far the forward pass of a model sharded by ZeRO 1 or 2 has come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Torch has no public call for it: its own forgets what is gathered, too.
            state: Any = module._get_fsdp_state()
            idle = type(state._training_state).IDLE
            state._training_state = idle
            state._modules_to_run_forward.clear()
            state._state_ctx.iter_forward_root = None
            state._comm_ctx.post_forward_order.clear()
            for group in state._fsdp_param_groups:
                group._training_state = idle
                group._post_forward_indices.clear()
