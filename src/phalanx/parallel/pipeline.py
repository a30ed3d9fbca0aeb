"""Pipeline parallel: each rank keeps some stages of a model and passes micro-batches on to the next.

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021 (1F1B, interleaved); Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024. Torch's schedules order the work. Gradients accumulate over the micro-batches and are then
reduced once over the ranks that hold the same stages. The loss of each micro-batch is weighted by its rows, so that
uneven batches stay exact.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from phalanx.comm import transfers
from phalanx.comm.context import Context
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel import pipeline_values
from phalanx.parallel.data_parallel import Reducer
from phalanx.parallel.describe import note_stages
from phalanx.parallel.forwards import Forward, wrap_forward
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline_schedule import Route, Stage, flow, microbatches_of, schedule_for
from phalanx.parallel.pipeline_trace import Recorded, owner_stages, record
from phalanx.parallel.pipeline_values import pack, unpack
from phalanx.parallel.precision import apply_precision
from phalanx.parallel.rebind import replaced
from phalanx.parallel.row_weights import row_weight
from phalanx.plan.mesh_rules import STAGE_AXIS
from phalanx.plan.value import Plan

logger = logging.getLogger("phalanx.parallel")

SHAPES_KEPT = 8
"""Shapes of micro-batches whose buffers are kept; training meets two, that of the last batch among them."""

Values = Mapping[str, Callable[[Any, Any], Any]]


def cut(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> Pipeline:
    """Keep this rank's stages of a model, in place. Collective over all ranks of the job.

    Parameters and buffers of other stages go to the meta device: names and keys stay, memory is freed. Optimizers
    follow (see `rebind`).

    Args:
        plan: Says the stage of each unit, and the schedule.
        model: On its device, equal on all ranks.
        mesh: This rank's place; stages lie along its axis `stage`.
        context: Tells the weight of the current batch.

    Raises:
        PlanError: If the forward pass cannot be cut there, or stages share a parameter.
    """
    along = (STAGE_AXIS,)
    route = Route(plan.schedule, mesh.size(along), mesh.index(along), mesh.group(along), context.device)
    stages = {rule.match: rule.stage for rule in plan.modules if rule.stage is not None}
    recorded = record(model, stages, route.count)
    owners = owner_stages(model, recorded, stages)
    _check_not_shared(model, owners)
    before = dict(model.named_parameters())
    _let_go(model, [name for name, stage in owners.items() if stage not in route.mine])
    after = dict(model.named_parameters())
    replaced.note(before, after)
    for param in after.values():
        note_stages(param, route.group)
    pipeline = Pipeline(plan, model, route, stages, recorded, context)
    wrap_forward(model, _run_forward, pipeline)
    return pipeline


class Pipeline:
    """This rank's stages of one model; made by `cut`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        route: Route,
        stages: Mapping[str, int],
        recorded: Recorded,
        context: Context,
    ) -> None:
        self.route = route
        self.reducer: Reducer | None = None
        """Averages gradients over the ranks that hold the same stages, if there are any."""

        self._plan = plan
        self._model_ref = weakref.ref(model)  # what was made of a model must not keep it alive
        self._stages = stages
        self._context = context
        self._recorded = {model.training: recorded}
        self._bodies: dict[bool, list[fx.GraphModule]] = {}
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._inputs: list[tuple[Any, ...]] = []
        self._step = _Step([], _no_loss, 1.0)
        self._has_warned = False

    def __reduce__(self) -> Any:
        """Refuse to copy: a copy would talk to stages that nobody runs."""
        raise ConfigError("a model cut into stages cannot be copied or pickled whole. Keep its state_dict instead.")

    @property
    def model(self) -> nn.Module:
        """The model whose stages these are."""
        model = self._model_ref()
        assert model is not None
        return model

    def train(
        self,
        inputs: Any,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        fetch: Values,
        scaled: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward on one batch, so that parameters have the gradients of all ranks.

        Collective over all ranks of the job.

        Args:
            inputs: The model's input; tensors with rows along dim 0.
            target: The same rows' targets.
            loss_fn: The mean over the rows it is given.
            fetch: Named values of the whole batch's output and target.
            scaled: Makes of a loss what float16 training needs; called once.

        Returns:
            The loss and the named values of the batch, on every rank.
        """
        rows = _rows(inputs, target)
        count, wanted = microbatches_of(self.route, rows)
        self._warn_of(rows, count, wanted)
        self._inputs = [(part,) for part in _split(inputs, rows, count)]
        weight = row_weight(self._context, self._context.readers) / count * float(scaled(torch.ones(())))
        step = self._step = _Step(_split(target, rows, count), loss_fn, weight)
        schedule, last = self._schedule(count)
        numbers = torch.arange(count)
        with transfers.peers_named("a pipeline's step", self.route.group):
            schedule.step(*([numbers] if 0 in self.route.mine else []), target=numbers, return_outputs=False)
        if self.reducer is not None:
            self.reducer.reduce()
        told: dict[str, Tensor] = {}
        if last is not None:
            told = {"loss": torch.stack(step.losses).mean()}
            with torch.no_grad():
                output = step.whole_output(last.gives) if fetch else None
                told |= {name: torch.as_tensor(of(output, target)).detach() for name, of in fetch.items()}
        self._inputs, self._step = [], _Step([], _no_loss, 1.0)
        told = self._told_by_last(told)
        return told.pop("loss"), told

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output, on every rank. Collective along the stage axis; runs without gradients."""
        self._inputs = [inputs]
        with torch.no_grad():
            stages = self._make_stages()
            ends = flow(stages, self.route)
            last = self.route.count - 1
            output = unpack(stages[-1].gives, ends[last][1]) if last in ends else None
            return self._told_by_last(output)

    def _told_by_last(self, value: Any) -> Any:
        """Return what the rank of the last stage says, on every rank along the axis."""
        route = self.route
        speaker = route.holder(route.count - 1)
        if route.index != speaker:
            return unpack(*pipeline_values.recv(speaker, route.device, route.group))
        tensors: list[Tensor] = []
        form = pack(value, tensors)
        for listener in range(route.ranks):
            if listener != speaker:
                pipeline_values.send(form, tensors, listener, route.device, route.group)
        return value

    def _schedule(self, count: int) -> tuple[Any, Stage | None]:
        """Return torch's schedule for micro-batches like the first, and the last stage if it is here."""
        leaves, structure = tree_flatten(self._inputs[0])
        looks = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        key = looks, str(structure), count, self.model.training
        if key not in self._schedules:
            stages = self._make_stages()
            with _without_traces(stages, self.route.device), torch.enable_grad():
                ends = flow(stages, self.route)
            last = stages[-1] if stages[-1].index == self.route.count - 1 else None

            def loss(output: Any, number: Tensor) -> Tensor:
                assert last is not None
                return self._step.loss(last.gives, output if isinstance(output, tuple) else (output,), int(number))

            self._schedules[key] = schedule_for(stages, ends, self.route, count, loss), last
        self._schedules.move_to_end(key)
        if len(self._schedules) > SHAPES_KEPT:
            self._schedules.popitem(last=False)
        found: tuple[Any, Stage | None] = self._schedules[key]
        return found

    def _make_stages(self) -> list[Stage]:
        mode = self.model.training
        if mode not in self._recorded:
            self._recorded[mode] = record(self.model, self._stages, self.route.count)
        recorded, mine = self._recorded[mode], self.route.mine
        needed = len(recorded.inputs())
        if len(self._inputs[0]) != needed:
            raise ConfigError(
                f"the pipeline of {type(self.model).__name__} takes {needed} inputs, those without a default; found "
                f"{len(self._inputs[0])}. Put what else the stages need into them, or into the model."
            )
        if mode not in self._bodies:
            self._bodies[mode] = [recorded.body(self.model, stage) for stage in mine]
            for body in self._bodies[mode]:
                self._lower_precision(body)
        pairs = zip(self._bodies[mode], mine, strict=True)
        return [Stage(body, stage, self._inputs_of) for body, stage in pairs]

    def _inputs_of(self, number: int) -> tuple[Any, ...]:
        return self._inputs[number]

    def _lower_precision(self, body: nn.Module) -> None:
        """Let a stage compute in the dtype of the whole model."""
        for rule in self._plan.modules:
            if not rule.match and rule.dtype not in (None, "float32"):
                apply_precision(body, str(rule.dtype))

    def _warn_of(self, rows: int, count: int, wanted: int) -> None:
        if self._has_warned or self._context.rank or (count == wanted and count >= self.route.ranks):
            return
        self._has_warned = True
        logger.warning(
            "a batch of %d rows is cut into %d micro-batches (%d were asked for) for %d stages: ranks wait for each "
            "other. Let rows and pipeline_configs accumulate_steps be multiples of the ranks of a pipeline.",
            rows,
            count,
            wanted,
            self.route.count,
        )


class _Step:
    """What the loss needs in one step, and what it leaves."""

    def __init__(self, targets: Sequence[Any], loss_fn: Callable[[Any, Any], Tensor], weight: float) -> None:
        self._targets = targets
        self._loss_fn = loss_fn
        self._weight = weight
        self.losses: list[Tensor] = []
        self._outputs: list[tuple[Tensor, ...]] = []

    def loss(self, form: Any, tensors: tuple[Tensor, ...], number: int) -> Tensor:
        """Return the weighted loss of one micro-batch."""
        loss = self._loss_fn(unpack(form, tensors), self._targets[number])
        self.losses.append(loss.detach())
        self._outputs.append(tuple(tensor.detach() for tensor in tensors))
        return loss * self._weight

    def whole_output(self, form: Any) -> Any:
        """Return the output of the whole batch; what has no rows is averaged."""
        parts = zip(*self._outputs, strict=True)
        return unpack(form, [torch.cat(part) if part[0].dim() else torch.stack(part).mean() for part in parts])


def _run_forward(_: Forward, pipeline: Pipeline, *inputs: Any, **named: Any) -> Any:
    """Take the place of a model's forward pass."""
    model = pipeline.model
    if named:
        raise ConfigError(
            f"a model cut into stages takes its inputs in order, found {sorted(named)} by name. Leave the names out."
        )
    if model.training and torch.is_grad_enabled():
        raise ConfigError(
            f"training {type(model).__name__}, which is cut into stages, needs px.train_step: step = px.train_step("
            "model, loss_fn, optimizer), then step(inputs, target) for each batch. To evaluate, use px.evaluate or "
            "torch.no_grad()."
        )
    return pipeline.forward(*inputs)


def _check_not_shared(model: nn.Module, owners: Mapping[str, int]) -> None:
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if owners[other] != owners[name]:
            raise PlanError(
                f"{other!r} of stage {owners[other]} and {name!r} of stage {owners[name]} are one parameter, which two "
                "stages cannot share. Untie them, or let pipeline_configs cuts keep both in one stage."
            )


def _let_go(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        held = getattr(module, own)
        if isinstance(held, nn.Parameter):
            empty: Tensor = nn.Parameter(torch.empty_like(held, device="meta"), held.requires_grad)
            empty.__dict__.update(held.__dict__)
            module._parameters[own] = empty  # type: ignore[assignment]
        else:
            module._buffers[own] = torch.empty_like(held, device="meta")


@contextmanager
def _without_traces(stages: Sequence[Stage], device: torch.device) -> Iterator[None]:
    """Leave random streams and buffers as they were."""
    buffers = [(buffer, buffer.clone()) for stage in stages for buffer in stage.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in buffers:
        buffer.data.copy_(value)


def _rows(inputs: Any, target: Any) -> int:
    sizes = {tuple(x.shape[:1]) for x in tree_flatten((inputs, target))[0] if isinstance(x, Tensor)}
    if len(sizes) != 1 or sizes == {()}:
        raise ConfigError(
            f"a pipeline cuts batches by rows, along dim 0 of inputs and targets; found sizes {sorted(sizes)}. Give "
            "all tensors of a batch the same rows."
        )
    ((rows,),) = sizes
    return rows


def _split(values: Any, rows: int, count: int) -> list[Any]:
    size = rows // count
    return [tree_map_only(Tensor, itemgetter(slice(at, at + size)), values) for at in range(0, rows, size)]


def _no_loss(_output: Any, _target: Any) -> Tensor:
    raise AssertionError("no step is running")
