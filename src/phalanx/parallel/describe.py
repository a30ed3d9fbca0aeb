"""Read the shape of a torch module into the pure value that Plans are made from."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.plan.shape import ModelShape, ParamShape


def is_module_held(tensor: Tensor) -> bool:
    """Return whether a layer holds one shard of this parameter on each rank (`param.is_distributed = True`)."""
    # torch has a method of that name, so only the value True counts.
    return getattr(tensor, "is_distributed", None) is True


def shape_of(model: nn.Module) -> ModelShape:
    """Return names, shapes and dtypes of a module's parameters, in registration order.

    A parameter shared by several layers appears once, under its first name.
    """
    return ModelShape(
        tuple(
            ParamShape(
                name=name,
                shape=tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                item_bytes=param.element_size(),
                trainable=param.requires_grad,
                is_distributed=is_module_held(param),
            )
            for name, param in model.named_parameters()
        )
    )
