"""`TableRegistry`: the tables of this process, and the optimizer and update rule of each.

A table of ids is made once that is known. Until then its rows are those it would start from, so that a model can be
looked at before there is an optimizer. A table of dense parameters is made with its optimizer, one for each group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.plan.rules.servers import DENSE
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.client.dense import DenseTable
from phalanx.ps.client.first_values import give_first_values
from phalanx.ps.client.parameter import TableParameter, free_name, give_name
from phalanx.ps.snapshot.manifest import read_manifest
from phalanx.ps.stores.base import Keys, PendingRows, PullSpec, Rows
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.from_torch_optimizer import rule_of
from phalanx.ps.table.table import RowTable, make_table, read_rows
from phalanx.ps.table.update_rules import SGD, Rule

Groups = dict[int, tuple[Optimizer, dict[str, Any]]]
"""The optimizer that holds a parameter, and its group, by the identity of the parameter."""


class TableRegistry:
    """The tables that this process uses, and what trains each.

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

        self._parameters: weakref.WeakValueDictionary[str, TableParameter] = weakref.WeakValueDictionary()
        self._rules: dict[str, Rule] = {}
        """Of the tables that were made, by name."""

        self._untrained: dict[str, RowTable] = {}
        self._dense: weakref.WeakKeyDictionary[Optimizer, list[DenseTable]] = weakref.WeakKeyDictionary()
        self._dense_count = 0
        self.dense_default = False
        """Whether dense parameters that no Plan places elsewhere live on servers too."""

        self._on_servers = WeakTensorKeyDictionary()

    @property
    def tables(self) -> list[str]:
        """Names of the tables that were made."""
        return sorted(self._rules)

    def is_declared(self, parameter: TableParameter) -> bool:
        """Return whether the table of a parameter was made."""
        return parameter.table in self._rules

    def name(self, parameter: TableParameter, name: str) -> None:
        """Name the table of a module, if nobody named it yet.

        Raises:
            ConfigError: If the name is taken by a table of another model.
        """
        if parameter.table is not None:
            return
        if name in self._rules:
            raise ConfigError(
                f"table {name!r} holds what another model of this process trained. Name this model's tables, "
                "SparseEmbedding(..., name=...), with the same name to continue training that one."
            )
        give_name(parameter, name)

    def use(self, parameter: TableParameter) -> None:
        """Take note of a parameter whose rows are read, and make its table if its rule is known.

        Raises:
            ConfigError: If servers need the rule and none is set, or there is no server for several workers.
        """
        if parameter.table is None:
            give_name(parameter, free_name(self._rules))
        self._parameters[str(parameter.table)] = parameter
        if self._declare(parameter) or self.is_declared(parameter):
            return
        if self._context.role.server_endpoints:
            raise ConfigError(
                f"table {parameter.table!r} has no update rule yet. Call distributed_optimizer(optimizer), with the "
                "table's parameter in the optimizer, before the first forward pass, or give SparseEmbedding an "
                "optimizer=."
            )
        if self._context.is_distributed:
            self._mode()  # raises: workers share tables, and there is no server

    # --- a step -----------------------------------------------------------------------------------------------------

    def missing_rule(self) -> str | None:
        """Return what is wrong when a table has a gradient and nothing says how it is updated, else None."""
        groups = self._groups()
        for parameter in self._parameters.values():
            is_ruled = parameter.settings.optimizer is not None or id(parameter) in groups
            if parameter.grad is not None and not is_ruled:
                return (
                    f"the parameter of table {parameter.label} is in no optimizer, so nothing says how its rows are "
                    "updated. Give the optimizer all of model.parameters(), or SparseEmbedding its own optimizer=."
                )
        return None

    def take_updates(self, optimizer: Optimizer) -> tuple[list[TableUpdate], bool]:
        """Return the gradients that a step of this optimizer pushes, and take them from their parameters.

        They are those of the parameters that it holds, and of those with a rule of their own that no optimizer holds.

        Returns:
            The updates; and whether the step is one of the tables, which ends there even without any.
        """
        updates, is_step, groups = [], optimizer in self._dense, self._groups()
        for parameter in list(self._parameters.values()):
            group = groups.get(id(parameter))
            if group[0] is not optimizer if group else parameter.settings.optimizer is None:
                continue
            is_step |= group is not None
            if parameter.grad is not None:
                self._declare(parameter)
            lr = float(group[1]["lr"]) if group and parameter.settings.optimizer is None else None
            if update := parameter.take_update(lr):
                updates.append(update)
        updates += [update for table in self._dense.get(optimizer, ()) if (update := table.take_update())]
        return updates, is_step or bool(updates)

    def _groups(self) -> Groups:
        """Return the optimizer that holds each parameter, the first one if several do, and its group."""
        holders = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(param): holder for holder in reversed(holders) for param in holder[1]["params"]}

    # --- first values -----------------------------------------------------------------------------------------------

    def initial_rows(self, parameter: TableParameter, keys: Keys) -> Rows:
        """Return the rows that a table starts from, shape (n, dim)."""
        name = str(parameter.table)
        if name not in self._untrained:
            self._untrained[name] = make_table(parameter.settings.spec(name, SGD(lr=0.0)))
        rows = read_rows(self._untrained[name], keys)
        if (values := parameter.first_values) is not None:
            has_value = (keys >= 0) & (keys < len(values))
            rows[has_value] = values.numpy()[keys[has_value]]
        return rows

    def start_from(self, parameter: TableParameter, values: Tensor) -> None:
        """Give the rows 0, 1, ... of a table these values, shape (n, dim).

        Collective once the table is made: worker 0's values count.
        """
        name = str(parameter.table)
        if name in self._rules:
            self._assign(name, values, is_empty=True)
        else:
            parameter.first_values = values

    def close(self) -> None:
        """Let go of the tables that were never trained."""
        self._untrained.clear()

    def _declare(self, parameter: TableParameter) -> bool:
        """Make the table of a parameter if its rule is known and it was not made yet; returns whether."""
        name = str(parameter.table)
        if name in self._rules and name not in self.loaded:
            return False
        group = self._groups().get(id(parameter))
        claimed = parameter.settings.optimizer or (rule_of(*group) if group else None)
        rule = claimed or self.loaded.get(name)
        if rule is None or self._rules.get(name) == rule:
            if claimed is not None:
                self.loaded.pop(name, None)
            return False
        if name in self._rules:
            raise ConfigError(
                f"table {name!r} was loaded with {self._rules[name]} and read before an optimizer was there, which now "
                f"asks for {rule}. Make the optimizer before the first forward pass."
            )
        self._mode().declare([parameter.settings.spec(name, rule)])
        self._rules[name] = rule
        self._untrained.pop(name, None)
        if (first := parameter.first_values) is not None:
            parameter.first_values = None
            self._assign(name, first, is_empty=self._mode().store.report()[name].rows == 0)
        return True

    def _assign(self, name: str, values: Tensor, *, is_empty: bool) -> None:
        update = TableUpdate(name, np.arange(len(values)), values.contiguous().numpy(), kind="assign")
        if self._context.role.least_workers:
            give_first_values(self._context, self._mode(), name, lambda: [update] if is_empty else [])
        # A worker that was started again finds the values there, and nobody to agree with.
        elif self._context.role.attempt == 0:
            self._mode().assign([update] if is_empty and self._context.rank == 0 else [])
            agree(f"first values of {name}", list(values.shape))

    # --- dense parameters -------------------------------------------------------------------------------------------

    def place(self, param: nn.Parameter, *, on_servers: bool) -> None:
        """Say where a dense parameter lives."""
        self._on_servers[param] = on_servers

    def is_averaged(self, param: Tensor) -> bool:
        """Return whether a Plan keeps a dense parameter on every worker, not a shard of it on each."""
        # Of a layer that holds one shard on each rank it is True; every other tensor has a method of that name.
        is_shard = getattr(param, "is_distributed", None) is True
        return self._on_servers.get(param) is False and param.requires_grad and not is_shard

    def add_optimizer(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Make a table for the dense parameters of each group of an optimizer that live on servers; returns them.

        Collective if there are some: all workers get the servers' values, of a snapshot or a restart, else those of
        worker 0. A worker that was started again only reads them, with nobody to agree with.
        """
        self.optimizers.add(optimizer)
        tables = []
        for group in optimizer.param_groups:
            if params := [param for param in group["params"] if self._lives_on_servers(param)]:
                tables.append(DenseTable(f"{DENSE}/{self._dense_count}", params, group))
            self._dense_count += 1
        if not tables:
            return []
        self._dense[optimizer] = tables
        mode, is_first = self._mode(), self._context.rank == 0
        mode.declare([table.spec(rule_of(optimizer, table.group)) for table in tables])
        if self._context.role.least_workers:
            give_first_values(self._context, mode, tables[0].name, lambda: _missing_values(mode, tables))
        elif self._context.role.attempt == 0:
            reports = mode.store.report() if is_first else {}
            mode.assign([table.values() for table in tables if is_first and not reports[table.name].rows])
            agree("dense tables", [len(table.params) for table in tables])
        self.read_dense(optimizer, mode.pull(self.dense_specs(optimizer)))
        return [param for table in tables for param in table.params]

    def _lives_on_servers(self, param: Tensor) -> bool:
        is_dense = not isinstance(param, TableParameter) and param.requires_grad
        return is_dense and bool(self._on_servers.get(param, self.dense_default))

    def has_dense(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps dense parameters on servers."""
        return optimizer in self._dense

    def is_dense(self, param: Tensor) -> bool:
        """Return whether a parameter is a dense one on servers."""
        return any(param is p for tables in self._dense.values() for table in tables for p in table.params)

    def dense_specs(self, optimizer: Optimizer) -> list[PullSpec]:
        """Return what to pull to have every dense parameter that an optimizer steps."""
        return [table.pull_spec() for table in self._dense.get(optimizer, ())]

    def read_dense(self, optimizer: Optimizer, pulled: PendingRows) -> None:
        """Copy the rows of `dense_specs` into the parameters."""
        for table, rows in zip(self._dense[optimizer], pulled.rows(), strict=True):
            table.read(rows)

    def settle_dense(self, directory: Path) -> None:
        """After a load: give the servers the dense parameters that the snapshot has no table of, and read the others.

        Collective over the workers; worker 0's values count.
        """
        saved = read_manifest(directory).tables
        mode, tables = self._mode(), [table for tables in self._dense.values() for table in tables]
        lacking = [table for table in tables if table.name not in saved or saved[table.name].dense != table.rows]
        if lacking:
            mode.assign([table.values() for table in lacking if self._context.rank == 0])
            agree("dense tables of a snapshot without them", [table.name for table in lacking])
        for optimizer in self._dense:
            self.read_dense(optimizer, mode.pull(self.dense_specs(optimizer)))


def _missing_values(mode: ConsistencyMode, tables: Sequence[DenseTable]) -> list[TableUpdate]:
    """Return this worker's values of dense tables that have none."""
    reports = mode.store.report()
    return [table.values() for table in tables if not reports[table.name].rows]
