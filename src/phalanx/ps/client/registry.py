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
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.client.parameter import TableParameter, free_name, give_name
from phalanx.ps.stores.base import Keys, Rows, TableUpdate
from phalanx.ps.table.from_torch_optimizer import rule_of
from phalanx.ps.table.table import RowTable, make_table, read_rows
from phalanx.ps.table.update_rules import SGD, Rule


class TableRegistry:
    """The tables of ids that this process uses, and the optimizers that claim them.

    Args:
        context: The job.
        mode: Returns the training mode, opened if need be.
    """

    def __init__(self, context: Context, mode: Callable[[], ConsistencyMode]) -> None:
        self._context, self._mode = context, mode
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Every optimizer that may hold a parameter."""

        self.loaded: dict[str, Rule] = {}
        """Rules of a loaded snapshot: those of tables that nobody claims."""

        self._handles: weakref.WeakValueDictionary[str, TableParameter] = weakref.WeakValueDictionary()
        self._made: dict[str, Rule] = {}
        self._untrained: dict[str, RowTable] = {}
        self._first_values: dict[str, Tensor] = {}

    @property
    def tables(self) -> list[str]:
        """Names of the tables that were made."""
        return sorted(self._made)

    def is_declared(self, parameter: TableParameter) -> bool:
        """Return whether the table of a parameter was made."""
        return parameter.table in self._made

    def name(self, parameter: TableParameter, name: str) -> None:
        """Name the table of a module, if nobody named it yet.

        Raises:
            ConfigError: If the name is taken by a table of another model.
        """
        if parameter.table is not None:
            return
        if name in self._made:
            raise ConfigError(
                f"table {name!r} holds what another model of this process trained. Name this model's tables, "
                "SparseEmbedding(..., name=...), with the same name to go on training that one."
            )
        give_name(parameter, name)

    def use(self, parameter: TableParameter) -> None:
        """Take note of a parameter whose rows are read, and make its table if its rule is known.

        Raises:
            ConfigError: If servers need the rule and none is set, or there is no server for several workers.
        """
        if parameter.table is None:
            give_name(parameter, free_name(self._made))
        self._handles[str(parameter.table)] = parameter
        if self._make(parameter) or self.is_declared(parameter):
            return
        if self._context.role.server_endpoints:
            raise ConfigError(
                f"table {parameter.table!r} has no update rule yet. Call distributed_optimizer(optimizer), with the "
                "table's parameter in the optimizer, before the first forward pass, or give SparseEmbedding an "
                "optimizer=."
            )
        if self._context.is_distributed:
            self._mode()  # raises: workers share tables, and there is no server

    def parameters_of(self, optimizer: Optimizer) -> list[TableParameter]:
        """Return the parameter that a step of this optimizer pushes: those it holds, and those that none holds."""
        parameters = []
        for parameter in self._handles.values():
            holder = self.optimizer_of(parameter)
            if holder[0] is optimizer if holder else parameter.settings.optimizer is not None:
                parameters.append(parameter)
        return parameters

    def missing_rule(self) -> str | None:
        """Return what is wrong when a table has a gradient and nothing says how it is updated, else None."""
        for parameter in self._handles.values():
            if (
                parameter.grad is not None
                and parameter.settings.optimizer is None
                and self.optimizer_of(parameter) is None
            ):
                return (
                    f"the parameter of table {parameter.label} is in no optimizer, so nothing says how its rows are "
                    "updated. Give the optimizer all of model.parameters(), or SparseEmbedding its own optimizer=."
                )
        return None

    def updates_of(self, parameters: Iterable[TableParameter]) -> list[TableUpdate]:
        """Return the gradients of parameter as changes of their tables, and empty the parameter."""
        return [update for parameter in parameters if (update := self._update_of(parameter))]

    def optimizer_of(self, parameter: TableParameter) -> tuple[Optimizer, dict[str, Any]] | None:
        """Return the optimizer that holds a parameter, and its group."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(param is parameter for param in group["params"]):
                    return optimizer, group
        return None

    def initial_rows(self, parameter: TableParameter, keys: Keys) -> Rows:
        """Return the rows that a table starts from, shape (n, dim)."""
        name = str(parameter.table)
        if name in self._first_values:
            rows: Rows = self._first_values[name].numpy()[keys]
            return rows
        if name not in self._untrained:
            self._untrained[name] = make_table(parameter.settings.spec(name, SGD(lr=0.0)))
        return read_rows(self._untrained[name], keys)

    def start_from(self, parameter: TableParameter, values: Tensor) -> None:
        """Give the rows 0, 1, ... of a table these values, shape (n, dim).

        Collective once the table is made: worker 0's values count.
        """
        name = str(parameter.table)
        if name in self._made:
            self._assign(name, values, is_wanted=True)
        else:
            self._first_values[name] = values

    def close(self) -> None:
        """Let go of the tables that were never trained."""
        self._untrained.clear()

    def _make(self, parameter: TableParameter) -> bool:
        """Make the table of a parameter if its rule is known and it was not made yet; returns whether."""
        name = str(parameter.table)
        if name in self._made and name not in self.loaded:
            return False
        holder = self.optimizer_of(parameter)
        rule = parameter.settings.optimizer or (rule_of(*holder) if holder else self.loaded.get(name))
        if rule is None or self._made.get(name) == rule:
            return False
        if name in self._made:
            raise ConfigError(
                f"table {name!r} was loaded with {self._made[name]} and read before an optimizer was there, which now "
                f"asks for {rule}. Make the optimizer before the first forward pass."
            )
        self._mode().declare([parameter.settings.spec(name, rule)])
        self._made[name] = rule
        self._untrained.pop(name, None)
        if name in self._first_values:
            first = self._first_values.pop(name)
            self._assign(name, first, is_wanted=self._mode().store.report()[name].rows == 0)
        return True

    def _assign(self, name: str, values: Tensor, *, is_wanted: bool) -> None:
        # A worker that was started again finds the values there, and nobody to agree with.
        if self._context.role.attempt == 0:
            update = TableUpdate(name, np.arange(len(values)), values.contiguous().numpy(), kind="assign")
            self._mode().assign([update] if is_wanted and self._context.rank == 0 else [])
            agree(f"first values of {name}", list(values.shape))

    def _update_of(self, parameter: TableParameter) -> TableUpdate | None:
        if parameter.grad is not None:
            self._make(parameter)
        holder = self.optimizer_of(parameter)
        follows = holder is not None and parameter.settings.optimizer is None
        return parameter.take_update(float(holder[1]["lr"]) if holder and follows else None)
