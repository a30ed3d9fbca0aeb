"""`DenseTable`: dense parameters of one optimizer group on the parameter servers, in rows of 1024 values.

A row holds values of one parameter only, so a parameter without a gradient in a step takes no part in it, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan.rules.servers import DENSE_WIDTH
from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import Rule


class DenseTable:
    """The parameters of one optimizer group on the servers.

    Args:
        name: Name of the table.
        params: The parameters, the same in the same order on every worker.
        group: The optimizer's group that they are in.

    Raises:
        ConfigError: If a parameter is of another type than float32, bfloat16 or float16.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        for param in params:
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(
                    f"a parameter of shape {tuple(param.shape)} is {param.dtype}, and servers compute in float32. Cast "
                    'the model, or keep dense parameters on the workers: a_sync_configs = {"dense": "all_reduce"}.'
                )
        self.name, self.params, self.group = name, list(params), group
        ends = np.cumsum([_rows_of(param) for param in params])
        self._spans = [(int(end) - _rows_of(param), int(end)) for param, end in zip(params, ends, strict=True)]
        self._keys: Keys = np.arange(ends[-1], dtype=np.int64)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self._keys)

    def spec(self, rule: Rule) -> TableSpec:
        """Return the table's specification."""
        return TableSpec(name=self.name, dim=DENSE_WIDTH, rule=rule, init=Constant(0.0), dense=self.rows)

    def pull_spec(self) -> PullSpec:
        """Return what to pull to have every value."""
        return PullSpec(self.name, self._keys)

    @torch.no_grad()
    def read(self, rows: Rows) -> None:
        """Copy pulled rows into the parameters."""
        flat = torch.from_numpy(rows).view(-1)
        for param, (row, _) in zip(self.params, self._spans, strict=True):
            begin = row * DENSE_WIDTH
            param.copy_(flat[begin : begin + param.numel()].view(param.shape))

    def values(self) -> TableUpdate:
        """Return the parameters' values as an assignment."""
        return TableUpdate(self.name, self._keys, _as_rows([p.detach() for p in self.params]), kind="assign")

    def take_update(self) -> TableUpdate | None:
        """Return the gradients of the parameters that have one and clear them; None when none has."""
        gradients = [(p.grad, span) for p, span in zip(self.params, self._spans, strict=True) if p.grad is not None]
        if not gradients:
            return None
        for param in self.params:
            param.grad = None
        keys = self._keys
        if len(gradients) < len(self.params):
            keys = np.concatenate([self._keys[begin:end] for _, (begin, end) in gradients])
        return TableUpdate(self.name, keys, _as_rows([g for g, _ in gradients]), lr=float(self.group["lr"]))


def _rows_of(param: Tensor) -> int:
    return -(-param.numel() // DENSE_WIDTH)


def _as_rows(tensors: Sequence[Tensor]) -> Rows:
    """Return tensors cut into rows, each from a new row on; what is left over is zero."""
    rows = np.empty((sum(map(_rows_of, tensors)), DENSE_WIDTH), np.float32)
    flat, begin = rows.reshape(-1), 0
    memory = torch.from_numpy(flat)
    for tensor in tensors:
        rest, end = begin + tensor.numel(), begin + _rows_of(tensor) * DENSE_WIDTH
        memory[begin:rest].view(tensor.shape).copy_(tensor)
        flat[rest:end] = 0.0
        begin = end
    return rows
