"""`Footprint`: peak memory of a transformer run by category: weights, optimizer, activations (pure).

Activations after V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
equations 1 to 5, told apart by kernel so that grouped queries, gated layers, fused attention and experts have theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from phalanx.auto.predict.rank_groups import (
    RankParameters,
    block_shard_parameters,
    count_tables,
    list_block_parameters,
    place_vocabulary,
)
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.transformer import FLOAT, keeps_every_second_product, routed_rows, tokens

WORKSPACE = 1.0 * 2**30
"""Bytes outside the allocator: the context, cuBLAS and NCCL on one device of 8."""

LOST = 0.05
"""Share of activations that an allocator keeps reserved and unused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one rank at its peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    """Parameters and gradients of the layers in use, gathered (ZeRO); inputs that were sharded over the sequence."""

    workspace: float
    """What libraries of matrix products and of collectives keep, and what is lost between blocks."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def compute_footprint(run: RunSpec) -> Footprint:
    """Return the footprint of a run's peak rank: on the first stage of a pipeline, or on the last.

    A run that says which kind of memory it means (`allocated`, `reserved`) gets that; otherwise all that is taken of
    the device.
    """
    first = compute_stage_footprint(run)
    if run.parallel.pp == 1:
        return first
    last = compute_stage_footprint(run, last=True)
    return max(first, last, key=lambda footprint: footprint.total)


def compute_stage_footprint(run: RunSpec, *, last: bool = False) -> Footprint:
    """Return what a rank of the first or of the last stage holds."""
    parts = _list_parameters(run, last=last)
    whole = sum(times * part.count for times, part in parts)
    sharded = sum(times * part.count / part.shards.ranks for times, part in parts)
    par, mixed, element = run.parallel, run.precision != "fp32", run.element_bytes
    if par.zero >= 2:
        # FSDP keeps float32 parameters and gradients, and casts what it gathers to what passes compute with.
        parameters = FLOAT * sharded + (0 if par.zero == 3 else element * whole)
        gradients, optimizer = FLOAT * sharded, 2 * FLOAT * sharded
        table = place_vocabulary(run)
        largest = max(block_shard_parameters(run), table.count if table.shards.ranks > 1 else 0.0)
        gathered = largest * (2 * element + FLOAT)
        if par.pp > 1:  # stages gather and scatter once a step: all that is sharded in between
            cut = sum(times * part.count for times, part in parts if part.shards.ranks > 1)
            gathered += cut * ((element if par.zero == 3 else 0) + FLOAT)
    else:
        parameters, gathered = whole * element, 0.0
        gradients = whole * run.accumulated_bytes
        optimizer = (sharded if par.zero == 1 else whole) * (3 if mixed else 2) * FLOAT
    if run.habits.attention == "native":  # products that add to gradients in place leave autograd an empty one a shape
        own_experts = max(1, run.model.experts / par.ep)  # of one shape
        gathered += element * (run.dense_parameters + run.expert_parameters / own_experts)
    if par.sequence_parallel and par.tp > 1:
        gathered += 2 * element * tokens(run) * run.model.hidden
    has_head = run.has_one_end != last
    activations, logits = _activations(run, last=last), logits_bytes(run) if has_head else 0.0
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        gathered=gathered,
        workspace=_workspace_bytes(run, activations + logits),
    )


def _workspace_bytes(run: RunSpec, moving: float) -> float:
    lost = 0.0 if run.memory_kind == "allocated" else LOST * moving
    return lost + (0.0 if run.memory_kind in ("allocated", "reserved") else WORKSPACE)


def count_parameters(run: RunSpec, *, last: bool = False) -> float:
    """Return the parameters of a rank of the first stage, or of the last."""
    return sum(times * part.count for times, part in _list_parameters(run, last=last))


def _list_parameters(run: RunSpec, *, last: bool) -> list[tuple[int, RankParameters]]:
    """Return how often a rank of a stage has which parameters."""
    blocks = [(_stage_layers(run, last=last), part) for part in list_block_parameters(run)]
    tables = 0 if last and run.has_one_end else count_tables(run)
    return [*blocks, (tables, place_vocabulary(run))]


def _stage_layers(run: RunSpec, *, last: bool) -> int:
    layers, stages = run.model.layers, run.parallel.pp
    return layers // stages if last else math.ceil(layers / stages)


def block_bytes(run: RunSpec) -> float:
    """Return the bytes that one block keeps of one micro-batch for its backward pass."""
    model, tp, token_count, element = run.sharded_model, run.parallel.tp, tokens(run), run.element_bytes
    rest = token_count * model.hidden / (tp if run.parallel.sequence_parallel else 1)
    if run.recompute == "full":
        return element * rest
    inner = run.expert_load * token_count * max(1, model.top_k) * model.inner / tp
    if keeps_every_second_product(run) and model.gated:
        # The block's input and output, queries, values, the attention's output, the gate.
        return element * (2 * rest + (2 * model.hidden + (model.qkv - model.hidden) / 2) * token_count / tp + inner)
    size = 4 * element * rest  # norms' inputs and outputs
    if not model.flash:  # with dropout, two masks
        size += 2 * rest
    size += element * token_count * (model.qkv + model.hidden) / tp  # queries, keys, values and the attention's output
    size += element * inner * (3 if model.gated else 2)
    if run.habits.stops_checkpoints and run.parallel.sequence_parallel:
        # PyTorch keeps inputs as they were gathered, one of attention and one of the feed-forward; Megatron its part.
        size += 2 * element * (1 - 1 / tp) * token_count * model.hidden
    if run.model.experts:  # each choice of a token is an input of its own
        size += element * routed_rows(run) * model.hidden
    if keeps_every_second_product(run):
        return size / 2
    if not model.flash and run.recompute == "none":
        # The softmax, what dropout leaves of it, and a mask.
        size += (2 * element + 1) * run.micro * model.heads / tp * model.seq * model.seq / run.parallel.cp
    return size


def _activations(run: RunSpec, *, last: bool) -> float:
    """Return what micro-batches on their way keep, and the block that is recomputed, which is there in full."""
    again = 0.0
    if run.recompute == "full":  # its input is kept already
        again = block_bytes(run.model_copy(update={"recompute": "none"})) - block_bytes(run)
    return _stage_layers(run, last=last) * _count_kept(run, last=last) * block_bytes(run) + again


def _count_kept(run: RunSpec, *, last: bool) -> float:
    """Return the micro-batches of which a rank keeps what all of its stages compute, at most (`plan/pipeline_order`).

    A rank begins with as many forward passes as it takes until the first gradient is back: through all of its stages
    but one for a whole round, and for the ranks behind it, there and back where stages are interleaved. Zero bubble
    keeps all of them until the gradients of weights are there, which are as many passes later as ranks are before.
    """
    par, count = run.parallel, max(1, round(run.micro_batches))
    if run.is_v:  # the first rank has all of one stage on their way before the first comes to its other stage
        return (min(count, 2 * par.pp - 1) + 1) / 2 if not last else min(count, par.pp)
    rounds = (par.vpp - 1) * run.round_size
    if run.schedule == "gpipe" or (par.vpp == 1 and run.schedule != "zero-bubble" and count < par.pp):
        return run.micro_batches
    if run.schedule == "zero-bubble":
        stages = rounds + par.pp
    else:
        behind = 0 if last else par.pp - 1
        stages = rounds + (2 if par.vpp > 1 else 1) * behind + 1
    return min(count, stages / par.vpp)


def logits_bytes(run: RunSpec) -> float:
    """Return the bytes of a micro-batch's logits, their copies in float32, and their gradients.

    A fused loss writes the gradient over the logits in 16 bit. Megatron's keeps one copy in float32 and its gradient,
    PyTorch's the logarithms of shares and two gradients, of which compiled code writes the last in 16 bit.
    """
    element = run.element_bytes
    if run.habits.loss in ("fused", "mosaicml"):
        each = 2 * element
    elif run.habits.loss == "megatron":  # in float32 the logits are that copy
        each = 2 * FLOAT + (element if element < FLOAT else 0)
    else:
        each = element + 2 * FLOAT + (element if run.compile else FLOAT)
    return each * tokens(run) * run.model.vocab / run.parallel.tp
