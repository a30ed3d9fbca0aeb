"""Every technique of a strategy, and every pair that goes together, against one process.

The reference runs the ranks' rows in turn, on one model or, where ranks train apart, on one for each. Compared are the
loss of every batch, the gradients that every update uses, and the parameters after it.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import PhalanxError
from phalanx.parallel.apply import applied_to
from phalanx.parallel.recipe.ema import EMA
from phalanx.parallel.recipe.lamb import use_lamb
from phalanx.parallel.recipe.lars import use_lars
from phalanx.plan.rules import ACROSS_RANKS, ACTING
from phalanx.plan.value import OnRanks, Shard
from phalanx.strategy.conflicts import TECHNIQUES, verdict
from ranks import run_ranks

pytestmark = pytest.mark.dist

BATCHES, BATCH = 4, 9
MERGED = 2
RATE, MOMENTUM = 0.1, 0.9
WIDE = (260, 128)
"""Half of a parameter of this shape is large enough to be compressed."""

MENU: dict[str, dict[str, Any]] = {
    "recompute": {"checkpoints": ["1", "3"]},
    "gradient_merge": {"k_steps": MERGED},
    "localsgd": {"k_steps": 2},
    "adaptive_localsgd": {"init_k_steps": 1, "begin_step": 2},
    "lars": {"lars_coeff": 0.02, "exclude_from_weight_decay": ["bias"]},
    "lamb": {"lamb_weight_decay": 0.02},
    "dgc": {"sparsity": [0.75], "rampup_begin_step": 1},
    "sharding": {"sharding_degree": 2},
    "pipeline": {"accumulate_steps": 2},
    "tensor_parallel": {"tensor_parallel_degree": 2},
    "clip": {"norm": 0.3},
    "ema": {"decay": 0.7},
}
"""What a case says beside its switches."""

Case = tuple[str, ...]


def ranks_of(case: Case) -> int:
    """Return how many ranks a case needs: 4 for hosts, or where ranks with stages or cut layers read the same rows."""
    if "use_hierarchical_allreduce" in case and {"pipeline", "tensor_parallel"} & set(case):
        return 8
    return 4 if {"use_hierarchical_allreduce", "pipeline", "tensor_parallel"} & set(case) else 2


def replicas_of(case: Case) -> int:
    """Return how many of them read rows of their own."""
    return ranks_of(case) // 2 ** len({"pipeline", "tensor_parallel"} & set(case))


def cases() -> list[Case]:
    """Return every technique that acts, and every pair that goes together. Servers have tests of their own."""
    acting = [name for name in TECHNIQUES if name in ACTING and name not in ("a_sync",)]
    pairs = [pair for pair in itertools.combinations(acting, 2) if verdict(*pair).verdict == "supported"]
    return [(name,) for name in acting] + pairs


def settings(case: Case) -> dict[str, Any]:
    said: dict[str, Any] = dict.fromkeys(case, True)
    said |= {f"{name}_configs": dict(MENU[name]) for name in case if name in MENU}
    if "sharding" in case:  # each stage with some of the others
        said["sharding_configs"]["stage"] = 1 + sum(map(TECHNIQUES.index, case)) % 3
    if "pipeline" in case:
        said["hybrid_configs"] = {"pp_degree": 2, "order": ["dp", "sharding", "pp", "mp"]}
    if "use_hierarchical_allreduce" in case:
        said["hierarchical_allreduce_inter_nranks"] = ranks_of(case) // 2
    return said


def net(case: Case) -> nn.Module:
    torch.manual_seed(0)
    wide, narrow = WIDE if "dgc" in case else (8, 6)
    norm = [nn.BatchNorm1d(narrow)] if "sync_batch_norm" in case else [nn.Identity()]
    layers = [
        nn.Linear(6, narrow, bias="sync_batch_norm" not in case),
        nn.Sequential(*norm, nn.Tanh()),
        nn.Linear(narrow, wide),
        nn.Tanh(),
        nn.Linear(wide, 3),
    ]
    return nn.Sequential(*layers).to(torch.float32 if "amp" in case else torch.float64)


def optimizer_for(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if "lamb" in case:
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.02)
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def rows(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES * BATCH, 6, generator=generator)
    return inputs.to(torch.float32 if "amp" in case else torch.float64), torch.arange(BATCHES * BATCH) % 3


@dataclass
class History:
    """What one run, or one rank's part of it, showed."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)


