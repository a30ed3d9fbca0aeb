"""`check_batch_norms`: reject batches that leave a rank a single sample, which batch norm cannot train on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from phalanx.comm import context
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError


def check_batch_norms(model: nn.Module, loader: ShardedLoader | None) -> None:
    """Raise in the first training pass, on all ranks, where a batch norm would fail in a later batch of an epoch.

    Only that pass tells how many values a layer normalises in a row: images have many.

    Args:
        model: The model, distributed.
        loader: What it trains on.
    """
    if loader is None or context.current().readers.shares == 1 or loader.fewest_rows != 1:
        return
    from phalanx.parallel.data.sync_batch_norm import SyncBatchNorm  # only those who may fail wait for it

    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
            _check_first(name, layer)


def _check_first(name: str, layer: _BatchNorm) -> None:
    handles: list[RemovableHandle] = []

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not layer.training or not inputs:
            return
        for handle in handles:
            handle.remove()
        rows, features = inputs[0].shape[:2]
        if inputs[0].numel() == rows * features:
            ranks = context.current().readers.count
            raise ConfigError(
                f"a batch of each epoch leaves a rank of {ranks} a single row, and {type(layer).__name__} {name!r} "
                "needs more than 1 row in training. Leave the last batch out with drop_last=True, choose another "
                "global_batch, or normalise over all ranks: strategy.sync_batch_norm = True."
            )

    handles.append(layer.register_forward_pre_hook(look))
