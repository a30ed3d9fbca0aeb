"""`check_unwrapped`: refuse other wrappers (DDP, FSDP, DataParallel) around or inside a distributed model."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ConfigError

WRAPPERS = frozenset(
    (
        ("torch", "DistributedDataParallel"),
        ("torch", "DataParallel"),
        ("torch", "FullyShardedDataParallel"),
        ("torch", "FSDPModule"),
        ("fairscale", "FullyShardedDataParallel"),
        ("deepspeed", "DeepSpeedEngine"),
    )
)
"""Package and class; by name, so that nobody waits for an import."""


def check_unwrapped(model: nn.Module) -> None:
    """Raise if a model, or a module in it, is a wrapper that distributes it already.

    Raises:
        ConfigError: Names the wrapper, and where it is.
    """
    for name, module in model.named_modules():
        kind = wrapper_of(module)
        if kind is not None:
            raise ConfigError(
                f"{repr(name) + ' of the model' if name else 'the model'} is wrapped in {kind}, which distributes it "
                f"by itself: gradients would be averaged twice. {_remedy(kind)}"
            )


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the wrapper that a module is, or None."""
    for kind in type(module).__mro__:
        if (kind.__module__.partition(".")[0], kind.__name__) in WRAPPERS:
            return "fully_shard" if kind.__name__ == "FSDPModule" else kind.__name__
    return None


def outer_wrapper(model: nn.Module) -> str | None:
    """Return the name of the wrapper through which a module is called now, or None."""
    outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if outer is not None and any(module is model for module in outer.modules()):
        return "DistributedDataParallel"
    return "DataParallel" if getattr(model, "_is_replica", False) else None


def explain_outer(kind: str) -> str:
    """Return what is wrong with a distributed model that was wrapped afterwards, and what to do."""
    return (
        f"a distributed model was wrapped in {kind} afterwards, which averages its gradients a second time, in the "
        f"same memory. {_remedy(kind)}"
    )


def _remedy(kind: str) -> str:
    instead = "strategy.sharding shards it" if "shard" in kind.lower() else "gradients are averaged there"
    return f"Remove {kind}, and give the plain module to px.distribute or fleet.distributed_model: {instead}."
