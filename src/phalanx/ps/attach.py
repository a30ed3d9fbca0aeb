"""What ties this process's tables to its optimizers.

Rows are read through the training mode, and every optimizer step pushes the gradients of the parameters it holds. The
mode opens at the first use. A script that distributes nothing trains tables in this process by a hook that torch calls
before every optimizer's step; distributed optimizers are hooked by `parallel`, inside their learning-rate factor.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx.comm.context as context_of
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.plan.value import Push
from phalanx.ps.handle import Handle, Occurrences, free_name, give_name
from phalanx.ps.modes import Mode
from phalanx.ps.open import open_mode
from phalanx.ps.rules import SGD
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
        push: How gradients reach the tables.
    """

    def __init__(self, context: Context, push: Push = DEFAULT_PUSH) -> None:
        self.context = context
        self.push = push
        self.skipped = 0
        """Steps that sent nothing because a gradient was not finite, or was dropped before the optimizer stepped."""

        self._mode: Mode | None = None
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._declared: set[str] = set()
        self._untrained: dict[str, Table] = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._is_open = False

    @property
    def mode(self) -> Mode:
        """The training mode, opened now if need be.

        Raises:
            ConfigError: If the job has several workers and no server.
        """
        if self._mode is None:
            self._mode = open_mode(self.context, self.push)
        return self._mode

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
        """Make the table of a handle once its rule is known."""
        name = str(handle.table)
        if name in self._declared:
            return
        holder = self._holder_of(handle)
        rule = handle.settings.optimizer or (rule_of(*holder) if holder else None)
        if rule is not None:
            self.mode.declare([handle.settings.spec(name, rule)])
            self._declared.add(name)
            self._untrained.pop(name, None)
        elif self.context.role.server_endpoints:
            raise ConfigError(
                f"table {name!r} has no update rule yet. Call distributed_optimizer(optimizer), with the table's "
                "parameter in the optimizer, before the first forward pass, or give SparseEmbedding an optimizer=."
            )

    def _initial_rows(self, handle: Handle, keys: Keys) -> Rows:
        """Return rows of a table that no optimizer trained yet, so that its rule is not known."""
        name = str(handle.table)
        if name not in self._untrained:
            self._untrained[name] = make_table(handle.settings.spec(name, SGD(lr=0.0)))
        out = np.empty((len(keys), handle.settings.dim), np.float32)
        self._untrained[name].pull(keys, out)
        return out

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, handle: Handle, seen: Occurrences, gradient: Tensor) -> None:
        """Add the gradient of looked-up rows to a handle; called during backward."""
        self._end_dropped_step()
        factor = self.gain()
        if factor == 0.0:
            return
        handle.collect(seen, gradient if factor == 1.0 else gradient * factor)
        self._is_open = True

    def gain(self) -> float:
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
        changes = [change for handle in self._handles_of(optimizer, is_known) if (change := self._take(handle))]
        if changes or any(isinstance(p, Handle) for group in optimizer.param_groups for p in group["params"]):
            self._send(changes)

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
        if all(_is_finite(change) for change in changes):
            self.mode.push(changes)
        else:
            self._skip("a gradient is not finite")
        self._is_open = self._is_pending()

    def _end_dropped_step(self) -> None:
        """End a step whose gradients the script dropped, as a gradient scaler does, so that nobody waits for it."""
        if self._is_open and not self._is_pending():
            self._is_open = False
            self._skip("its gradients were dropped before the optimizer stepped")

    def _is_pending(self) -> bool:
        return any(handle.grad is not None for handle in self._handles.values())

    def _skip(self, why: str) -> None:
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:
            logger.warning("step %d sent nothing to the tables: %s (%d so far)", self.mode.step, why, self.skipped)
        self.mode.push([], weight=0.0)

    # --- optimizers -------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer whose caller sees to it that `before_step` runs."""
        self._optimizers.add(optimizer)
        self._unhook()

    def _hook_every_optimizer(self) -> None:
        def before(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if _current is self:
                self.before_step(optimizer)

        self._hooks = [register_optimizer_step_pre_hook(before)]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send what is held back and leave the tables. Safe to call twice."""
        self._unhook()
        if self._mode is not None:
            self._mode.finish()


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
    return _current
