"""`px.train_step`: forward, loss, backward and update in one call, eager or compiled.

Compiled, the forward pass, the loss and the named fetches are one graph (`torch.compile`); its backward is the graph's
own, and the gradients leave it into the data-parallel buckets. The optimizer's update is a second graph.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm import context
from phalanx.data.loader.binding import Inputs, LossFunction, bind_argument, call
from phalanx.data.samples.batch import move_to_device
from phalanx.errors import ConfigError, did_you_mean
from phalanx.parallel.checks.misuse import check_trains, warn_without_optimizer
from phalanx.parallel.checks.step_check import is_managed
from phalanx.parallel.data.weighted_mean import factor_of_all_labels, global_mean_of, mean_over_labels
from phalanx.parallel.distribute import add_model
from phalanx.parallel.memory.out_of_memory import memory_explained
from phalanx.parallel.session import applied_to, is_distributed_optimizer, model_record
from phalanx.parallel.step.gate import keep_update_out_of_graph
from phalanx.parallel.step.hooks import keep_out_of_graph
from phalanx.train.events import report_step, tell_loss
from phalanx.train.loss.batch_reader import BatchReader, explain_dtype_errors
from phalanx.train.loss.label_check import LabelCheckedLoss
from phalanx.train.loss.model_loss import loss_of, on_logits
from phalanx.train.loss.model_loss_mean import build_model_loss_mean, check_stages
from phalanx.train.loss.token_mean_loss import build_token_mean_loss, check_reduction, require_all_labels
from phalanx.train.step.cuda_graph import GraphedStep

logger = logging.getLogger("phalanx.train")

Fetch = Callable[[Any, Any], Tensor]


class StepOutput(Mapping[str, Tensor]):
    """What one step returns: `loss` and every named fetch, detached, by key or by attribute."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            raise KeyError(f"the step fetches {sorted(self._values)}, not {name!r}.{did_you_mean(name, self._values)}")
        return self._values[name]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shown = (f"{k}={v.tolist() if v.numel() == 1 else tuple(v.shape)}" for k, v in self.items())
        return f"StepOutput({', '.join(shown)})"


