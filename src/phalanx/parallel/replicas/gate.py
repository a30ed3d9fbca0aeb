"""`ReplicaGate`: hold the steps of an optimizer back until this rank's last logical replica has made its pass.

A round is one global batch: every rank runs its replicas one after the other, each with a pass of the script's loop. A
step of an optimizer holds back until the rank's last replica; then gradients are added up over all replicas.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.batch.update_group import UpdateGroup
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.parallel.elastic.peer_state import schedulers_of
from phalanx.parallel.elastic.recovery import ElasticRecovery
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.gate import refuse_torch_scaler
from phalanx.parallel.step.hooks import add_action

logger = logging.getLogger("phalanx.parallel")


def hold_updates(optimizer: Optimizer, context: Context) -> None:
    """Let an optimizer update once for all logical replicas of this rank, if there are any."""
    replicas = context.replicas
    if replicas is None:
        return
    add_action(optimizer, StepPhase.WAIT_FOR_REPLICAS, ReplicaGate(replicas, context.recovery).admit)
    if replicas.are_shared:
        refuse_torch_scaler(optimizer, "ranks hold several logical replicas, and it cannot see that an update waits")


class ReplicaGate:
    """Holds an optimizer's step back until this rank's last replica has made its pass."""

    def __init__(self, replicas: Replicas, recovery: ElasticRecovery | None = None) -> None:
        self._replicas, self._recovery = replicas, recovery
        self._settings: list[dict[str, Any]] = []
        self._schedulers: list[tuple[weakref.ref[LRScheduler], int]] | None = None
        """Those of the optimizer that count every call, and how many steps they had made at the last held step."""

        self._group: UpdateGroup | None = None
        """The one of the last step that was asked for."""

        self._turns = 0
        """Turns of it until then."""

        self._has_noted_rest = False

    def admit(self, optimizer: Optimizer) -> bool:
        """Return whether the step updates: at the last replica of the last global batch of the update.

        Raises:
            ConfigError: If the loop does not make one step for each batch, or for each k batches, after the backward
                pass, or something counts replicas as steps.
        """
        replicas = self._replicas
        group, local = replicas.group, replicas.local
        is_first = self._group is not group
        if replicas.are_shared:
            self._check_turn()
        if replicas.is_elastic:
            self._check_elastic(group)
        elif len(local) > 1:
            self._count_batches(group)
        elif group.turns > 1:
            group.length = group.length or group.turns
            _check_epoch(group.turns, replicas)
        self._note_rest(group)
        self._group, self._turns = group, group.turns
        replicas.progress.has_stepped = True
        if replicas.are_shared:
            self._check_settings(optimizer, is_first=is_first)
        is_update = replicas.is_update_due
        if is_update and self._recovery is not None and replicas.is_round_open:  # of several optimizers, the first
            is_update = self._recovery.complete()
        if is_update:
            replicas.end_round()
        return is_update

    def _check_turn(self) -> None:
        if self._replicas.current is None:
            raise ConfigError(
                "optimizer.step() was called before a loader gave out a batch, or after its last, and each logical "
                "replica has a batch of its own. Call it in the loop. Give the data to px.distribute, or make the "
                "loader with px.data.ShardedLoader."
            )
        if not self._replicas.progress.has_gradients:
            raise ConfigError(
                "optimizer.step() was called before the backward pass of a batch, while ranks hold several logical "
                "replicas: the update waits for the last replica's gradients. Call backward(), then step()."
            )

    def _batches_since(self, group: UpdateGroup) -> int:
        """Return the batches of the group since this optimizer's last step, or since its start."""
        return group.turns - (self._turns if self._group is group else 0)

    def _count_batches(self, group: UpdateGroup) -> None:
        """Learn from the first step of a group how many global batches it has; check the others."""
        replicas, since = self._replicas, self._batches_since(group)
        if group.length is None:
            group.length = since
        if group.length > 1:
            _check_epoch(group.length, replicas)
        is_end = group.is_complete and replicas.is_last
        is_left_out = is_end and group.turns != group.rounds * len(replicas.local)
        is_due = since == group.length or (is_end and group.ends_epoch and since < group.length)
        if not is_due or is_left_out:
            raise ConfigError(
                f"optimizer.step() was called after {since} of this rank's batches, and of {group.turns} of this "
                f"update the first call came after {group.length}, while it computes logical replicas "
                f"{', '.join(map(str, replicas.local))} in turn. Call backward() for every batch, and step() for every "
                "batch or after one fixed number of them; or accumulate gradients with strategy.gradient_merge."
            )

    def _note_rest(self, group: UpdateGroup) -> None:
        """Say once, at the first step, that the last update of an epoch takes fewer global batches."""
        turn = self._replicas.turn
        rounds = None if turn is None or turn.iteration is None else turn.iteration.rounds
        if self._has_noted_rest or group.length is None:
            return
        self._has_noted_rest = True
        if rounds is None or group.length == 1 or rounds % group.length == 0 or 0 not in self._replicas.local:
            return
        logger.info(
            "the loop accumulates gradients over %d global batches for each update, and an epoch has %d: its last "
            "update takes %d, where step() is called at its last batch (i + 1 == len(loader))",
            group.length,
            rounds,
            rounds % group.length,
        )

    def _check_elastic(self, group: UpdateGroup) -> None:
        if self._batches_since(group) != 1:
            raise ConfigError(
                f"optimizer.step() was called after {self._batches_since(group)} batches where ranks may leave and "
                "join (-n a:b): gradients that a loop accumulates would be gone with a rank, and missing on one that "
                "joins. Call it for every batch, and accumulate with strategy.gradient_merge."
            )

    def _check_settings(self, optimizer: Optimizer, *, is_first: bool) -> None:
        """Raise if a setting changed between two replicas of a round, or a scheduler made a step there."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if is_first:
            if self._schedulers is None:
                self._schedulers = [(weakref.ref(each), each.last_epoch) for each in schedulers_of(optimizer)]
        elif (
            self._schedulers
            and any(
                scheduler is not None and scheduler.last_epoch != count
                for scheduler, count in ((reference(), count) for reference, count in self._schedulers)
            )
        ) or repr(settings) != repr(self._settings):
            raise ConfigError(_COUNTS_REPLICAS)
        self._settings = settings
        if self._schedulers is not None:
            self._schedulers = [
                (reference, scheduler.last_epoch)
                for reference, _ in self._schedulers
                if (scheduler := reference()) is not None
            ]


def _check_epoch(length: int, replicas: Replicas) -> None:
    """Raise if an update has global batches of two epochs.

    A loop that counts its batches counts otherwise on a rank with several replicas, so it would update elsewhere.

    Raises:
        ConfigError: Says what to do.
    """
    if replicas.turn is None or not replicas.group.spans_epochs:
        return  # one update of a whole epoch may come behind its loop
    raise ConfigError(
        f"the loop accumulates gradients over {length} global batches for each update, and an epoch ended between two "
        "of them without a step: which updates these take part in would depend on how many logical replicas a rank "
        "holds. Call step() at the last batch of an epoch too (if i % k == k - 1 or i + 1 == len(loader)), or use "
        "strategy.gradient_merge, whose groups continue."
    )


_COUNTS_REPLICAS = (
    "a learning rate or another setting of an optimizer changed between two replicas of one global batch, or a "
    "scheduler made a step there. Wrap schedulers, so that they count updates: "
    "scheduler = px.follow_updates(scheduler); change settings yourself where px.has_updated(optimizer)."
)
