"""`px.clip_grad_norm_`: clip gradients by the global norm of a sharded model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import stages_over
from phalanx.parallel.optim.gradient_accumulation import is_partial, is_reduced_by_batch
from phalanx.parallel.precision.loss_scale import gradient_scale
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import gradient_of, over_stages, whole_norms


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm, taken as one vector over the whole model, is at most `max_norm`.

    Collective over the groups over which parameters are spread (DTensors, shards a layer holds itself, stages); a model
    that every rank holds whole needs no communication. `torch.nn.utils.clip_grad_norm_` gives the same for such a
    model, and a wrong norm, which differs between ranks, for stages and for shards that a layer holds. Under gradient
    merging, gradients are clipped once they are complete; before that the norm of what has come so far is returned. A
    rank that holds several logical replicas clips after its last, for which the others wait; before, 0 is returned.

    Args:
        parameters: A model, or parameters. Those without a gradient are left out.
        max_norm: Largest norm, above 0.
        norm_type: Order of the norm; infinity for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error; otherwise gradients are scaled by it.

    Returns:
        The norm before clipping; one element, the same on every rank.

    Raises:
        ConfigError: If `max_norm` or `norm_type` is not above 0, the norm is not finite and that is an error, or
            gradients are accumulated where ranks may leave and join: what came before this batch is not in `grad`.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ConfigError(
            f"clip_grad_norm_ needs max_norm and norm_type above 0, found max_norm={max_norm}, norm_type={norm_type}."
        )
    params = _parameters_of(parameters)
    if any(is_reduced_by_batch(param) for param in params):
        raise ConfigError(
            "clip_grad_norm_ sees the gradient of one batch only where gradient_merge accumulates over several and "
            "ranks may leave and join (-n a:b). Set strategy.clip = True and strategy.clip_configs = {'norm': ...}, "
            "which clips the complete gradient."
        )
    replicas = context_of.current().replicas if context_of.is_initialized() else None
    if replicas is not None and replicas.progress.has_gradients and not replicas.is_update_due:
        return torch.tensor(0.0, device=params[0].device if params else None)
    is_complete = not any(is_partial(param) for param in params if param.grad is not None)
    return _clip(params, max_norm if is_complete else math.inf, norm_type, error_if_nonfinite=error_if_nonfinite)


def _clip(all_params: list[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Clip gradients that are complete, and return their norm before."""
    params = [param for param in all_params if param.grad is not None]
    stages = stages_over(all_params)
    gradients = [gradient for param in params if (gradient := gradient_of(param)) is not None]
    if not gradients:
        return over_stages(torch.tensor(0.0), stages, norm_type)
    norms = whole_norms([grad for grad, _ in gradients], [groups for _, groups in gradients], norm_type)
    scales = [gradient_scale(param) for param in params]
    if any(scale != 1.0 for scale in scales):
        norms /= torch.tensor(scales, dtype=norms.dtype, device=norms.device)
    total = over_stages(torch.linalg.vector_norm(norms, norm_type), stages, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ConfigError(
            f"the norm of the gradients is {total.item()}, so they cannot be clipped. Look for the step where the loss "
            "stops being finite, or pass error_if_nonfinite=False."
        )
    if math.isinf(max_norm):
        return total
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad, _ in gradients:
        grad.mul_(factor.to(grad.device))
    return total


def clip_steps(optimizer: Optimizer, *, max_norm: float | None = None, max_value: float | None = None) -> None:
    """Clip the gradients of an optimizer before each of its updates.

    Args:
        optimizer: Any torch optimizer; all its parameters count as one vector.
        max_norm: As of `clip_grad_norm_`; no such clipping when None.
        max_value: Largest magnitude of one entry, clipped before the norm; no such clipping when None.

    Raises:
        ConfigError: If a limit is not above 0.
    """
    for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise ConfigError(f"clipping needs a finite {name} above 0, found {limit}.")

    @torch.no_grad()
    def clip(optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if max_value is not None:
            for param in params:
                if (gradient := gradient_of(param)) is not None:
                    limit = max_value * gradient_scale(param)
                    gradient[0].clamp_(-limit, limit)
        if max_norm is not None:
            # Around an update gradients are complete, which clip_grad_norm_ could not know.
            _clip(params, max_norm, 2.0, error_if_nonfinite=False)

    add_action(optimizer, StepPhase.CLIP_GRADIENTS, clip, needs_gradients=True)


def _parameters_of(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