class TrainStep:
    """One optimizer step as one call; made by `train_step`.

    A `Model` also says whether forward and backward pass are captured once as a CUDA graph and replayed (`captured`).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: Optimizer,
        fetch: Mapping[str, Fetch],
        compiled: bool,
        captured: bool = False,
    ) -> None:
        self._model = model
        self._returns_loss = loss_fn is loss_of
        self._read = BatchReader(model, target="too" if self._returns_loss else "apart")
        self._optimizer = optimizer
        applied = applied_to(model)
        check_reduction(loss_fn, applied)
        is_collective = applied is not None and applied.pipeline is None and not context.current().role.server_endpoints
        if is_collective and context.current().recovery is not None:
            is_collective = False  # one that joins makes its first step when others are further
        # A step that is compiled or captured must not look at values.
        is_traced = compiled or captured
        checked = on_logits if is_traced else partial(LabelCheckedLoss, is_collective=is_collective)
        self._pipeline = None if applied is None else applied.pipeline
        is_whole = self._returns_loss and self._pipeline is None
        self._own = build_model_loss_mean(model, applied, is_seen=not is_traced) if is_whole else None
        self._loss_fn: LossFunction = checked(loss_fn if self._own is None or is_traced else self._own.loss)
        self._counted = build_token_mean_loss(loss_fn, applied)
        if self._counted is not None:
            self._counted.total = checked(self._counted.total)
        self._device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self._fetch = dict(fetch)
        self.compiled = compiled
        self.compile_s = 0.0
        """Seconds of the steps in which something was compiled."""

        self.train_s = 0.0
        """Seconds of all other steps."""

        self.steps = 0
        self._forward_graphs = _GraphCounter()
        self._update_graphs = _GraphCounter()
        self._forward = self._compute
        self._update: Callable[[], Any] = optimizer.step
        if compiled:
            dynamic = None if applied is None else applied.plan.step.dynamic_shapes
            self._forward = torch.compile(self._compute, backend=self._forward_graphs, dynamic=dynamic)
            keep_out_of_graph(optimizer)
            keep_update_out_of_graph(optimizer)
            self._update = torch.compile(optimizer.step, backend=self._update_graphs)
            self._keep_rates_variable()
        self._backward = GraphedStep(self._gradients, model.parameters()) if captured else self._gradients

    @property
    def forward_graphs(self) -> int:
        """Graphs compiled for forward and loss: 1, and 1 more when a batch of another size came."""
        return self._forward_graphs.count

    @property
    def update_graphs(self) -> int:
        """Graphs compiled for the optimizer."""
        return self._update_graphs.count

    def __call__(self, *batch: Any) -> StepOutput:
        """Run one step on one batch.

        Collective: every rank calls it with its own batch.

        Args:
            *batch: `step(inputs, target)` or `step((inputs, target))`; tensors with samples along dim 0. A dictionary
                of inputs is given by name. A single dictionary is a full batch, as `px.Model` reads it. Without a
                loss function all are inputs: `step(batch)`, `step(x, y)` or `step((x, y))`.

        Returns:
            The loss and the fetches of this rank's batch.

        Raises:
            ConfigError: If the model cannot be called with it; names columns and parameters.
        """
        inputs, target = self._unpack(batch)
        named = inputs if isinstance(inputs, dict) else {"inputs": inputs[0] if len(inputs) == 1 else inputs}
        return self.take(inputs, target, {**named, "target": target})

    def take(self, inputs: Inputs, target: Any, columns: Mapping[Any, Any]) -> StepOutput:
        """Run one step, as `__call__` does.

        Args:
            inputs: All arguments of the model.
            target: What the loss function takes beside its output.
            columns: The same by the names that the script has for them, for errors.
        """
        inputs, target = move_to_device(inputs, self._device), move_to_device(target, self._device)
        if self.compiled and self.steps == 0:
            logger.info("compiling the step into graphs: seconds to minutes the first time, less from the cache")
        started, graphs = time.perf_counter(), self.forward_graphs + self.update_graphs
        with explain_dtype_errors(self._model, columns), memory_explained(self._model, inputs):
            loss, fetched = self._backward(inputs, target)
            tell_loss(loss)
            if self.compiled:
                self._keep_rates_variable()
            self._update()
        self._account(time.perf_counter() - started, self.forward_graphs + self.update_graphs > graphs, loss)
        return StepOutput({"loss": loss.detach(), **{name: torch.as_tensor(v).detach() for name, v in fetched.items()}})

    def summary(self) -> str:
        """Return one line that keeps compile time and training time apart."""
        steady = f"training {self.train_s:.1f} s in {self.steps} steps"
        if not self.compiled:
            return steady
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        graphs = f"{self.forward_graphs} forward and {self.update_graphs} optimizer graphs, {hits} from the cache"
        return f"compiling {self.compile_s:.1f} s ({graphs}), {steady}"

    def _gradients(self, inputs: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Leave the gradients of a batch in the parameters; return its loss and fetches."""
        self._optimizer.zero_grad(set_to_none=True)
        weight = self._weight(target)
        if self._pipeline is not None:
            if self._returns_loss:
                check_stages(target)
            loss_fn = (
                self._loss_fn if weight is None or not len(target) else self._of_microbatches(inputs, target, weight)
            )
            return self._pipeline.train(inputs, target, loss_fn, self._fetch, self._scale_loss)
        loss, fetched = self._loss(inputs, target, weight is not None)
        if weight is not None:
            loss = mean_over_labels(loss, weight, target.shape[1:].numel())
        elif self._own is not None and context.current().replicas is None:
            loss = self._own.mean(loss, target)
        self._scale_loss(loss).backward()
        return loss, fetched

    def _loss(self, inputs: Any, target: Any, is_counted: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and fetches; model and loss are one pass, repeated if memory runs out."""
        guard = None if self.compiled else model_record(self._model).memory_guard
        if guard is None or not guard.can_run():
            return self._forward(inputs, target, self._loss_of(is_counted))
        return guard.run(partial(_loss_again, weakref.ref(self), inputs, target, is_counted), (inputs, target))

    def _loss_of(self, is_counted: bool) -> LossFunction:
        return self._loss_fn if not is_counted or self._counted is None else self._counted.total

    def _compute(self, inputs: Any, target: Any, loss_fn: LossFunction) -> tuple[Tensor, dict[str, Tensor]]:
        output = call(self._model, inputs)
        with torch.no_grad():
            fetched = {name: compute(output, target) for name, compute in self._fetch.items()}
        return loss_fn(output, target), fetched

    def _weight(self, target: Any) -> Tensor | None:
        """Return what the loss's mean divides by on this rank; None where that follows from the samples."""
        if not context.is_initialized():
            return None
        if (replicas := context.current().replicas) is not None:
            is_split = not (replicas.were_ranks or replicas.is_elastic or replicas.turn is None or self._is_merged())
            if self._counted is not None and is_split:
                return self._counted.weight(target)
            require_all_labels(target, self._counted)
            return self._weight_of_ranks(target)
        if self._counted is None:
            return None
        is_apart = context.current().readers.count > 1 or self._pipeline is not None
        return self._counted.weight(target) if is_apart else None

    def _is_merged(self) -> bool:
        """Return whether gradients of a batch are not reduced alone, or by micro-batches."""
        applied = applied_to(self._model)
        return self._pipeline is not None or (applied is not None and applied.plan.step.accumulate > 1)

    def _weight_of_ranks(self, target: Any) -> Tensor | None:
        """Return the weight with which the ranks of a run divided that now are its replicas."""
        replicas = context.current().replicas
        were_ranks = replicas is not None and replicas.were_ranks
        return self._counted.weight(target) if were_ranks and self._counted is not None else None

    def _of_microbatches(self, inputs: Any, target: Any, weight: Tensor) -> LossFunction:
        """Return a loss of micro-batches that add up to the mean over the whole batch. Collective without replicas."""
        assert self._counted is not None
        shares = context.current().passes.enter((inputs, target))
        if context.current().replicas is not None:
            return self._counted.of_microbatches(target, factor_of_all_labels(weight, shares))
        _, factor = global_mean_of(torch.zeros((), dtype=torch.float64, device=weight.device), weight, shares)
        return self._counted.of_microbatches(target, factor)

    def _scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss as float16 training needs it."""
        scale = getattr(self._optimizer, "scale", None)
        return loss if scale is None else scale(loss)

    def _keep_rates_variable(self) -> None:
        """Hold learning rates as tensors: a float would be a constant of the graph, each new value a recompilation.

        Looked at before every step, because scripts and loaded states put floats back.
        """
        for group in self._optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)

    def _unpack(self, batch: tuple[Any, ...]) -> tuple[Inputs, Any]:
        if len(batch) == 1 and (self._returns_loss or isinstance(batch[0], Mapping)):
            return self._read(batch[0])
        if self._returns_loss:
            return self._read(batch)
        if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            batch = tuple(batch[0])
        if len(batch) != 2:
            raise ConfigError(
                f"step takes (inputs, target), found {len(batch)} values. Bundle several inputs in one tuple, or give "
                "them by name in a dictionary."
            )
        return bind_argument(self._model, batch[0]), batch[1]

    def _account(self, seconds: float, has_compiled: bool, loss: Tensor) -> None:
        report_step(self.steps, loss.detach())
        self.steps += 1
        if has_compiled:
            self.compile_s += seconds
        else:
            self.train_s += seconds


def train_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    *,
    fetch: Mapping[str, Fetch] | None = None,
    compiled: bool | None = None,
) -> TrainStep:
    """Make one optimizer step a single call.

    Args:
        model: A distributed model, or a plain one. If only its optimizer was passed, as in Fleet's graph mode, the
            model is distributed here; the call is collective then.
        loss_fn: `loss_fn(output, target)`, the mean over the samples of the batch. Torch's losses of classes may leave
            out labels (`ignore_index`) and weigh classes: their means are those of all ranks' labels. They get the
            `logits` of an output that has some. When None the model takes all columns and returns its loss, as one
            element or under the name `loss`, as models of transformers do.
        optimizer: The optimizer over the model's parameters.
        fetch: Named values to return with the loss, each `f(output, target)`.
        compiled: Whether to compile; that of the model's Plan when omitted.

    Returns:
        A callable; `out = step(inputs, target)` or `step(batch)`, then `out.loss` or `out["acc1"]`.

    Raises:
        ConfigError: If the optimizer holds no parameter of the model, or a fetch is called `loss`.
    """
    check_trains(model, optimizer)
    is_handed_over = is_distributed_optimizer(optimizer)
    if is_handed_over and applied_to(model) is None and not any(map(is_managed, model.parameters())):
        add_model(model)
    applied = applied_to(model)
    if compiled is None:
        compiled = applied is not None and applied.plan.step.compiled
    if "loss" in (fetch or {}):
        raise ConfigError("'loss' is always fetched; give the fetch another name.")
    warn_without_optimizer(model, optimizer)
    return TrainStep(model, loss_of if loss_fn is None else loss_fn, optimizer, fetch or {}, compiled)


def _loss_again(
    step: weakref.ref[TrainStep], inputs: Any, target: Any, is_counted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a step's loss; a graph refers to this, so it lets go of the step and its model."""
    mine = step()
    assert mine is not None
    return mine._compute(inputs, target, mine._loss_of(is_counted))


class _GraphCounter:
    """The default compiler, counting the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        # Looked up here, as that imports a second's worth of torch.
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        # Counted once made: the compiler abandons an attempt when it learns that a number need not be a variable.
        self.count += 1
        return compiled
