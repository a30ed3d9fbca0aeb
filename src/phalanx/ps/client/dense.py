"""Dense parameters in a table: each cut into rows of 1024 values, all of one optimizer group in one table.

A row holds values of one parameter only, so a parameter without a gradient in a step takes no part in it, as in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.agreement import agree
from phalanx.errors import ConfigError
from phalanx.plan.rules.servers import DENSE, DENSE_WIDTH
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.stores.base import Keys, PendingRows, PullSpec, Rows, TableUpdate
from phalanx.ps.table.from_torch_optimizer import rule_of
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import Rule


class DenseTable:
    """The parameters of one optimizer group on the servers.

    Args:
        name: Name of the table.
        params: The parameters, the same in the same order on every worker.

    Raises:
        ConfigError: If a parameter is of another type than float32, bfloat16 or float16.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(
                    f"a parameter of shape {tuple(param.shape)} is {param.dtype}, and servers compute in float32. Cast "
                    'the model, or keep dense parameters on the workers: a_sync_configs = {"dense": "all_reduce"}.'
                )
        self.name, self.params = name, list(params)
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

    def take_update(self, lr: float) -> TableUpdate | None:
        """Return the gradients of the parameters that have one and clear them; None when none has."""
        gradients = [(p.grad, span) for p, span in zip(self.params, self._spans, strict=True) if p.grad is not None]
        if not gradients:
            return None
        for param in self.params:
            param.grad = None
        keys = self._keys
        if len(gradients) < len(self.params):
            keys = np.concatenate([self._keys[begin:end] for _, (begin, end) in gradients])
        return TableUpdate(self.name, keys, _as_rows([gradient for gradient, _ in gradients]), lr=lr)


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


@dataclass(frozen=True, slots=True)
class _Group:
    """A table, and the optimizer's group whose parameters it holds."""

    table: DenseTable
    settings: dict[str, Any]

    @property
    def lr(self) -> float:
        """Current learning rate."""
        return float(self.settings["lr"])


class DenseParameters:
    """All dense parameters on the servers, by the optimizer that steps them."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Optimizer, list[_Group]] = weakref.WeakKeyDictionary()
        self._made = 0

    def add(self, optimizer: Optimizer, on_servers: Callable[[Tensor], bool]) -> list[nn.Parameter]:
        """Make a table for each group of an optimizer; returns the parameters in them.

        Args:
            optimizer: The optimizer.
            on_servers: Whether a parameter lives on servers.
        """
        groups = []
        for settings in optimizer.param_groups:
            if params := [param for param in settings["params"] if on_servers(param)]:
                groups.append(_Group(DenseTable(f"{DENSE}/{self._made}", params), settings))
            self._made += 1
        if groups:
            self._of[optimizer] = groups
        return [param for group in groups for param in group.table.params]

    def start(self, optimizer: Optimizer, mode: ConsistencyMode, *, is_first: bool, is_again: bool) -> None:
        """Give all workers the servers' values: of a snapshot or a restart, else those of the first worker.

        Collective over the workers, except for one that was started again.

        Args:
            optimizer: One that was added.
            mode: The training mode.
            is_first: Whether this is worker 0.
            is_again: Whether this worker was started again.
        """
        groups = self._of[optimizer]
        mode.declare([group.table.spec(rule_of(optimizer, group.settings)) for group in groups])
        if not is_again:
            reports = mode.store.report() if is_first else {}
            mode.assign([g.table.values() for g in groups if is_first and not reports[g.table.name].rows])
            agree("dense tables", [len(group.table.params) for group in groups])
        self.take(optimizer, mode.pull(self.pull_specs(optimizer)))

    def give(self, mode: ConsistencyMode, saved: Mapping[str, TableSpec], *, is_first: bool) -> None:
        """Give the servers the parameters' values where a snapshot that they loaded has no table of theirs.

        Collective over the workers; the first worker's values count.

        Args:
            mode: The training mode.
            saved: The tables of the snapshot.
            is_first: Whether this is worker 0.
        """
        tables = [group.table for groups in self._of.values() for group in groups]
        lacking = [table for table in tables if table.name not in saved or saved[table.name].dense != table.rows]
        if lacking:
            mode.assign([table.values() for table in lacking if is_first])
            agree("dense tables of a snapshot without them", [table.name for table in lacking])

    def take_update(self, optimizer: Optimizer) -> list[TableUpdate]:
        """Return the gradients of what an optimizer steps, and clear them."""
        groups = self._of.get(optimizer, [])
        return [update for group in groups if (update := group.table.take_update(group.lr))]

    def pull_specs(self, optimizer: Optimizer) -> list[PullSpec]:
        """Return what to pull to have every parameter that an optimizer steps."""
        return [group.table.pull_spec() for group in self._of.get(optimizer, [])]

    def take(self, optimizer: Optimizer, pulled: PendingRows) -> None:
        """Copy the rows of `pull_specs` into the parameters."""
        for group, rows in zip(self._of[optimizer], pulled.rows(), strict=True):
            group.table.read(rows)

    def read(self, mode: ConsistencyMode) -> None:
        """Read all parameters from the servers."""
        for optimizer in self._of:
            self.take(optimizer, mode.pull(self.pull_specs(optimizer)))

    def __contains__(self, param: object) -> bool:
        return any(param is p for groups in self._of.values() for group in groups for p in group.table.params)

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters on servers."""
        return optimizer in self._of
