"""Which optimizer trains which table, and by which rule; a table is made once that is known.

Until then its rows are those it would start from, so that a model can be looked at before there is an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.ps.client.consistency import Mode
from phalanx.ps.client.parameter import Handle, free_name, give_name
from phalanx.ps.stores.base import Change, Keys, Rows
from phalanx.ps.table.from_torch_optimizer import rule_of
from phalanx.ps.table.rules import SGD, Rule
from phalanx.ps.table.table import Table, make_table, read_rows


class Claims:
    """The tables of ids that this process uses, and the optimizers that claim them.

    Args:
        context: The job.
        mode: Returns the training mode, opened if need be.
    """

    def __init__(self, context: Context, mode: Callable[[], Mode]) -> None:
        self._context, self._mode = context, mode
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Every optimizer that may hold a handle."""

        self.loaded: dict[str, Rule] = {}
        """Rules of a loaded snapshot: those of tables that nobody claims."""

        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._made: dict[str, Rule] = {}
        self._untrained: dict[str, Table] = {}
        self._first_values: dict[str, Tensor] = {}

    @property
    def tables(self) -> list[str]:
        """Names of the tables that were made."""
        return sorted(self._made)

    def is_made(self, handle: Handle) -> bool:
        """Return whether the table of a handle was made."""
        return handle.table in self._made

    def name(self, handle: Handle, name: str) -> None:
        """Name the table of a module, if nobody named it yet.

        Raises:
            ConfigError: If the name is taken by a table of another model.
        """
        if handle.table is not None:
            return
        if name in self._made:
            raise ConfigError(
                f"table {name!r} holds what another model of this process trained. Name this model's tables, "
                "SparseEmbedding(..., name=...), with the same name to go on training that one."
            )
        give_name(handle, name)

    def use(self, handle: Handle) -> None:
        """Take note of a handle whose rows are read, and make its table if its rule is known.

        Raises:
            ConfigError: If servers need the rule and nobody said it, or there is no server for several workers.
        """
        if handle.table is None:
            give_name(handle, free_name(self._made))
        self._handles[str(handle.table)] = handle
        if self._make(handle) or self.is_made(handle):
            return
        if self._context.role.server_endpoints:
            raise ConfigError(
                f"table {handle.table!r} has no update rule yet. Call distributed_optimizer(optimizer), with the "
                "table's parameter in the optimizer, before the first forward pass, or give SparseEmbedding an "
                "optimizer=."
            )
        if self._context.is_distributed:
            self._mode()  # raises: workers share tables, and there is no server

    def held_by(self, optimizer: Optimizer) -> list[Handle]:
        """Return the handles that a step of this optimizer pushes: those it holds, and those that none holds."""
        handles = []
        for handle in self._handles.values():
            holder = self.holder_of(handle)
            if holder[0] is optimizer if holder else handle.settings.optimizer is not None:
                handles.append(handle)
        return handles

    def unclaimed(self) -> str | None:
        """Return what is wrong when a table has a gradient and nothing says how it is updated, else None."""
        for handle in self._handles.values():
            if handle.grad is not None and handle.settings.optimizer is None and self.holder_of(handle) is None:
                return (
                    f"the parameter of table {handle.label} is in no optimizer, so nothing says how its rows are "
                    "updated. Give the optimizer all of model.parameters(), or SparseEmbedding its own optimizer=."
                )
        return None

    def changes_of(self, handles: Iterable[Handle]) -> list[Change]:
        """Return the gradients of handles as changes of their tables, and empty the handles."""
        return [change for handle in handles if (change := self._change_of(handle))]

    def holder_of(self, handle: Handle) -> tuple[Optimizer, dict[str, Any]] | None:
        """Return the optimizer that holds a handle, and its group."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(param is handle for param in group["params"]):
                    return optimizer, group
        return None

    def initial_rows(self, handle: Handle, keys: Keys) -> Rows:
        """Return the rows that a table starts from, shape (n, dim)."""
        name = str(handle.table)
        if name in self._first_values:
            rows: Rows = self._first_values[name].numpy()[keys]
            return rows
        if name not in self._untrained:
            self._untrained[name] = make_table(handle.settings.spec(name, SGD(lr=0.0)))
        return read_rows(self._untrained[name], keys)

    def start_from(self, handle: Handle, values: Tensor) -> None:
        """Give the rows 0, 1, ... of a table these values, shape (n, dim).

        Collective once the table is made: worker 0's values count.
        """
        name = str(handle.table)
        if name in self._made:
            self._assign(name, values, is_wanted=True)
        else:
            self._first_values[name] = values

    def close(self) -> None:
        """Let go of the tables that were never trained."""
        self._untrained.clear()

    def _make(self, handle: Handle) -> bool:
        """Make the table of a handle if its rule is known and it was not made yet; returns whether."""
        name = str(handle.table)
        if name in self._made and name not in self.loaded:
            return False
        holder = self.holder_of(handle)
        rule = handle.settings.optimizer or (rule_of(*holder) if holder else self.loaded.get(name))
        if rule is None or self._made.get(name) == rule:
            return False
        if name in self._made:
            raise ConfigError(
                f"table {name!r} was loaded with {self._made[name]} and read before an optimizer was there, which now "
                f"asks for {rule}. Make the optimizer before the first forward pass."
            )
        self._mode().declare([handle.settings.spec(name, rule)])
        self._made[name] = rule
        self._untrained.pop(name, None)
        if name in self._first_values:
            first = self._first_values.pop(name)
            self._assign(name, first, is_wanted=self._mode().store.report()[name].rows == 0)
        return True

    def _assign(self, name: str, values: Tensor, *, is_wanted: bool) -> None:
        # A worker that was started again finds the values there, and nobody to agree with.
        if self._context.role.attempt == 0:
            change = Change(name, np.arange(len(values)), values.contiguous().numpy(), kind="assign")
            self._mode().assign([change] if is_wanted and self._context.rank == 0 else [])
            agree(f"first values of {name}", list(values.shape))

    def _change_of(self, handle: Handle) -> Change | None:
        if handle.grad is not None:
            self._make(handle)
        holder = self.holder_of(handle)
        follows = holder is not None and handle.settings.optimizer is None
        return handle.hand_out(float(holder[1]["lr"]) if holder and follows else None)
