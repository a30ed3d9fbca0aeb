"""`TableClient`: pulls rows for lookups and pushes gradients at `optimizer.step()`.

Rows are read through the training mode, and every optimizer step pushes the gradients of the parameters it holds. The
mode opens at the first use. A script that distributes nothing trains tables in this process by a hook that torch calls
before every optimizer's step; distributed optimizers are hooked by `parallel`, inside their learning-rate factor.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx.comm.context as context_of
from phalanx.comm.batch.share import row_weight_of
from phalanx.comm.context import Context
from phalanx.errors import ClosedError, ConfigError, PhalanxError
from phalanx.plan.value import Push
from phalanx.ps.client.connect import open_consistency, report_unused
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.client.desync_check import DesyncCheck
from phalanx.ps.client.parameter import TableParameter, UniqueKeys
from phalanx.ps.client.registry import TableRegistry
from phalanx.ps.snapshot.manifest import read_manifest
from phalanx.ps.stores.base import Keys, PendingRows, PullSpec, Rows
from phalanx.ps.stores.update import TableUpdate

if TYPE_CHECKING:  # what follows forward passes reads through a client
    from phalanx.ps.model_passes import ModelPass

logger = logging.getLogger("phalanx.ps")

DEFAULT_PUSH = Push(mode="async")
"""What a job with servers does without a strategy; in one process it is the same as sync."""

REPORT_UNUSED_S = 5.0
"""Longest that a process which ends tries to reach a server that it never used."""


class TableClient:
    """This process's part in training tables.

    Args:
        context: The job.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.push = DEFAULT_PUSH
        self.is_configured = False
        self.skipped = 0
        """Steps that sent nothing because a gradient was not finite, or was dropped before the optimizer stepped."""

        self.since = time.time()
        """When this process began to use tables."""

        self.model_passes: list[ModelPass] = []
        """The forward passes of models that are under way, one within the other."""

        self._loads = 0
        self._mode: ConsistencyMode | None = None
        self.registry = TableRegistry(context, lambda: self.mode)
        """The tables, and what trains each."""

        self._hooks: list[Any] = []
        self._desync = DesyncCheck(context.rank, context.world_size) if context.is_distributed else None
        self._pulled_dense: PendingRows | None = None
        """The dense parameters that come with the answer to the last push."""

        self._is_finished = False
        self._has_reported = False
        """Whether the servers know that this worker used no table."""

        self._has_warned = False
        self._is_asked_to_leave = False
        self._opener: weakref.ref[nn.Parameter] | None = None
        """The parameter that got the first gradient since the last step; a model that is deleted is not kept for it."""

    @property
    def mode(self) -> ConsistencyMode:
        """The training mode, opened now if need be.

        Raises:
            ConfigError: If the job has several workers and no server.
        """
        if self._mode is None:
            where: Literal["servers", "workers"] = "servers" if self.registry.dense_default else "workers"
            self._mode = open_consistency(self.context, self.push, dense=where)
        return self._mode

    def configure(self, push: Push, *, dense: bool) -> None:
        """Say how gradients reach the tables, before any is in use.

        Args:
            push: Mode, and whether workers' gradients are averaged or added.
            dense: Whether dense parameters that no Plan places elsewhere live on servers too.

        Raises:
            ConfigError: If tables are in use in another way.
        """
        self.is_configured = True
        role = self.context.role
        if not dense and role.least_workers and role.server_endpoints:
            raise ConfigError(
                "Dense parameters were asked for on the workers, averaged at each step (a_sync_configs "
                '{"dense": "all_reduce"}, or a Plan), and in this job workers come and go (--worker-num '
                f"{role.least_workers}:{role.world_size}). Keep them on the servers, or give --worker-num one number."
            )
        if self._mode is not None and (push, dense) != (self.push, self.registry.dense_default):
            raise ConfigError(
                f"tables are in use in mode {self.push.mode!r} already, and are now asked for mode {push.mode!r}. Give "
                "the strategy or Plan before the first forward pass, the same for all models."
            )
        self.push, self.registry.dense_default = push, dense

    @property
    def version(self) -> tuple[int, ...]:
        """Another value once this process pushed or loaded rows: what it pulled before may be older than theirs."""
        return (self._loads, *(() if self._mode is None else (self._mode.step, self._mode.pushes)))

    # --- reading ----------------------------------------------------------------------------------------------------

    def pull(self, pull_specs: Sequence[tuple[TableParameter, Keys]]) -> list[Rows]:
        """Return the rows of unique ids, shape (n, dim) each, as of this worker's step."""
        self.end_dropped_step()
        self.leave_if_asked()
        for parameter, _ in pull_specs:
            self.registry.use(parameter)
        if not self.registry.optimizers and not self._hooks:
            self._hook_every_optimizer()
        declared = [PullSpec(str(p.table), keys) for p, keys in pull_specs if self.registry.is_declared(p)]
        rows = iter(self.mode.pull(declared).rows() if declared else [])
        return [
            next(rows) if self.registry.is_declared(p) else self.registry.initial_rows(p, keys)
            for p, keys in pull_specs
        ]

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, parameter: TableParameter, seen: UniqueKeys, gradient: Tensor) -> None:
        """Add the gradient of looked-up rows to a parameter; called during backward."""
        factor = self._gradient_factor()
        if factor == 0.0:
            return
        self._open_step(parameter)
        parameter.collect(seen, gradient if factor == 1.0 else gradient * factor)

    def _gradient_factor(self) -> float:
        """Return the factor of this rank's gradients that makes their mean over the workers the global one."""
        workers, is_sum = self.context.world_size, self.push.reduce != "mean"
        factor = row_weight_of(self.context.passes.of_backward(workers), workers, is_sum=is_sum)
        return factor * workers if is_sum else factor

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients of parameters on servers that this optimizer steps, and take them from it.

        Raises:
            ConfigError: If a table has a gradient and no update rule.
        """
        is_new = optimizer not in self.registry.optimizers
        self.registry.optimizers.add(optimizer)
        if wrong := self.registry.missing_rule():
            self._report_missing_rule(wrong, may_be_early=is_new)
        updates, is_step = self.registry.take_updates(optimizer)
        if is_step:
            self._pulled_dense = self._send(updates, self.registry.dense_specs(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """Take the dense parameters as the servers have them after the push, or see that workers keep them equal."""
        pulled, self._pulled_dense = self._pulled_dense, None
        if pulled is not None and self.registry.has_dense(optimizer):
            self.registry.read_dense(optimizer, pulled)
        elif self._desync is not None:
            self._desync.look(optimizer, self.registry.is_averaged)

    def _report_missing_rule(self, wrong: str, *, may_be_early: bool) -> None:
        if not self._hooks:
            raise ConfigError(wrong)
        # The script distributes nothing, so its optimizers are known by their steps; the right one may be yet to come.
        if not may_be_early and not self._has_warned:
            self._has_warned = True
            logger.warning("so far %s", wrong)

    def _send(self, updates: Sequence[TableUpdate], then: Sequence[PullSpec]) -> PendingRows:
        if self._is_finished:
            raise ClosedError("an optimizer stepped after stop_worker(). Stop after the last step.")
        if all(_is_finite(update) for update in updates):
            pulled = self.mode.push(updates, then=then)
        else:
            pulled = self._skip("a gradient is not finite", then)
        if self._is_opener_done():
            self._opener = None
        return pulled

    def _open_step(self, param: nn.Parameter) -> None:
        self.end_dropped_step()
        if self._opener is None:
            self._opener = weakref.ref(param)

    def _is_opener_done(self) -> bool:
        """Return whether the gradient that opened this step was taken or dropped."""
        return self._opener is not None and ((parameter := self._opener()) is None or parameter.grad is None)

    def end_dropped_step(self) -> None:
        """End a step whose gradients the script dropped, as a gradient scaler does, so that nobody waits for it."""
        if self._is_opener_done():
            self._opener = None
            self._skip("its gradients were dropped before the optimizer stepped")

    def _skip(self, why: str, then: Sequence[PullSpec] = ()) -> PendingRows:
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:
            logger.warning("step %d sent nothing to the tables: %s (%d so far)", self.mode.step, why, self.skipped)
        return self.mode.push([], weight=0.0, then=then)

    # --- optimizers and dense parameters ----------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer whose caller sees to it that `before_step` and `after_step` run.

        Collective when dense parameters live on servers: worker 0's values become those of all.
        """
        self._unhook()
        for param in self.registry.add_optimizer(optimizer):
            param.register_hook(partial(self._on_dense_gradient, param))

    def _on_dense_gradient(self, param: nn.Parameter, gradient: Tensor) -> Tensor | None:
        self._open_step(param)
        factor = self._gradient_factor()
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
        self._loads += 1
        saved = read_manifest(directory).tables
        self.registry.loaded = {name: spec.rule for name, spec in saved.items() if names is None or name in names}
        self.mode.load(directory, names if self.context.rank == 0 else [])

    def finish(self) -> None:
        """Send what is held back and leave the tables, which can still be read. Safe to call twice."""
        self._unhook()
        self._is_finished = True
        if self._mode is not None:
            self._mode.finish()
        else:
            self._report_unused(failed=False, connect_s=60.0)

    def _report_unused(self, *, failed: bool, connect_s: float) -> None:
        """Let servers that wait for this worker's tables know that none will come."""
        role = self.context.role
        if not self._has_reported and role.is_worker and role.server_endpoints:
            self._has_reported = True
            report_unused(role, failed=failed, connect_s=connect_s)

    def leave_on_sigterm(self) -> None:
        """Let SIGTERM mean that this worker leaves after the step it computes, unless the script uses the signal."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._ask_to_leave)

    def _ask_to_leave(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked_to_leave = True

    def leave_if_asked(self) -> None:
        """Leave between two steps if this worker was asked to.

        Raises:
            SystemExit: With code 0, when it has left.
        """
        if self._is_asked_to_leave and self._opener is None:
            logger.info("worker %d leaves: it was asked to by SIGTERM", self.context.rank)
            self.finish()
            raise SystemExit(0)

    def close(self) -> None:
        """Let go of the tables at the end of the process.

        A script that failed does not take its leave: the others must learn that this worker is lost.
        """
        failed = hasattr(sys, "last_value") or os.path.isfile(os.environ.get("PHALANX_ERROR_FILE", ""))
        # Our launcher sees a failure by itself.
        if self._mode is None and not (failed and self.context.role.launcher == "phalanx"):
            try:
                self._report_unused(failed=failed, connect_s=REPORT_UNUSED_S)
            except PhalanxError as error:
                logger.warning("could not tell the servers that this worker ends: %s", error)
        if not failed and self._mode is not None:
            self.finish()
        if self._mode is not None:
            self._mode.store.close()
        self._mode = None
        self.registry.close()


def _is_finite(update: TableUpdate) -> bool:
    # A sum is as good as a look at every value, and takes no memory.
    return math.isfinite(float(torch.from_numpy(update.values).sum()))


# --- this process's own ---------------------------------------------------------------------------------------------

_current: TableClient | None = None


def current() -> TableClient:
    """Return this process's client, made for the job's Context at the first call."""
    global _current
    context = context_of.init()
    if _current is None or _current.context is not context:
        _current = TableClient(context)
        atexit.register(_current.close)
    return _current


def holds(param: Tensor) -> bool:
    """Return whether the gradient of this parameter goes to a table."""
    return isinstance(param, TableParameter) or (_current is not None and _current.registry.is_dense(param))
