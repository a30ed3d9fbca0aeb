"""`is_elementwise`: whether an optimizer may update shards of a parameter separately."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.session import session

_RATE = 0.1
"""Learning rate of the trial. The optimizer's own may be so small now, 0 before a warm-up, that nothing would show."""


def check_elementwise(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer looks at more than one element at a time, and this rank holds slices of what it trains.

    Raises:
        ConfigError: Says which optimizers can.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_cut = any(is_module_held(param) and param.dim() > 1 for param in params)
    needs_all = isinstance(optimizer, LBFGS)
    if needs_all:
        is_cut = is_cut or any(param.is_meta or hasattr(param, "full_tensor") for param in params)
    if is_cut and (needs_all or not is_elementwise(optimizer)):
        raise ConfigError(
            f"{type(optimizer).__name__} computes an update from whole {'gradients' if needs_all else 'matrices'}, and "
            f"ranks hold slices of the parameters of this {type(model).__name__}, so each would compute another one. "
            "Use an optimizer that treats every element by itself (SGD, Adam, AdamW), strategy.lars or lamb, or do not "
            "cut the model."
        )


@torch.random.fork_rng(devices=())
def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of this kind updates the halves of a matrix as it updates the whole; by trial.

    True where no trial is possible.
    """
    torch.manual_seed(0)
    first = optimizer.param_groups[0]
    settings = {
        name: copy.deepcopy(first[name])
        for name in inspect.signature(type(optimizer)).parameters
        if name in first and name not in ("params", "capturable", "fused", "foreach")
    }
    if isinstance(settings.get("lr"), float | Tensor):
        settings["lr"] = _RATE
    value, gradients = torch.randn(4, 6), torch.randn(2, 4, 6)
    full, halves = nn.Parameter(value.clone()), [nn.Parameter(half.clone()) for half in value.split(2)]
    session.is_trial = True
    try:
        trials = [type(optimizer)([param], **settings) for param in (full, *halves)]
        for gradient in gradients:
            for param, part in zip((full, *halves), (gradient, *gradient.split(2)), strict=True):
                param.grad = part.clone()
            for trial in trials:
                trial.step()
    except Exception:  # noqa: BLE001 -- a constructor or step of a kind of its own
        return True
    finally:
        session.is_trial = False
    return _is_close(full, torch.cat([half.detach() for half in halves]))


def _is_close(full: Tensor, parts: Tensor) -> bool:
    return bool(torch.allclose(full.detach(), parts, rtol=1e-4, atol=1e-6))
