"""What ties this process's tables to its optimizers.

Rows are read through the training mode, and every optimizer step pushes the gradients of the parameters it holds. The
mode opens at the first use. A script that distributes nothing trains tables in this process by a hook that torch calls
before every optimizer's step; distributed optimizers are hooked by `parallel`, inside their learning-rate factor.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

import phalanx.comm.context as context_of
from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.errors import ClosedError, ConfigError
from phalanx.plan.value import Push
from phalanx.ps.dense import DenseParameters
from phalanx.ps.handle import Handle, Occurrences, free_name, give_name
from phalanx.ps.modes import Mode
from phalanx.ps.open import open_mode
from phalanx.ps.rules import SGD, Rule
from phalanx.ps.snapshot.manifest import read_manifest
from phalanx.ps.store import Change, Keys, Rows, Want
from phalanx.ps.table import Table, make_table
from phalanx.ps.translate import rule_of

logger = logging.getLogger("phalanx.ps")

DEFAULT_PUSH = Push(mode="async")
"""What a job with servers does without a strategy; in one process it is the same as sync."""


class Attachment:
    """This process's part in training tables.

    Args:
        context: The job.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.push = DEFAULT_PUSH
        self.is_configured = False
        self.dense = False
        """Whether dense parameters that no Plan places elsewhere live on servers too."""

        self.skipped = 0
        """Steps that sent nothing because a gradient was not finite, or was dropped before the optimizer stepped."""

        self.since = time.time()
        """When this process began to use tables."""

        self._mode: Mode | None = None
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._declared: dict[str, Rule] = {}
        self._rules_loaded: dict[str, Rule] = {}
        self._untrained: dict[str, Table] = {}
        self._first_values: dict[str, Tensor] = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._dense = DenseParameters()
        self._places = WeakTensorKeyDictionary()
        self._is_finished = False
        self._opener: nn.Parameter | None = None
        """The parameter that got the first gradient since the last step."""

    @property
    def mode(self) -> Mode:
        """The training mode, opened now if need be.

        Raises:
            ConfigError: If the job has several workers and no server.
        """
        if self._mode is None:
            where: Literal["servers", "workers"] = "servers" if self.dense else "workers"
            self._mode = open_mode(self.context, self.push, dense=where)
        return self._mode

    @property
    def sparse_tables(self) -> list[str]:
        """Names of the tables of ids that are in use."""
        return sorted(self._declared)

    def configure(self, push: Push, *, dense: bool) -> None:
        """Say how gradients reach the tables, before any is in use.

        Args:
            push: Mode, and whether workers' gradients are averaged or added.
            dense: Whether dense parameters that no Plan places elsewhere live on servers too.

        Raises:
            ConfigError: If tables are in use in another way.
        """
        self.is_configured = True
        if self._mode is not None and (push, dense) != (self.push, self.dense):
            raise ConfigError(
                f"tables are in use in mode {self.push.mode!r} already, and are now asked for mode {push.mode!r}. Give "
                "the strategy or Plan before the first forward pass, the same for all models."
            )
        self.push, self.dense = push, dense

    # --- reading ----------------------------------------------------------------------------------------------------

    def pull(self, wants: Sequence[tuple[Handle, Keys]]) -> list[Rows]:
        """Return the rows of unique ids, shape (n, dim) each, as of this worker's step."""
        self._end_dropped_step()
        for handle, _ in wants:
            self._know(handle)
        known = [(handle, keys) for handle, keys in wants if handle.table in self._declared]
        rows = iter(self.mode.pull([Want(str(handle.table), keys) for handle, keys in known]).rows() if known else [])
        return [
            next(rows) if handle.table in self._declared else self._initial_rows(handle, keys) for handle, keys in wants
        ]

    def _know(self, handle: Handle) -> None:
        if handle.table is None:
            give_name(handle, free_name(self._declared))
        self._handles[str(handle.table)] = handle
        self._declare(handle)
        if not self._optimizers and not self._hooks:
            self._hook_every_optimizer()

    def _declare(self, handle: Handle) -> None:
        """Make the table of a handle once its rule is known.

        Raises:
            ConfigError: If servers need the rule and nobody said it, or the optimizer came after another was assumed.
        """
        name = str(handle.table)
        if name in self._declared and name not in self._rules_loaded:
            return
        holder = self._holder_of(handle)
        rule = handle.settings.optimizer or (rule_of(*holder) if holder else self._rules_loaded.get(name))
        if rule is None and self.context.role.server_endpoints:
            raise ConfigError(
                f"table {name!r} has no update rule yet. Call distributed_optimizer(optimizer), with the table's "
                "parameter in the optimizer, before the first forward pass, or give SparseEmbedding an optimizer=."
            )
        if rule is None and self.context.is_distributed:
            open_mode(self.context, self.push)  # raises: workers share tables, and there is no server
        if rule is None or self._declared.get(name) == rule:
            return
        if name in self._declared:
            raise ConfigError(
                f"table {name!r} was loaded with {self._declared[name]} and read before an optimizer was there, which "
                f"now asks for {rule}. Make the optimizer before the first forward pass."
            )
        self.mode.declare([handle.settings.spec(name, rule)])
        self._declared[name] = rule
        self._untrained.pop(name, None)
        if name in self._first_values:
            self._assign(name, self._first_values.pop(name), over=False)

    def start_from(self, handle: Handle, values: Tensor) -> None:
        """Give the rows 0, 1, ... of a table these values, shape (n, dim); before training only those it lacks.

        Collective once the table has an update rule: worker 0's values count.
        """
        name = str(handle.table)
        if name in self._declared:
            self._assign(name, values, over=True)
        else:
            self._first_values[name] = values

    def _assign(self, name: str, values: Tensor, *, over: bool) -> None:
        if self.context.role.attempt and not over:
            return
        is_first = self.context.rank == 0 and (over or not self.mode.store.report()[name].rows)
        change = Change(name, np.arange(len(values)), values.contiguous().numpy(), kind="assign")
        self.mode.assign([change] if is_first else [])
        agree(f"first values of {name}", list(values.shape))

    def _initial_rows(self, handle: Handle, keys: Keys) -> Rows:
        """Return rows of a table that no optimizer trained yet, so that its rule is not known."""
        name = str(handle.table)
        if name in self._first_values:
            rows: Rows = self._first_values[name].numpy()[keys]
            return rows
        if name not in self._untrained:
            self._untrained[name] = make_table(handle.settings.spec(name, SGD(lr=0.0)))
        out = np.empty((len(keys), handle.settings.dim), np.float32)
        self._untrained[name].pull(keys, out)
        return out

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, handle: Handle, seen: Occurrences, gradient: Tensor) -> None:
        """Add the gradient of looked-up rows to a handle; called during backward."""
        factor = self._gain()
        if factor == 0.0:
            return
        self._open_step(handle)
        handle.collect(seen, gradient if factor == 1.0 else gradient * factor)

    def _gain(self) -> float:
        """Return the factor of this rank's gradients that makes their mean over the workers the global one."""
        share, workers = self.context.batch, self.context.world_size
        factor = 1.0 if share is None else share.weight * workers
        return factor if self.push.reduce == "mean" else factor * workers

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients of parameters on servers that this optimizer steps, and take them from it.

        Raises:
            ConfigError: If a table has a gradient and no update rule.
        """
        is_known = optimizer in self._optimizers
        self._optimizers.add(optimizer)
        handles = self._handles_of(optimizer, is_known)
        changes = [change for handle in handles if (change := self._take(handle))]
        changes += self._dense.hand_out(optimizer)
        if changes or self._dense.steps(optimizer) or any(self._holder_of(handle) for handle in handles):
            self._send(changes)

    def after_step(self, optimizer: Optimizer) -> None:
        """Read the dense parameters of this optimizer back from the servers."""
        if self._dense.steps(optimizer):
            self._dense.read(self.mode, optimizer)

    def _handles_of(self, optimizer: Optimizer, is_known: bool) -> list[Handle]:
        """Return the handles that a step of this optimizer pushes: those it holds, and those that none holds."""
        handles = []
        for handle in self._handles.values():
            holder, own_rule = self._holder_of(handle), handle.settings.optimizer
            if holder is None and own_rule is None and handle.grad is not None and is_known:
                raise ConfigError(
                    f"the parameter of table {handle.label} is in no optimizer, so nothing says how its rows are "
                    "updated. Give the optimizer all of model.parameters(), or SparseEmbedding its own optimizer=."
                )
            if holder[0] is optimizer if holder else own_rule is not None:
                handles.append(handle)
        return handles

    def _take(self, handle: Handle) -> Change | None:
        holder = self._holder_of(handle)
        if handle.grad is not None:
            self._declare(handle)
        follows = holder is not None and handle.settings.optimizer is None
        return handle.hand_out(float(holder[1]["lr"]) if holder and follows else None)

    def _holder_of(self, handle: Handle) -> tuple[Optimizer, dict[str, Any]] | None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(param is handle for param in group["params"]):
                    return optimizer, group
        return None

    def _send(self, changes: Sequence[Change]) -> None:
        if self._is_finished:
            raise ClosedError("an optimizer stepped after stop_worker(). Stop after the last step.")
        if all(_is_finite(change) for change in changes):
            self.mode.push(changes)
        else:
            self._skip("a gradient is not finite")
        if self._opener is not None and self._opener.grad is None:
            self._opener = None

    def _open_step(self, param: nn.Parameter) -> None:
        self._end_dropped_step()
        if self._opener is None:
            self._opener = param

    def _end_dropped_step(self) -> None:
        """End a step whose gradients the script dropped, as a gradient scaler does, so that nobody waits for it."""
        if self._opener is not None and self._opener.grad is None:
            self._opener = None
            self._skip("its gradients were dropped before the optimizer stepped")

    def _skip(self, why: str) -> None:
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:
            logger.warning("step %d sent nothing to the tables: %s (%d so far)", self.mode.step, why, self.skipped)
        self.mode.push([], weight=0.0)

    # --- optimizers and dense parameters ----------------------------------------------------------------------------

    def name_table(self, handle: Handle, name: str) -> None:
        """Name the table of a module, if nobody named it yet.

        Raises:
            ConfigError: If the name is taken by a table of another model.
        """
        if handle.table is not None:
            return
        if name in self._declared:
            raise ConfigError(
                f"table {name!r} holds what another model of this process trained. Name this model's tables, "
                "SparseEmbedding(..., name=...), with the same name to go on training that one."
            )
        give_name(handle, name)

    def place(self, param: nn.Parameter, *, on_servers: bool) -> None:
        """Say where a dense parameter lives."""
        self._places[param] = on_servers

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer whose caller sees to it that `before_step` and `after_step` run.

        Collective when dense parameters live on servers: worker 0's values become those of all.
        """
        self._optimizers.add(optimizer)
        self._unhook()
        params = self._dense.add(optimizer, self._lives_on_servers)
        if params:
            role = self.context.role
            self._dense.start(optimizer, self.mode, is_first=role.rank == 0, is_again=role.attempt > 0)
        for param in params:
            param.register_hook(partial(self._on_dense_gradient, param))

    def read_dense(self) -> None:
        """Read all dense parameters from the servers."""
        self._dense.read(self.mode)

    def _lives_on_servers(self, param: Tensor) -> bool:
        is_dense = not isinstance(param, Handle) and param.requires_grad
        return is_dense and bool(self._places.get(param, self.dense))

    def _on_dense_gradient(self, param: nn.Parameter, gradient: Tensor) -> Tensor | None:
        self._open_step(param)
        factor = self._gain()
        return None if factor == 1.0 else gradient * factor

    def _hook_every_optimizer(self) -> None:
        def before(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if _current is self:
                self.before_step(optimizer)

        self._hooks = [register_optimizer_step_pre_hook(before)]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- snapshots and the end --------------------------------------------------------------------------------------

    def load(self, directory: Path, names: Sequence[str] | None = None) -> None:
        """Replace rows by those of a snapshot, of all tables or of those named; worker 0 does it for all.

        A table that no optimizer has claimed when it is read then keeps the rule it was saved with.
        """
        saved = read_manifest(directory).tables
        self._rules_loaded = {name: spec.rule for name, spec in saved.items() if names is None or name in names}
        self.mode.load(directory, names if self.context.rank == 0 else [])

    def finish(self) -> None:
        """Send what is held back and leave the tables, which can still be read. Safe to call twice."""
        self._unhook()
        self._is_finished = True
        if self._mode is not None:
            self._mode.finish()

    def close(self) -> None:
        """Let go of the tables at the end of the process.

        A script that failed does not take its leave: the others must learn that this worker is lost.
        """
        failed = hasattr(sys, "last_value") or os.path.isfile(os.environ.get("PHALANX_ERROR_FILE", ""))
        if not failed:
            self.finish()
        if self._mode is not None:
            self._mode.store.close()
        self._mode = None
        self._untrained.clear()


def _is_finite(change: Change) -> bool:
    # A sum is as good as a look at every value, and takes no memory.
    return math.isfinite(float(torch.from_numpy(change.values).sum()))


# --- this process's own ---------------------------------------------------------------------------------------------

_current: Attachment | None = None


def current() -> Attachment:
    """Return this process's attachment, made for the job's Context at the first call."""
    global _current
    context = context_of.init()
    if _current is None or _current.context is not context:
        _current = Attachment(context)
        atexit.register(_current.close)
    return _current


def holds(param: Tensor) -> bool:
    """Return whether the gradient of this parameter goes to a table."""
    return isinstance(param, Handle) or (_current is not None and param in _current._dense)