# --- on the ranks ---------------------------------------------------------------------------------------------------


def train(case: Case) -> History:
    """Train through the strategy; gradients and parameters come back whole."""
    strategy = px.DistributedStrategy(**settings(case))
    model = net(case)
    optimizer = optimizer_for(case, model)
    if "tensor_parallel" in case:
        px.shard(model, {"2": "column", "4": "row"})
    data = torch.utils.data.TensorDataset(*rows(case))
    model, optimizer, loader = px.distribute(
        model, optimizer, data, global_batch=BATCH, strategy=strategy, shuffle=False
    )
    found = History()

    def note_gradients(*_: object) -> None:
        found.gradients.append({n: whole(model, n, p.grad) for n, p in model.named_parameters() if not p.is_meta})

    optimizer.register_step_pre_hook(note_gradients)
    optimizer.register_step_post_hook(lambda *_: found.parameters.append(state_of(model)))
    # The update is no matter of the pipeline; its stages are compiled if the case says so.
    step = px.train_step(model, F.cross_entropy, optimizer, compiled=False) if "pipeline" in case else None
    for inputs, target in loader:
        if step is not None:
            found.losses.append(step(inputs, target).loss.item())
            continue
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        px.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    if "ema" in case:
        with px.ema_of(model).swapped():
            found.average = state_of(model)
    return found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that this rank's stages have; whole."""
    return {name: whole(model, name, param) for name, param in model.named_parameters() if not param.is_meta}


@torch.no_grad()
def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Put the slices of a parameter, or of its gradient, together."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    place = applied_to(model).plan.rule_for(name).place
    assert isinstance(place, OnRanks)
    for axis, placed in place.layout.items():
        if isinstance(placed, Shard):
            tensor = px.comm.all_gather(tensor.detach(), placed.dim, axis=axis)
    return tensor.detach().clone()


def train_all(todo: Sequence[Case]) -> dict[Case, History | str]:
    px.init()
    # torch's own, where its compiler goes on behind what it cannot compile.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # The operators as they are: what is compared is how techniques go together, not the compiler.
    torch.compile = partial(torch.compile, backend="aot_eager")
    gc.freeze()  # what is there now is not walked after every case
    found: dict[Case, History | str] = {}
    # Compiled cases last: what the compiler leaves behind makes walking slow.
    for case in sorted(todo, key=lambda case: "graph" in case):
        try:
            found[case] = train(case)
        except PhalanxError as error:  # the same on all ranks
            found[case] = f"{type(error).__name__}: {error}"
        if "graph" in case:
            torch._dynamo.reset()
        for _ in range(2):  # the next case has another strategy; a gradient merge goes when its optimizer has gone
            gc.collect()
    return found


# --- the reference --------------------------------------------------------------------------------------------------


