"""`Audit`: another rank computes a random logical replica again, and the bits of its gradients must agree.

Of some updates one replica is chosen, the same on all ranks. The rank that holds it keeps what its model was called
with and what gradient came back to the outputs; before the update it sends that on, and another rank computes forward
and backward pass from it with the same parameters. Where digests differ, the first rank computes once more, which tells
whose numbers changed. The loss itself, outside of the model, is not computed again.
"""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import Context
from phalanx.comm.local.random_state import RandomState
from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix_one
from phalanx.errors import ConfigError, CorruptionError
from phalanx.parallel.numerics.audit_payload import (
    AuditedCall,
    broadcast_bytes,
    pack_call,
    read_header,
    unpack_call,
)
from phalanx.parallel.numerics.locate import float_tensors
from phalanx.parallel.observe.sketch import digest
from phalanx.parallel.session import list_applied
from phalanx.plan.rules.collective_pass import why_not_alone

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class AuditedReplica:
    """What is computed again at one update."""

    replica: int
    owner: int
    """The rank that holds it."""

    auditor: int
    """The rank that computes it again."""


def choose_audited(update: int, fraction: float, assignment: Sequence[range]) -> AuditedReplica | None:
    """Return which replica of an update is computed again, the same on all ranks; None for most updates."""
    draws = [mix_one((update * 3 + index) * GOLDEN + GOLDEN & WORD) for index in range(3)]
    if draws[0] >= fraction * 2.0**64:
        return None
    replica = draws[1] % assignment[-1].stop
    owner = next(rank for rank, local in enumerate(assignment) if replica in local)
    return AuditedReplica(replica, owner, (owner + 1 + draws[2] % (len(assignment) - 1)) % len(assignment))


