"""`schedule_for`: run pipeline stages under torch's schedules (GPipe, 1F1B, interleaved, zero bubble)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from phalanx.comm.collectives import apply_function
from phalanx.comm.groups import Group
from phalanx.parallel.pipeline import stage_io
from phalanx.parallel.pipeline.rng_streams import Streams
from phalanx.parallel.pipeline.stage_io import Form, StageBoundary, pack, unpack
from phalanx.plan.pipeline_order import is_gpipe
from phalanx.plan.value import Schedule

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, slots=True)
class StageRoute:
    """Which rank of the stage axis holds which stage."""

    schedule: Schedule
    ranks: int
    index: int
    """This rank's place."""

    group: Group
    device: torch.device

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.ranks * self.schedule.virtual

    def holder(self, stage: int) -> int:
        """Return the rank along the axis that holds a stage."""
        return self.schedule.holder(stage, self.ranks)

    @property
    def mine(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage in range(self.count) if self.holder(stage) == self.index]


class StageModule(nn.Module):
    """One stage: from the tensors of the stage before to those for the next.

    The first stage takes the number of a micro-batch instead.
    """

    def __init__(
        self, body: fx.GraphModule, index: int, feed: Callable[[int], tuple[Any, ...]], streams: Streams
    ) -> None:
        super().__init__()
        self.body = body
        self.index = index
        self.input_form: Form = None
        """Form of the values that its tensors make up."""

        self.output_form: Form = None
        self._feed = feed
        self._streams = streams

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the stage on one micro-batch."""
        if self.index == 0:
            values = self._feed(int(tensors[0]))
        else:
            values = unpack(self.input_form, [apply_function(StageBoundary, tensor) for tensor in tensors])
        outputs: list[Tensor] = []
        with self._streams.of_next(self.index):
            self.output_form = pack(self.body(*values), outputs)
        return tuple(apply_function(StageBoundary, tensor) for tensor in outputs)


Ends = dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]]
"""By stage: the tensors it took and those it gave."""


def infer_stage_shapes(stages: Sequence[StageModule], route: StageRoute) -> Ends:
    """Run the first micro-batch forward through all stages, one after another. Collective along the stage axis.

    Returns:
        What the stages of this rank took and gave.
    """
    ends: Ends = {}
    for stage in stages:
        taken: Sequence[Tensor] = [torch.zeros(1, dtype=torch.int64)]
        if stage.index and stage.index - 1 in ends:  # the stage before is here too
            taken = [t.detach().requires_grad_(t.requires_grad) for t in ends[stage.index - 1][1]]
            stage.input_form = next(before.output_form for before in stages if before.index == stage.index - 1)
        elif stage.index:
            stage.input_form, taken = stage_io.recv(route.holder(stage.index - 1), route.device, route.group)
        outputs = stage(*taken)
        ends[stage.index] = taken, outputs
        following = stage.index + 1
        if following < route.count and route.holder(following) != route.index:
            stage_io.send(stage.output_form, outputs, route.holder(following), route.device, route.group)
    return ends


def schedule_for(
    stages: Sequence[StageModule], ends: Ends, route: StageRoute, microbatches: int, loss: Callable[..., Tensor]
) -> Any:
    """Return torch's schedule over the stages of this rank.

    Args:
        stages: This rank's.
        ends: What they take and give, of one micro-batch.
        route: Where the others are.
        microbatches: How many (`microbatches_of`).
        loss: From the last stage's tensors and the number of a micro-batch, shape (1,), to its term of the loss.
    """
    kind = route.schedule.kind
    shapes = {index: (_to_meta(taken), _to_meta(outputs)) for index, (taken, outputs) in ends.items()}
    whole = [stage.index for stage in stages if kind == "zero_bubble" and not _splits(stage, *ends[stage.index])]
    own_stages: list[Any] = [
        PipelineStage(
            stage,
            stage.index,
            route.count,
            route.device,
            input_args=shapes[stage.index][0],
            output_args=shapes[stage.index][1],
            group=route.group,
            dw_builder=_nothing_left if stage.index in whole else None,
        )
        for stage in stages
    ]
    settings: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": loss, "scale_grads": False}
    if kind == "zero_bubble":
        return (ScheduleZBVZeroBubble if route.schedule.is_v else ScheduleInterleavedZeroBubble)(own_stages, **settings)
    if kind == "interleaved":
        return ScheduleInterleaved1F1B(own_stages, **settings)
    # torch's 1F1B refuses fewer micro-batches than stages.
    all_first = is_gpipe(route.schedule, microbatches, route.count)
    return (ScheduleGPipe if all_first else Schedule1F1B)(own_stages[0], **settings)


def _splits(stage: StageModule, taken: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Return whether torch can take a stage's backward pass apart: gradients of its inputs first, its own later.

    Tried on the micro-batch at hand, whose graph is used up: torch finds its way along the inputs, and misses, or
    cannot walk to, parameters that the outputs depend on in another way (frozen stages before, one parameter used
    twice).
    """
    params = [param for param in stage.parameters() if param.requires_grad]
    outputs = [tensor for tensor in results if tensor.requires_grad]
    if not stage.index or not params or not outputs:
        return True  # the first has no inputs to wait for
    before = [param.grad for param in params]
    ones = [torch.ones_like(tensor) for tensor in outputs]
    whole = torch.autograd.grad(outputs, params, ones, retain_graph=True, allow_unused=True)
    for param in params:
        param.grad = None
    try:
        _, groups = stage_backward_input(outputs, ones, list(taken), stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
        is_same = all(_are_close(param.grad, grad) for param, grad in zip(params, whole, strict=True))
    except RuntimeError:  # autograd's words for a part of the graph that is walked twice
        is_same = False
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
    if not is_same:
        logger.warning(
            "the backward pass of stage %d cannot be taken apart, as the schedule zero_bubble would: it runs whole, "
            "and fills no bubbles.",
            stage.index,
        )
    return is_same


def _are_close(gradient: Tensor | None, expected: Tensor | None) -> bool:
    if gradient is None or expected is None:
        return gradient is expected
    return torch.allclose(gradient, expected, rtol=1e-2, atol=1e-6)


def _nothing_left() -> Callable[..., None]:
    """Return what computes gradients of parameters after those of inputs: nothing, they are there."""
    return lambda: None


def microbatches_of(route: StageRoute, *rows: int) -> tuple[int, int]:
    """Return into how many micro-batches of equal size a batch is cut, and how many were asked for.

    At most as many as the Plan says, or of at least so many rows; as many for each of several copies' rows.
    """
    schedule = route.schedule
    size = schedule.microbatch_rows
    planned_count = schedule.microbatches if size is None else max(1, min(rows) // size)
    fitting = (n for n in range(min(planned_count, *rows), 0, -1) if all(count % n == 0 for count in rows))
    return next(n for n in fitting if _schedulable(schedule, n, route.ranks)), planned_count


def _schedulable(schedule: Schedule, microbatches: int, ranks: int) -> bool:
    """Return whether the schedule takes so many: interleaved ones go in rounds of one size."""
    is_in_rounds = schedule.kind in ("interleaved", "zero_bubble") and not schedule.is_v
    return not is_in_rounds or microbatches % max(1, microbatches // ranks) == 0


def _to_meta(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors without memory that look like these."""
    return tuple(torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for t in tensors)
