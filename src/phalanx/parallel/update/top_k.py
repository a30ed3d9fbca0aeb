"""`TopKCompressor`: deep gradient compression: exchange the top-k gradient entries, keep the rest as local residuals.

Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv:1712.01887), algorithm 4: momentum is applied before the
choice (momentum correction, equation 4), entries that were sent lose their momentum (factor masking, equation 6), and
the sparsity rises over the first steps (warm-up). The optimizer then updates without momentum.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from phalanx.comm.groups import Group
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.hooks import add_action
from phalanx.plan.value import TopK

logger = logging.getLogger("phalanx.parallel")

_Entry = tuple[Tensor, Tensor]
"""A parameter, and what this rank adds to its update."""


class TopKCompressor:
    """Exchanges the largest entries of gradients just before an optimizer's step.

    Of a parameter that is cut over other ranks, each compresses the part it has.

    Args:
        params: What this rank has of parameters, by plain name.
        update: How much stays behind, and from which step on.
        groups: By name, the ranks whose gradients are added.
        shares: By how much sums are divided for a mean; 1 for a sum.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], update: TopK, groups: Mapping[str, Group], shares: int
    ) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._shapes = {name: param.shape for name, param in params.items()}
        self._update = update
        self._groups = dict(groups)
        self._scale = 1.0 / shares
        self._velocity: dict[str, Tensor] = {}
        self._residual: dict[str, Tensor] = {}
        self._held: list[tuple[dict[str, Any], float, float]] = []
        if params and all(param.numel() < update.dense_below for param in params.values()):
            logger.warning(
                "dgc does not compress: every parameter has fewer than %d elements, and is sent in full.",
                update.dense_below,
            )
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._resumed_at = 0
        self.sent = 0
        """Entries this rank sent in the last step."""

    def bind(self, optimizer: Optimizer) -> None:
        """Exchange gradients before each step of an optimizer from now on.

        Raises:
            ConfigError: If it is not SGD, or damps its momentum.
        """
        if not isinstance(optimizer, SGD) or any(group["dampening"] for group in optimizer.param_groups):
            raise ConfigError(
                f"strategy.dgc corrects the momentum of torch.optim.SGD without dampening, found "
                f"{type(optimizer).__name__}. Use that, or turn dgc off."
            )
        self._steps.setdefault(optimizer, self._resumed_at)
        add_action(optimizer, StepPhase.EXCHANGE_GRADIENTS, self._exchange, needs_gradients=True)
        add_action(optimizer, StepPhase.RESTORE_MOMENTUM, self._restore_momentum)

    def observe(self, loss: Tensor) -> None:
        """Do nothing: what is sent does not depend on the loss."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a block that does nothing: all ranks have the same weights."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, and what waits on this rank."""
        steps = max(self._steps.values(), default=self._resumed_at)
        tensors = {"velocity": dict(self._velocity), "residual": dict(self._residual)}
        return {"steps": steps, "over": self._over(), **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; what waited starts anew where ranks had other parts."""
        self._resumed_at = state["steps"]
        self._steps.update(dict.fromkeys(self._steps, state["steps"]))
        waited = [*state["velocity"].items(), *state["residual"].items()]
        fits = all(self._shapes.get(name) == tensor.shape for name, tensor in waited)
        if fits and state.get("over", []) == self._over():
            self._velocity, self._residual = dict(state["velocity"]), dict(state["residual"])
            return
        self._velocity, self._residual = {}, {}
        if waited:
            logger.warning(
                "dgc: gradients that were still to be sent when this was saved are dropped, because ranks now hold "
                "other parts of the model. Load with the same mesh to keep them."
            )

    def _over(self) -> list[list[int]]:
        """Return which ranks' gradients are added, all of the job's left out."""
        ranks_of_groups = {tuple(dist.get_process_group_ranks(group)) for group in self._groups.values()}
        return sorted(list(ranks) for ranks in ranks_of_groups if len(ranks) < dist.get_world_size())

    @torch.no_grad()
    def _exchange(self, optimizer: Optimizer) -> None:
        """Put the exchanged gradients in the place of this rank's own. Collective."""
        self._restore_momentum(optimizer)  # the step before may have been interrupted
        self._steps[optimizer] += 1
        sparsity = self._sparsity(self._steps[optimizer])
        members = [(p, group) for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        used = self._used_anywhere([param for param, _ in members])
        dense: list[_Entry] = []
        compressed: list[_Entry] = []
        for (param, group), is_used in zip(members, used, strict=True):
            if not is_used:
                continue
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            if sparsity is None:
                dense.append((param, gradient))
                continue
            entries = dense if param.numel() < self._update.dense_below else compressed
            entries.append((param, self._with_momentum(param, gradient, group, optimizer)))
        self._all_reduce_dense(dense)
        if sparsity is not None:
            self._all_gather_top_k(compressed, sparsity)
            for group in {id(group): group for _, group in members}.values():
                self._held.append((group, group["momentum"], group["weight_decay"]))
                group["momentum"] = group["weight_decay"] = 0.0

    def _restore_momentum(self, _optimizer: Optimizer) -> None:
        """Give the optimizer its momentum back."""
        for group, momentum, decay in self._held:
            group["momentum"], group["weight_decay"] = momentum, decay
        self._held.clear()

    def _sparsity(self, step: int) -> float | None:
        """Return the share of entries that stay behind in a step; None while gradients travel whole."""
        since = step - 1 - self._update.rampup_begin_step
        if since < 0:
            return None
        ramp = self._update.sparsity
        return ramp[min(since * len(ramp) // self._update.rampup_steps, len(ramp) - 1)]

    def _group_of(self, param: Tensor) -> Group:
        return self._groups[self._names[id(param)]]

    def _used_anywhere(self, params: Sequence[Tensor]) -> list[bool]:
        """Return which parameters have a gradient, or something that waits, on any of the ranks that add theirs."""
        used = [param.grad is not None or self._names[id(param)] in self._residual for param in params]
        for group in dict.fromkeys(map(self._group_of, params)):
            members = [index for index, param in enumerate(params) if self._group_of(param) is group]
            flags = torch.tensor([used[i] for i in members], dtype=torch.uint8, device=params[0].device)
            with peers_named("the exchange of gradients", group):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            for index, flag in zip(members, flags.tolist(), strict=True):
                used[index] = bool(flag)
        return used

    def _by_group(self, entries: Sequence[_Entry]) -> Iterator[tuple[Group, list[_Entry]]]:
        """Yield what can travel together: gradients of one dtype that are added over the same ranks."""
        for kind in dict.fromkeys((param.dtype, self._group_of(param)) for param, _ in entries):
            yield kind[1], [entry for entry in entries if (entry[0].dtype, self._group_of(entry[0])) == kind]

    def _with_momentum(self, param: Tensor, gradient: Tensor, group: dict[str, Any], optimizer: Optimizer) -> Tensor:
        """Return what this rank adds to a parameter's update: its gradient with decay, and its own velocity."""
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * self._part_of(param, param)
        momentum = group["momentum"]
        if not momentum:
            return gradient
        name = self._names[id(param)]
        velocity = self._velocity.get(name)
        if velocity is None:
            velocity = self._velocity[name] = self._inherited(param, optimizer)
        velocity.mul_(momentum).add_(gradient)
        return gradient + momentum * velocity if group["nesterov"] else velocity.clone()

    def _inherited(self, param: Tensor, optimizer: Optimizer) -> Tensor:
        """Return this rank's part of the velocity that the optimizer has gathered while gradients travelled whole."""
        gathered = optimizer.state.get(param, {}).get("momentum_buffer")
        return torch.zeros_like(param) if gathered is None else self._part_of(param, gathered)

    def _part_of(self, param: Tensor, total: Tensor) -> Tensor:
        """Return this rank's even part of what all ranks' exchange adds up to `total`."""
        return total / (self._scale * dist.get_world_size(self._group_of(param)))

    def _all_reduce_dense(self, entries: Sequence[_Entry]) -> None:
        for group, same_group in self._by_group(entries):
            flat = torch.cat([value.reshape(-1) for _, value in same_group])
            with peers_named("the exchange of gradients", group):
                dist.all_reduce(flat, group=group)
            _set_gradients([param for param, _ in same_group], flat.mul_(self._scale))

    def _all_gather_top_k(self, entries: Sequence[_Entry], sparsity: float) -> None:
        self.sent = 0
        for group, same_group in self._by_group(entries):
            all_indices, values = self._select_top_k(same_group, sparsity)
            flat = values.new_zeros(sum(param.numel() for param, _ in same_group))
            for indices_of_rank, values_of_rank in zip(
                _all_gather(all_indices, group), _all_gather(values, group), strict=True
            ):
                # In rank order, so that the sum is the same to the bit on every rank.
                flat.index_add_(0, indices_of_rank, values_of_rank)
            _set_gradients([param for param, _ in same_group], flat.mul_(self._scale))

    def _select_top_k(self, entries: Sequence[_Entry], sparsity: float) -> tuple[Tensor, Tensor]:
        """Take the largest values out of the residuals; indices count through all of `entries`."""
        all_indices, values, start = [], [], 0
        for param, value in entries:
            name = self._names[id(param)]
            if name not in self._residual:
                self._residual[name] = torch.zeros_like(param)
            waiting = self._residual[name].add_(value).view(-1)
            count = max(1, round(param.numel() * (1.0 - sparsity)))
            indices = waiting.abs().topk(count, sorted=False).indices
            all_indices.append(indices + start)
            values.append(waiting[indices])
            waiting[indices] = 0.0
            if name in self._velocity:
                self._velocity[name].view(-1)[indices] = 0.0
            start += param.numel()
        self.sent += sum(map(len, all_indices))
        return torch.cat(all_indices), torch.cat(values)


def _all_gather(mine: Tensor, group: Group) -> list[Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with peers_named("the exchange of gradients", group):
        dist.all_gather(gathered, mine, group=group)
    return gathered


def _set_gradients(params: Sequence[Tensor], flat: Tensor) -> None:
    for param, gradient in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = gradient.view(param.shape)
