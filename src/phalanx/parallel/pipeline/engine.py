"""`PipelineEngine`: pipeline-parallel training of a model: its stages on this rank, its micro-batches.

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021 (1F1B, interleaved); Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024. Torch's schedules order the work. Gradients accumulate over the micro-batches and are then
reduced once over the ranks that hold the same stages. The loss of each micro-batch is weighted by its rows, so that
uneven batches stay exact.
"""

from __future__ import annotations

import inspect
import logging
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from phalanx import accelerator
from phalanx.comm import transfers
from phalanx.comm.batch.share import row_weight_of
from phalanx.comm.collectives import all_gather
from phalanx.comm.context import Context
from phalanx.data.loader.binding import Inputs, LossFunction
from phalanx.errors import ConfigError
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.model_shape import note_stages
from phalanx.parallel.pipeline import stage_io
from phalanx.parallel.pipeline.batch import Batch, batch_size, split
from phalanx.parallel.pipeline.partition import TracedForward, owner_stages, record
from phalanx.parallel.pipeline.rng_streams import Streams
from phalanx.parallel.pipeline.schedule import (
    StageModule,
    StageRoute,
    infer_stage_shapes,
    microbatches_of,
    schedule_for,
)
from phalanx.parallel.pipeline.stage_io import pack, unpack
from phalanx.parallel.pipeline.stage_state import check_not_shared, free_parameters
from phalanx.parallel.precision.autocast import apply_precision
from phalanx.parallel.step.param_remap import note_replaced
from phalanx.parallel.tensor.same_samples import SameSamplesCheck, share_random_stream
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Plan

if TYPE_CHECKING:  # a job that shards nothing does not wait for this
    from phalanx.parallel.zero.sharded import ShardedStages

logger = logging.getLogger("phalanx.parallel")

SHAPES_KEPT = 8
"""Shapes of micro-batches whose buffers are kept; training meets two, that of the last batch among them."""

Values = Mapping[str, Callable[[Any, Any], Any]]


