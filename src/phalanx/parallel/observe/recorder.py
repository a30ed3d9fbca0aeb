"""`StepRecorder`: record the steps of any training script for a comparison: losses, samples, outputs, gradients.

Put in place by the launcher's entry before the script runs. Of each rank and optimizer step one file: losses, the
samples and a digest of each row that came into the model, two sums for each row of every module's output, and sketches
of gradients before and after they were reduced, of weights and of buffers. A few hundred bytes for each tensor.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.comm import context
from phalanx.comm.batch.loaded_batches import tensors_in
from phalanx.comm.local.random_state import RandomState
from phalanx.parallel.observe.losses import watch_losses
from phalanx.parallel.observe.models import ModelTracker, is_called_by_script, unwrapped
from phalanx.parallel.observe.rows import MOST_ROWS, digest_rows, sum_rows
from phalanx.parallel.observe.sample_ids import sample_ids
from phalanx.parallel.observe.sketch import SIZE, Sketch, digest, sketch
from phalanx.parallel.session import distributed_models, list_applied, session

RECORD_VARIABLE = "PHALANX_RECORD"

DRAWS = " (random)"
"""Stands behind the class of a module that drew random numbers."""

_MOST_BYTES = 256 << 20
"""Rows' sums that one rank writes at most; then outputs of modules are recorded no more."""


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """What to record, in the environment of a rank."""

    folder: str
    steps: int
    """Optimizer steps after which the script ends."""

    perturb: bool = False
    """Whether to change the last bit of the initial weights, to see what rounding alone does."""

    def to_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def record_steps(text: str) -> None:
    """Record the steps of this process as the variable asks, and end it after the last."""
    StepRecorder(RecordRequest(**json.loads(text)), int(os.environ.get("PHALANX_RANK", "0"))).install()


@dataclass(slots=True)
class _Step:
    """What has been seen since the last step."""

    losses: list[float] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    samples: list[int] | None = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    """Rows of each forward pass."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Class of the module of each output, and numbers of a row."""

    local: dict[str, Sketch] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    """Digests of the weights before the first forward pass."""

    was_accumulating: bool = False
    lowest_precision: float = 0.0


