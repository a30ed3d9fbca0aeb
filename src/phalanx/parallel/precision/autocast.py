"""`apply_precision`: mixed precision: run a model under autocast in bfloat16 or float16, or cast its parameters too.

Both run the forward pass under torch's autocast, which chooses the dtype of each operator, and return float32, so that
a loss outside the model is computed in float32. Normalisations by batch keep float32 parameters and statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from phalanx.errors import ConfigError, PlanError, did_you_mean
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward
from phalanx.parallel.step.norms import is_dtensor
from phalanx.plan.value import matches

logger = logging.getLogger("phalanx.parallel")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_precision(model: nn.Module, dtype: str, *, pure: bool = False, keep: Sequence[str] = ()) -> None:
    """Make a model compute in a lower precision, in place.

    Call it before gradients are cut into buckets: pure precision changes the dtype of parameters. An optimizer over
    cast parameters needs `keep_master_weights`, and float16 a `LossScale`.

    Args:
        model: The module, on its device.
        dtype: `bfloat16` or `float16`.
        pure: Whether float32 parameters are cast as well; buffers are not.
        keep: Globs of module names that compute in float32, on float32 inputs, with float32 parameters.

    Raises:
        PlanError: If `dtype` is another, or a glob names no module.
        ConfigError: If parameters to cast are DTensors, whose precision belongs to what shards them.
    """
    if dtype not in DTYPES:
        raise PlanError(f"expected bfloat16 or float16 to compute in, found {dtype!r}.{did_you_mean(dtype, DTYPES)}")
    float32_modules = _float32_modules(model, keep)
    device = next((p.device.type for p in model.parameters()), "cpu")
    if dtype == "float16" and device == "cpu":
        logger.warning("float16 is 7 to 16 times slower than bfloat16 on a CPU. Use bfloat16, which needs no scaling.")
    if pure:
        _cast_parameters(model, float32_modules, DTYPES[dtype])
    for module in float32_modules:
        wrap_forward(module, _in_float32, device)
    wrap_forward(model, _in_autocast, device, DTYPES[dtype])


def accept_amp_init(optimizer: Optimizer) -> None:
    """Give an optimizer the call that older scripts make to cast parameters; it does nothing but say so."""
    optimizer.amp_init = _amp_init  # type: ignore[attr-defined]


def _amp_init(*_: Any, **__: Any) -> None:
    logger.info("amp_init is not needed: parameters are cast with the model, and follow weights that are loaded later.")


def _float32_modules(model: nn.Module, keep: Sequence[str]) -> list[nn.Module]:
    named = {name: module for name, module in model.named_modules() if name}
    for glob in keep:
        if not any(matches(glob, name) for name in named):
            raise PlanError(
                f"amp keeps {glob!r} in float32, and the model has no such module.{did_you_mean(glob, named)}"
            )
    return [module for name, module in named.items() if any(matches(glob, name) for glob in keep)]


def _cast_parameters(model: nn.Module, float32_modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    stay = {id(param) for module in (*float32_modules, *_batch_norms(model)) for param in module.parameters()}
    cast = [p for p in model.parameters() if p.dtype == torch.float32 and id(p) not in stay]
    if any(is_dtensor(param) for param in cast):
        raise ConfigError(
            "pure precision casts parameters before they are sharded, and found DTensors. Shard the model afterwards, "
            "or let sharding gather them in bfloat16."
        )
    for param in cast:
        # The same Parameter object: an optimizer that has it keeps it.
        param.data = param.data.to(dtype)


def _batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, _NormBase))


def _in_autocast(forward: Forward, device: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, dtype):
        return tree_map(_to_float32, forward(*args, **kwargs))


def _in_float32(forward: Forward, device: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*tree_map(_to_float32, args), **tree_map(_to_float32, kwargs))


def _to_float32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