class Reference:
    """The ranks' rows in turn in one process, combined as the techniques say."""

    def __init__(self, case: Case, replicas: int) -> None:
        # One rank has nothing to exchange.
        self.case, self.replicas = set(case) - (ACROSS_RANKS if replicas == 1 else set()), replicas
        self.apart = bool({"localsgd", "adaptive_localsgd"} & self.case)
        self.models = [net(case) for _ in range(replicas if self.apart else 1)]
        self.optimizers = [optimizer_for(case, model) for model in self.models]
        self.averages = [EMA(m, MENU["ema"]["decay"]) for m in self.models] if "ema" in self.case else []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            names = {param: name for name, param in model.named_parameters()}.get
            if "lars" in self.case:
                use_lars(optimizer, coeff=0.02, exclude=["bias"], names=names)
            if "lamb" in self.case:
                use_lamb(optimizer, weight_decay=0.02, names=names)
        self.inputs, self.target = rows(case)
        self.updates, self.since = 0, 0
        self.every, self.first_loss = 1 if "adaptive_localsgd" in self.case else 2, 0.0
        self.waiting = [dict[str, Tensor]() for _ in range(replicas)]
        self.velocity = [dict[str, Tensor]() for _ in range(replicas)]
        self.histories = [History() for _ in range(replicas)]

    def run(self) -> list[History]:
        merged = MERGED if "gradient_merge" in self.case else 1
        for start in range(0, BATCHES, merged):
            found = [self.backward(step) for step in range(start, start + merged)]
            mine = [
                {n: sum(batch[r][n] for batch in found) / merged for n in found[0][r]} for r in range(self.replicas)
            ]
            self.update(mine)
        for rank, ema in enumerate(self.averages):
            with ema.swapped():
                averages = {n: p.detach().clone() for n, p in self.models[rank].named_parameters()}
            for history in self.histories[rank : rank + 1] if self.apart else self.histories:
                history.average = averages
        return self.histories

    def backward(self, step: int) -> list[dict[str, Tensor]]:
        """Return each replica's gradients, weighted so that their mean is that of the global batch."""
        shares = list(split_rows(step, self.replicas))
        outputs = self.whole_batch(step, shares) if "sync_batch_norm" in self.case else None
        found = []
        for rank, share in enumerate(shares):
            model = self.models[rank if self.apart else 0]
            output = outputs[rank] if outputs else self.forward(model, self.inputs[share])
            loss = F.cross_entropy(output, self.target[share])
            self.histories[rank].losses.append(loss.item())
            weight = (share.stop - share.start) * self.replicas / BATCH
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=outputs is not None)
            found.append({n: g * weight for (n, _), g in zip(model.named_parameters(), grads, strict=True)})
        return found

    def whole_batch(self, step: int, shares: Sequence[slice]) -> Sequence[Tensor]:
        batch = self.inputs[step * BATCH : (step + 1) * BATCH]
        return self.forward(self.models[0], batch).split([share.stop - share.start for share in shares])

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if "amp" in self.case else nullcontext():
            return model(inputs).to(inputs.dtype)

    def update(self, mine: list[dict[str, Tensor]]) -> None:
        self.updates += 1
        if self.apart and self.updates >= self.begin_step:
            for model, gradients in zip(self.models, mine, strict=True):
                give(model, gradients)
        else:
            combined = self.compressed(mine) if "dgc" in self.case else self.mean(mine)
            for model in self.models:
                give(model, combined)
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if "clip" in self.case:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MENU["clip"]["norm"])
            self.note(rank, "gradients", {n: p.grad.clone() for n, p in model.named_parameters()})
            self.step(optimizer)
        self.average()
        for ema in self.averages:
            ema.update()
        for rank, model in enumerate(self.models):
            self.note(rank, "parameters", {n: p.detach().clone() for n, p in model.named_parameters()})

    def note(self, rank: int, kind: str, tensors: dict[str, Tensor]) -> None:
        for history in self.histories[rank : rank + 1] if self.apart else self.histories:
            getattr(history, kind).append(tensors)

    def mean(self, mine: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if "fp16_allreduce" not in self.case:
            return {n: sum(of[n] for of in mine) / self.replicas for n in mine[0]}
        return {n: sum((of[n] / self.replicas).half() for of in mine).to(mine[0][n].dtype) for n in mine[0]}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        before = [group.get("momentum") for group in optimizer.param_groups]
        if "dgc" in self.case and self.updates > self.begin_step:
            for group in optimizer.param_groups:
                group["momentum"] = 0.0
        optimizer.step()
        for group, momentum in zip(optimizer.param_groups, before, strict=True):
            if momentum is not None:
                group["momentum"] = momentum

    @property
    def begin_step(self) -> int:
        """The first step that is not plain, of ranks that train apart; the last that is, of compressed gradients."""
        if "adaptive_localsgd" in self.case:
            return 2
        return 1

    def compressed(self, mine: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if self.updates <= 1:
            return self.mean(mine)
        total = {n: torch.zeros_like(g) for n, g in mine[0].items()}
        params = dict(self.models[0].named_parameters())
        for rank, gradients in enumerate(mine):
            for name, gradient in gradients.items():
                gathered = self.optimizers[0].state[params[name]]["momentum_buffer"] / 1.0
                velocity = self.velocity[rank].setdefault(name, gathered).mul_(MOMENTUM).add_(gradient)
                waiting = self.waiting[rank].setdefault(name, torch.zeros_like(velocity))
                for v, left, sent in zip(*map(self.parts, (velocity, waiting, total[name])), strict=True):
                    if v.numel() < 16384:
                        sent += v
                        continue
                    left += v
                    place = left.abs().topk(max(1, round(left.numel() * 0.25))).indices
                    sent[place] += left[place]
                    left[place] = 0
                    v[place] = 0
        return {n: t / self.replicas for n, t in total.items()}

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return what each rank along the model axis has of a parameter, flat; of the layer that is cut by rows."""
        is_cut = "tensor_parallel" in self.case and tensor.shape == WIDE
        return tensor.view(-1).chunk(2 if is_cut else 1)

    @torch.no_grad()
    def average(self) -> None:
        begun = self.begin_step - 1
        if not self.apart or self.updates <= begun or self.updates - max(self.since, begun) < self.every:
            return
        self.since = self.updates
        for params in zip(*(m.parameters() for m in self.models), strict=True):
            mean = torch.stack([p.detach() for p in params]).mean(0)
            for param in params:
                param.copy_(mean)
        if "adaptive_localsgd" in self.case:
            loss = sum(h.losses[-1] for h in self.histories) / self.replicas
            self.first_loss = self.first_loss or loss
            self.every = min(max(math.ceil(math.sqrt(loss / self.first_loss)), 1), 16)


def split_rows(step: int, replicas: int) -> Iterator[slice]:
    """Yield each replica's rows of a batch: the first have one more."""
    start = step * BATCH
    for rank in range(replicas):
        count = BATCH // replicas + (rank < BATCH % replicas)
        yield slice(start, start + count)
        start += count


def give(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.grad = gradients[name].clone()


# --- compared -------------------------------------------------------------------------------------------------------


def tolerance(case: Case) -> float:
    """Return how far a case may be off: its arithmetic rounds elsewhere than the reference's, or not."""
    names = set(case)
    if "amp" in names and names & {"graph", "sync_batch_norm", "tensor_parallel", "sharding", "pipeline"}:
        return 5e-2
    if "fp16_allreduce" in names:
        return 2e-3
    return 1e-5 if "amp" in names else 1e-11


def difference(found: History, expected: History) -> tuple[float, str]:
    """Return the largest relative difference, and where it is."""
    assert len(found.losses) == len(expected.losses)
    off = [
        (abs(a - b) / abs(b), f"loss {i}") for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))
    ]
    pairs = [(f"gradient {i}", *both) for i, both in enumerate(zip(found.gradients, expected.gradients, strict=True))]
    pairs += [(f"update {i}", *both) for i, both in enumerate(zip(found.parameters, expected.parameters, strict=True))]
    pairs.append(("average", found.average, expected.average))
    for where, mine, theirs in pairs:
        off += [
            (((t - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-3)).item(), f"{where} of {n}")
            for n, t in mine.items()
        ]
    return max(off)


def wrong(found: History | str, expected: History, case: Case) -> str | None:
    if isinstance(found, str):
        return found
    off, where = difference(found, expected)
    return None if off <= tolerance(case) else f"{where} is off by {off:.2g}"


def check(ranks: int, todo: Sequence[Case]) -> None:
    results = run_ranks(train_all, ranks, todo, timeout_s=110)
    failed = []
    for case in todo:
        expected = Reference(case, min(replicas_of(case), ranks)).run()
        found = [result[case] for result in results]
        for rank, history in enumerate(found):
            message = wrong(history, expected[rank * len(expected) // ranks], case)
            if message:
                failed.append(f"{' + '.join(case)}, rank {rank}: {message}")
        held = {name for history in found if isinstance(history, History) for name in history.gradients[-1]}
        assert failed or held == set(expected[0].gradients[-1]), case
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_technique_and_pair_equals_one_process(ranks: int) -> None:
    check(ranks, [case for case in cases() if ranks_of(case) == ranks])


def test_the_same_script_runs_in_one_process() -> None:
    check(1, [case for case in cases() if len(case) == 1])