class StepRecorder:
    """Records what a script trains, step by step.

    Args:
        request: Where to, and for how long.
        rank: This process.
    """

    def __init__(self, request: RecordRequest, rank: int) -> None:
        self._request, self._rank = request, rank
        self._tracker = ModelTracker()
        self._stack: list[tuple[nn.Module, RandomState]] = []
        """Modules whose calls run, and the random state before each."""

        self._calls: dict[str, int] = {}
        self._pass: list[tuple[str, str, int, Any]] = []
        self._step = _Step()
        self._initial: tuple[list[dict[str, Any]], list[Sketch]] | None = None
        self._steps = 0
        self._bytes = 0

    def install(self) -> None:
        """Put the hooks in place."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        watch_losses(self._on_loss)
        sample_ids.watch()

    # -- forward pass ------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if not is_called_by_script():
            return
        if not self._stack and module.training and torch.is_grad_enabled():
            self._begin_pass(module)
        self._stack.append((module, RandomState.current()))

    @torch.no_grad()
    def _begin_pass(self, root: nn.Module) -> None:
        self._calls, self._pass = {}, []
        # A pipeline calls parts of a distributed model only.
        models = [model for each in (*distributed_models(), root) if (model := self._tracker.add(each)) is not None]
        if not self._step.before and self._steps:
            self._step.before = {
                name: digest(tensor)
                for name, tensor, _ in self._tracker.tensors()
                if isinstance(tensor, nn.Parameter) and not hasattr(tensor, "placements") and not tensor.is_meta
            }
        if self._request.perturb:
            for model in models:
                _perturb(model)
        if models and not self._steps:
            self._initial = self._describe_tensors()
        for param in (param for model in models for param in model.parameters()):
            name = self._tracker.name_of(param)
            if param.requires_grad and name is not None and not hasattr(param, "placements"):
                param.register_hook(partial(self._on_gradient, name))

    def _after_forward(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note an output; `rest` is the named inputs and the output, or the output alone of a call that raised."""
        if not is_called_by_script() or all(other is not module for other, _ in self._stack):
            return
        before, states = self._stack.pop()
        while before is not module:  # of a call that raised
            before, states = self._stack.pop()
        if len(rest) == 1 or not (module.training and torch.is_grad_enabled()):
            return
        kwargs, output = rest
        if (name := self._tracker.module_name(module)) is not None:
            draws = states.has_changed()
            self._note_output(name, module, output, draws=draws)
        if not self._stack and any(unwrapped(module) is model for model in self._tracker.models):
            self._end_pass((*args, *kwargs.values()))

    def _note_output(self, name: str, module: nn.Module, output: Any, *, draws: bool) -> None:
        tensor = next((t for t in tensors_in(output) if t.is_floating_point() and t.dim()), None)
        if tensor is None or self._bytes > _MOST_BYTES or len(tensor) > MOST_ROWS or hasattr(tensor, "placements"):
            return
        call = self._calls[name] = self._calls.get(name, 0) + 1
        kind = f"{type(module).__name__}{DRAWS if draws else ''}"
        self._step.lowest_precision = max(self._step.lowest_precision, torch.finfo(tensor.dtype).eps)
        size = tensor.numel() // max(len(tensor), 1)
        self._pass.append((name if call == 1 else f"{name}#{call}", kind, size, sum_rows(tensor)))

    def _end_pass(self, inputs: tuple[Any, ...]) -> None:
        step, digests = self._step, digest_rows(inputs)
        step.digests += digests
        step.parts.append(len(digests))
        ids = sample_ids.current()
        step.samples = None if ids is None or step.samples is None else step.samples + ids
        for name, kind, size, sums in self._pass:
            if len(sums) == len(digests):
                step.outputs.setdefault(name, []).append(sums)
                step.kinds[name] = kind, size
                self._bytes += sums.nbytes
        self._pass = []

    # -- backward pass and step --------------------------------------------------------------------------------

    def _on_loss(self, loss: Tensor) -> None:
        self._step.losses.append(float(loss.detach()))
        self._step.was_accumulating = self._tracker.is_accumulating()

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if hasattr(gradient, "placements") or gradient.layout is not torch.strided:
            return
        local = self._step.local
        local[name] = local[name] + sketch(gradient) if name in local else sketch(gradient)

    def _before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling() or session.is_trial:
            return
        for index, param in enumerate(_params(optimizer)):
            if param.grad is not None:
                name = self._tracker.name_of(param) or f"{type(optimizer).__name__} parameter {index}"
                self._step.grads[name] = _whole(param.grad).clone()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling() or session.is_trial:
            return
        self._write(optimizer)
        self._step = _Step()
        self._steps += 1
        if self._steps >= self._request.steps:
            raise SystemExit(0)

    def _write(self, optimizer: Optimizer) -> None:
        step = self._step
        weights, weight_sketches = self._describe_tensors()
        grads = [{"name": name, **_facts(tensor)} for name, tensor in step.grads.items()]
        outputs = {name: np.concatenate(sums) for name, sums in step.outputs.items()}
        meta = {
            "step": self._steps,
            "rank": self._rank,
            "world": int(os.environ.get("PHALANX_WORLD_SIZE", "1")),
            "replicas": _replicas(),
            "losses": step.losses,
            "parts": step.parts,
            "samples": step.samples,
            "before": step.before,
            "was_accumulating": step.was_accumulating,
            "precision": step.lowest_precision,
            "reader": _reader(self._rank),
            "is_split": any(applied.pipeline is not None for applied in list_applied()),
            "sharded": [name for name, tensor, _ in self._tracker.tensors() if tensor in session.shards],
            "settings": [_settings(group) for group in optimizer.param_groups],
            "frozen": [name for name, t, _ in self._tracker.tensors() if _is_frozen(t)],
            "outputs": [
                {"name": name, "kind": step.kinds[name][0], "size": step.kinds[name][1], "rows": len(outputs[name])}
                for name in outputs
            ],
            "grads": grads,
            "local": list(step.local),
            "weights": weights,
            "initial": self._initial[0] if self._initial and self._steps == 0 else [],
        }
        arrays = {
            "digests": np.array(step.digests, np.int64),
            "outputs": np.concatenate(list(outputs.values())) if outputs else np.zeros((0, 2)),
            "grads": _stacked([sketch(tensor) for tensor in step.grads.values()]),
            "local": _stacked(list(step.local.values())),
            "weights": _stacked(weight_sketches),
            "initial": _stacked(self._initial[1] if self._initial and self._steps == 0 else []),
        }
        path = Path(self._request.folder) / f"step-{self._steps:06}-rank-{self._rank}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".part"), "wb") as file:
            np.savez(file, meta=np.array(json.dumps(meta)), **arrays)
        path.with_suffix(".part").rename(path)

    def _describe_tensors(self) -> tuple[list[dict[str, Any]], list[Sketch]]:
        """Return what stands for every parameter and floating-point buffer now."""
        facts, sketches = [], []
        for name, tensor, kind in self._tracker.tensors():
            if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_floating_point():
                continue
            full = _whole(tensor)
            facts.append(
                {"name": name, "kind": kind, **_facts(full), "is_buffer": not isinstance(tensor, nn.Parameter)}
            )
            sketches.append(sketch(full))
        return facts, sketches


def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point() and not hasattr(param, "placements"):
            signs = torch.randint(0, 2, param.shape, generator=generator, dtype=torch.int8) * 2 - 1
            param.data.add_(param.data * signs.to(param.device) * (torch.finfo(param.dtype).eps / 2))


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; where torch shards it, every rank calls this, as every rank makes the step."""
    full = getattr(tensor, "full_tensor", None)
    whole = tensor.detach() if full is None else full().detach()
    return whole.to_dense() if whole.layout is not torch.strided else whole


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {"digest": digest(tensor), "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def _stacked(sketches: list[Sketch]) -> Any:
    return np.stack(sketches) if sketches else np.zeros((0, SIZE))


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    return {k: v for k, v in plain.items() if isinstance(v, int | float | str | bool | list | tuple) and k != "params"}


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _reader(rank: int) -> int:
    """Return the index of this rank among those that read their own rows."""
    return context.current().readers.index if context.is_initialized() and context.current().is_distributed else rank


def _replicas() -> int | None:
    replicas = context.current().replicas if context.is_initialized() else None
    return None if replicas is None else replicas.count