def build_pipeline(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> PipelineEngine:
    """Keep this rank's stages of a model, in place. Collective over all ranks of the job.

    Parameters and buffers of other stages go to the meta device: names and keys stay, memory is freed. Optimizers
    follow (see `rebind`). The ranks' default random streams become that of the first stage's.

    Args:
        plan: Says the stage of each unit, and the schedule.
        model: On its device, equal on all ranks.
        mesh: This rank's place; stages lie along its axis `stage`.
        context: Tells the weight of the current batch.

    Raises:
        PlanError: If the forward pass cannot be cut there, or stages share a parameter.
    """
    along = (STAGE_AXIS,)
    route = StageRoute(plan.schedule, mesh.size(along), mesh.index(along), mesh.group(along), context.device)
    alike = [axis.name for axis in mesh.position.axes if axis.name not in mesh.batch_axes and axis.size > 1]
    checks = [SameSamplesCheck(axis, mesh.group((axis,)), holds_layers=axis != STAGE_AXIS) for axis in alike]
    stages = {rule.match: rule.stage for rule in plan.modules if rule.stage is not None}
    recorded = record(model, stages, route.count)
    owners = owner_stages(model, recorded, stages)
    check_not_shared(model, owners)
    before = dict(model.named_parameters())
    free_parameters(model, [name for name, stage in owners.items() if stage not in route.mine])
    after = dict(model.named_parameters())
    note_replaced(before, after)
    for param in after.values():
        note_stages(param, route.group)
    share_random_stream(route.group, context.device.type)
    pipeline = PipelineEngine(plan, model, route, stages, recorded, checks, context)
    wrap_forward(model, _run_forward, pipeline)
    return pipeline


class PipelineEngine:
    """This rank's stages of one model; made by `build_pipeline`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        route: StageRoute,
        stages: Mapping[str, int],
        recorded: TracedForward,
        checks: Sequence[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]],
        context: Context,
    ) -> None:
        self.route = route
        self.reducer: Reducer | None = None
        """Averages gradients over the ranks that hold the same stages, if there are any."""

        self.sharded: ShardedStages | None = None
        """Holds slices of the parameters, if they are sharded over those ranks."""

        self._plan = plan
        self._model_ref = weakref.ref(model)  # what was made of a model must not keep it alive
        self._stages = stages
        self.checks = list(checks)
        """Look at the model and its batch before every step."""

        self._is_sum = is_sum_of_ranks(plan)
        self._meets_copies = plan.step.sync_bn and context.readers.count > 1
        self._context = context
        self._recorded = {model.training: recorded}
        self._bodies: dict[bool, list[fx.GraphModule]] = {}
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._streams = Streams(route.count, route.device)
        self._batch = _NO_BATCH
        self._has_warned = False
        self._is_broken = False

    def __reduce__(self) -> Any:
        """Refuse to copy: a copy would talk to stages that nobody runs."""
        raise ConfigError("a model split into stages cannot be copied or pickled whole. Keep its state_dict instead.")

    @property
    def is_running(self) -> bool:
        """Whether a step, or a forward pass, is under way."""
        return self._batch is not _NO_BATCH

    @property
    def model(self) -> nn.Module:
        """The model whose stages these are."""
        model = self._model_ref()
        assert model is not None
        return model

    def train(
        self,
        inputs: Inputs,
        target: Any,
        loss_fn: LossFunction,
        fetch: Values,
        scaled: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward on one batch, so that parameters have the gradients of all ranks.

        Collective over all ranks of the job.

        Args:
            inputs: The model's inputs, by position or by name; tensors with rows along dim 0.
            target: The same rows' targets.
            loss_fn: The mean over the rows it is given.
            fetch: Named values of the whole batch's output and target.
            scaled: Makes of a loss what float16 training needs; called once.

        Returns:
            The loss and the named values of the batch, on every rank.

        Raises:
            ConfigError: If rows do not fit, or an error ended a step before this one halfway.
        """
        self._require_whole()
        rows = batch_size(inputs, target)
        for check in self.checks:
            check(self.model, tuple(tree_leaves((inputs, target))), {})
        count, planned_count = microbatches_of(self.route, *self._of_copies(rows))
        self._warn_of(rows, count, planned_count)
        shares, readers = self._context.passes.enter((inputs, target)), self._context.readers.shares
        weight = row_weight_of(shares, readers, is_sum=self._is_sum) / count * float(scaled(torch.ones(())))
        batch = self._batch = Batch(
            split(self.in_order(inputs), rows, count),
            split(target, rows, count),
            loss_fn,
            weight,
            keeps_outputs=bool(fetch),
        )
        if self.sharded is not None:
            self.sharded.gather()
        schedule, last = self._schedule()
        numbers = torch.arange(count)
        with self._together("a pipeline's step"):
            with self._streams.step():
                of_first = [numbers] if 0 in self.route.mine else []
                schedule.step(*of_first, target=numbers, return_outputs=False)
            if self.sharded is not None:
                self.sharded.reduce()
            if self.reducer is not None:
                self.reducer.reduce()
            values: dict[str, Tensor] = {}
            if last is not None:
                values = {"loss": torch.stack(batch.losses).mean()}
                with torch.no_grad():
                    output = batch.full_output(last.output_form) if fetch else None
                    values |= {name: torch.as_tensor(of(output, target)).detach() for name, of in fetch.items()}
            values = self._told_by_last(values)
        self._batch = _NO_BATCH
        return values.pop("loss"), values

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output, on every rank. Collective along the stage axis; runs without gradients."""
        self._require_whole()
        self._batch = Batch([inputs], [], _no_loss, 1.0, keeps_outputs=False)
        stages, last = self._make_stages(), self.route.count - 1
        with torch.no_grad(), self._together("a pipeline's forward pass"):
            ends = infer_stage_shapes(stages, self.route)
            output = unpack(stages[-1].output_form, ends[last][1]) if last in ends else None
            result = self._told_by_last(output)
        if self.sharded is not None:
            self.sharded.reshard()
        self._batch = _NO_BATCH
        return result

    def in_order(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return inputs in the order in which the stages take them.

        Raises:
            ConfigError: If others are named than those.
        """
        if not isinstance(inputs, dict):
            return inputs
        needed = [str(node.target) for node in next(iter(self._recorded.values())).inputs()]
        if inputs.keys() != set(needed):
            raise ConfigError(
                f"the pipeline of {type(self.model).__name__} takes {', '.join(needed)}, the inputs without a default; "
                f"found {', '.join(inputs)}. Give these alone, or let the model have no default for what it needs."
            )
        return tuple(inputs[name] for name in needed)

    @contextmanager
    def _together(self, verb: str) -> Iterator[None]:
        """Do what all stages do together: after an error in it, what they send and wait for no longer fits."""
        self._is_broken = True
        with transfers.peers_named(verb, self.route.group):
            yield
        self._is_broken = False

    def _require_whole(self) -> None:
        if self._is_broken:
            raise ConfigError(
                "this pipeline cannot continue: an error ended a step halfway, and the other stages still wait for "
                "what was not sent. End the job, and let it resume from a checkpoint."
            )

    def _told_by_last(self, value: Any) -> Any:
        """Return what the rank of the last stage says, on every rank along the axis."""
        route = self.route
        speaker = route.holder(route.count - 1)
        if route.index != speaker:
            return unpack(*stage_io.recv(speaker, route.device, route.group))
        tensors: list[Tensor] = []
        form = pack(value, tensors)
        for listener in range(route.ranks):
            if listener != speaker:
                stage_io.send(form, tensors, listener, route.device, route.group)
        return value

    def _schedule(self) -> tuple[Any, StageModule | None]:
        """Return torch's schedule for micro-batches like these, and the last stage if it is here."""
        trainable = [param.requires_grad for param in self.model.parameters()]
        shapes = self._batch.shapes()
        key = shapes, *self._of_copies(zlib.crc32(shapes.encode())), self.model.training, bytes(trainable)
        if key not in self._schedules:
            stages, count = self._make_stages(), len(self._batch.inputs)
            with self._together("a pipeline's first step"), _without_traces(stages, self.route.device):
                ends = infer_stage_shapes(stages, self.route)
            last = stages[-1] if stages[-1].index == self.route.count - 1 else None

            def loss(output: Any, number: Tensor) -> Tensor:
                assert last is not None
                tensors = output if isinstance(output, tuple) else (output,)
                with self._streams.of_next(self.route.count):
                    return self._batch.loss(last.output_form, tensors, int(number))

            self._schedules[key] = schedule_for(stages, ends, self.route, count, loss), last
        self._schedules.move_to_end(key)
        if len(self._schedules) > SHAPES_KEPT:
            self._schedules.popitem(last=False)
        schedule: tuple[Any, StageModule | None] = self._schedules[key]
        return schedule

    def _of_copies(self, mine: int) -> list[int]:
        """Return a number of every copy of these stages; of this one, where layers of copies do not meet in a step."""
        if not self._meets_copies:
            return [mine]
        own_count = torch.tensor([mine], device=self.route.device)
        counts: list[int] = all_gather(own_count, same_shapes=True, group=self._context.readers.group).tolist()
        return counts

    def _make_stages(self) -> list[StageModule]:
        mode = self.model.training
        if mode not in self._recorded:
            self._recorded[mode] = record(self.model, self._stages, self.route.count)
        recorded, mine = self._recorded[mode], self.route.mine
        needed = len(recorded.inputs())
        count = len(self._batch.inputs[0])
        if count != needed:
            raise ConfigError(
                f"the pipeline of {type(self.model).__name__} takes {needed} inputs, those without a default; found "
                f"{count}. Put what else the stages need into them, or into the model."
            )
        if mode not in self._bodies:
            self._bodies[mode] = [recorded.body(self.model, stage) for stage in mine]
            for body in self._bodies[mode]:
                self._lower_precision(body)
                if self._plan.step.compiled:
                    body.compile(dynamic=self._plan.step.dynamic_shapes)
        pairs = zip(self._bodies[mode], mine, strict=True)
        return [StageModule(body, stage, self._inputs_of, self._streams) for body, stage in pairs]

    def _inputs_of(self, number: int) -> tuple[Any, ...]:
        return self._batch.inputs[number]

    def _lower_precision(self, body: nn.Module) -> None:
        """Let a stage compute in the dtype of the whole model."""
        for rule in self._plan.modules:
            if not rule.match and rule.dtype not in (None, "float32"):
                apply_precision(body, str(rule.dtype))

    def _warn_of(self, rows: int, count: int, planned_count: int) -> None:
        if self._has_warned or self._context.rank or (count == planned_count and count >= self.route.ranks):
            return
        self._has_warned = True
        logger.warning(
            "a batch of %d rows is cut into %d micro-batches (%d were asked for) for %d stages: ranks wait for each "
            "other. Let rows and pipeline_configs accumulate_steps be multiples of the ranks of a pipeline.",
            rows,
            count,
            planned_count,
            self.route.count,
        )


def _run_forward(forward: Forward, pipeline: PipelineEngine, *inputs: Any, **named: Any) -> Any:
    """Take the place of a model's forward pass."""
    model = pipeline.model
    if model.training and torch.is_grad_enabled():
        raise ConfigError(
            f"training {type(model).__name__}, which is split into stages, needs px.train_step: step = px.train_step("
            "model, loss_fn, optimizer), then step(inputs, target) for each batch. For a loop of your own plan without "
            'stages, px.auto_parallel(..., limits=["pp=1"]). To evaluate, use px.evaluate or torch.no_grad().'
        )
    if named:
        inputs = pipeline.in_order(inspect.signature(forward).bind(*inputs, **named).arguments)
    return pipeline.forward(*inputs)


@contextmanager
def _without_traces(stages: Sequence[StageModule], device: torch.device) -> Iterator[None]:
    """Leave random streams and buffers as they were."""
    buffers = [(buffer, buffer.clone()) for stage in stages for buffer in stage.buffers()]
    with accelerator.fork_random_numbers(device), torch.enable_grad():
        yield
    for buffer, value in buffers:
        buffer.data.copy_(value)


def _no_loss(_output: Any, _target: Any) -> Tensor:
    raise AssertionError("no step is running")


_NO_BATCH = Batch([], [], _no_loss, 1.0, keeps_outputs=False)