class Audit:
    """Audits the updates of one model.

    Args:
        model: Before it is distributed: gradients are looked at before anything changes them.
        fraction: Of the updates.
    """

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self._model, self._fraction = weakref.ref(model), fraction  # what was made of a model must not keep it alive
        self._context: Context | None = None
        self._updates = 0
        self.is_bound = False
        """Whether an optimizer's updates are audited; one of a model's optimizers counts them."""

        self.audited = 0
        """Replicas that were computed again so far, on any rank."""

        self._has_agreed = False
        """Whether gradients have been shown to follow from the model's outputs alone."""

        self._call: AuditedCall | None = None
        self._latest: AuditedCall | None = None
        """The last call of this rank, whose structure others' inputs have too."""

        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_hook(partial(self._on_gradient, name))

    def start(self, model: nn.Module, context: Context) -> None:
        """Begin, once the model is distributed.

        Raises:
            ConfigError: If there are no logical replicas on several ranks, or a rank cannot compute a pass alone.
        """
        why = _why_unaudited(context)
        if why is not None:
            raise ConfigError(
                "strategy.audit lets another rank compute a logical replica again, which has to have the same bits "
                f"there, and {why}. Set strategy.logical_replicas (or --replicas) on two ranks or more, a fixed number "
                "of them that train data parallel without sharding, or audit = 0."
            )
        self._context = context
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    # -- what the chosen replica computes ----------------------------------------------------------------------

    def _choice(self) -> AuditedReplica | None:
        return choose_audited(self._updates, self._fraction, self._replicas.assignment)

    @property
    def _replicas(self) -> Replicas:
        assert self._context is not None
        assert self._context.replicas is not None
        return self._context.replicas

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._call = None
        if not (model.training and torch.is_grad_enabled()) or (choice := self._choice()) is None:
            return
        leaves, spec = tree_flatten((args, kwargs))
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        call = AuditedCall(copies, spec, buffers, RandomState.current())
        self._latest = self._latest or call
        if self._replicas.current == choice.replica:
            self._call = self._latest = call

    def _after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if (call := self._call) is not None:
            for index, tensor in enumerate(float_tensors(output)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(_keep_gradient, call.output_grads, index))

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if self._call is not None:
            self._call.digests[name] = digest(gradient)

    # -- the update --------------------------------------------------------------------------------------------

    def before_update(self, _optimizer: Optimizer) -> None:
        """Compute the chosen replica of this update again, if there is one. Collective then.

        Raises:
            CorruptionError: If its gradients have other bits; on all ranks, naming the rank.
        """
        choice, self._updates = self._choice(), self._updates + 1
        if choice is not None:
            self.audited += 1
            try:
                self._compare(choice)
            finally:
                self._call = self._latest = None

    def _compare(self, choice: AuditedReplica) -> None:
        assert self._context is not None
        rank, device = self._context.rank, self._context.device
        payload = broadcast_bytes(pack_call(self._latest) if rank == choice.owner else b"", choice.owner, device)
        again = b""
        if rank == choice.auditor:
            again = json.dumps(self._compute_again(payload)).encode()
        theirs = json.loads(broadcast_bytes(again, choice.auditor, device))
        digests = read_header(payload)["digests"]
        names = [name for name in digests if theirs.get(name) != digests[name]]
        if not names:
            self._has_agreed = True
            return
        if not self._has_agreed:
            raise ConfigError(
                f"the first audited replica, of step {self._updates - 1}, had other gradients when rank "
                f"{choice.auditor} computed them again from the model's inputs and the gradients of its outputs: "
                f"{_names(names)}. strategy.audit needs a model that is called once for each batch, and a loss that "
                "takes nothing but its outputs (use weight_decay in place of a penalty). Set audit = 0 otherwise."
            )
        once_more = json.dumps(self._compute_again(payload)).encode() if rank == choice.owner else b""
        own_again = json.loads(broadcast_bytes(once_more, choice.owner, device))
        raise CorruptionError(self._explain(choice, names, digests, theirs, own_again))

    def _explain(
        self,
        choice: AuditedReplica,
        names: list[str],
        digests: dict[str, int],
        theirs: dict[str, int],
        own_again: dict[str, int],
    ) -> str:
        if own_again == theirs:
            who = f"rank {choice.owner} computed it wrong the first time: a second time it agrees. Look at its memory"
        elif own_again == digests:
            who = (
                f"rank {choice.owner} computes the same twice and rank {choice.auditor} something else: they compute "
                "differently. Look for other processors, numbers of threads, or a broken one"
            )
        else:
            who = f"rank {choice.owner} computes something else each time. Look for operators without a fixed order"
        return (
            f"step {self._updates - 1}: the gradients of replica {choice.replica}, held by rank {choice.owner}, had "
            f"other bits when rank {choice.auditor} computed them again: {_names(names)}. {who[0].upper()}{who[1:]}."
        )

    def _compute_again(self, payload: bytes) -> dict[str, int]:
        """Return digests of the gradients that follow from what a rank sent."""
        model = self._model()
        assert model is not None
        assert self._latest is not None
        assert self._context is not None
        call = unpack_call(payload, self._latest.spec, self._context.device)
        params = {
            name: param.detach().clone().requires_grad_(param.requires_grad) for name, param in model.named_parameters()
        }
        args, kwargs = tree_unflatten(call.leaves, call.spec)
        with call.states.in_use(), _without_hooks(model), torch.enable_grad():
            outputs = list(float_tensors(functional_call(model, {**params, **call.buffers}, args, kwargs)))
            trained = {name: param for name, param in params.items() if param.requires_grad}
            indices = list(call.output_grads)
            grads = torch.autograd.grad(
                [outputs[index] for index in indices],
                list(trained.values()),
                [call.output_grads[index] for index in indices],
                allow_unused=True,
            )
        return {name: digest(grad) for name, grad in zip(trained, grads, strict=True) if grad is not None}


def _why_unaudited(context: Context) -> str | None:
    """Return why no other rank can compute a replica again; None if one can."""
    applied = list_applied()
    if context.replicas is None:
        return "there are none"
    if context.replicas.is_elastic:
        return "ranks of this job may leave and join (-n a:b)"
    if not context.is_distributed:
        return "there is one rank"
    if any(each.is_sharded for each in applied):
        return "parameters are sharded"
    has_servers = bool(context.role.server_endpoints)
    return next((why for each in applied if (why := why_not_alone(each.plan, has_servers=has_servers))), None)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _keep_gradient(grads: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    grads[index] = gradient.detach().clone()


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the hooks of the outermost module, which follow the forward passes of the training."""
    before = model._forward_hooks, model._forward_pre_hooks
    model._forward_hooks, model._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        model._forward_hooks, model._forward_pre_hooks = before
