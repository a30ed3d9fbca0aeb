"""`Footprint`: peak memory of a transformer run by category: weights, optimizer, activations (pure).

Activations after V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
equations 1 to 5, told apart by kernel so that grouped queries, gated layers, fused attention and experts have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from phalanx.auto.predict.rank_groups import (
    RankParameters,
    block_shard_parameters,
    count_tables,
    list_block_parameters,
    place_vocabulary,
)
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.transformer import FLOAT, keeps_every_second_product, routed_rows, tokens
from phalanx.plan.pipeline_order import OrderRules, Pass, rank_order
from phalanx.plan.value import Schedule

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
    return max(first, compute_stage_footprint(run, at_end=True), key=lambda footprint: footprint.total)


def compute_stage_footprint(run: RunSpec, *, at_end: bool = False) -> Footprint:
    """Return what the first rank of a pipeline, or the one at its end, holds."""
    parts = _list_parameters(run, at_end=at_end)
    unsharded = sum(times * part.count for times, part in parts)
    sharded = sum(times * part.count / part.shards.ranks for times, part in parts)
    par, mixed, element = run.parallel, run.precision != "fp32", run.element_bytes
    if par.zero >= 2:
        # FSDP keeps float32 parameters and gradients, and casts what it gathers to what passes compute with.
        parameters = FLOAT * sharded + (0 if par.zero == 3 else element * unsharded)
        gradients, optimizer = FLOAT * sharded, 2 * FLOAT * sharded
        table = place_vocabulary(run)
        largest = max(block_shard_parameters(run), table.count if table.shards.ranks > 1 else 0.0)
        gathered = largest * (2 * element + FLOAT)
        if par.pp > 1:  # stages gather and scatter once a step: all that is sharded in between
            cut = sum(times * part.count for times, part in parts if part.shards.ranks > 1)
            gathered += cut * ((element if par.zero == 3 else 0) + FLOAT)
    else:
        parameters, gathered = unsharded * element, 0.0
        gradients = unsharded * run.accumulated_bytes
        optimizer = (sharded if par.zero == 1 else unsharded) * (3 if mixed else 2) * FLOAT
    if run.habits.attention == "native":  # products that add to gradients in place leave autograd an empty one a shape
        own_experts = max(1, run.model.experts / par.ep)  # of one shape
        gathered += element * (run.dense_parameters + run.expert_parameters / own_experts)
    if par.sequence_parallel and par.tp > 1:
        gathered += 2 * element * tokens(run) * run.model.hidden
    has_head = run.has_one_end != at_end
    activations, logits = _activations(run, at_end=at_end), logits_bytes(run) if has_head else 0.0
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


def count_parameters(run: RunSpec, *, at_end: bool = False) -> float:
    """Return the parameters of the first rank of a pipeline, or of the one at its end."""
    return sum(times * part.count for times, part in _list_parameters(run, at_end=at_end))


def _list_parameters(run: RunSpec, *, at_end: bool) -> list[tuple[int, RankParameters]]:
    """Return how often a rank has which parameters."""
    own = sum(run.stage_blocks[stage] for stage in _list_stages(run, at_end=at_end))
    blocks = [(own, part) for part in list_block_parameters(run)]
    tables = 0 if at_end and run.has_one_end else count_tables(run)
    return [*blocks, (tables, place_vocabulary(run))]


def _list_stages(run: RunSpec, *, at_end: bool) -> list[int]:
    """Return the stages of the first rank, or of the one at the end."""
    ranks, order = run.parallel.pp, run.order
    mine = ranks - 1 if at_end else 0
    return [stage for stage in range(ranks * run.parallel.vpp) if order.holder(stage, ranks) == mine]


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


def _activations(run: RunSpec, *, at_end: bool) -> float:
    """Return what micro-batches on their way keep, and what of the block that is recomputed was not kept."""
    blocks = [run.stage_blocks[stage] for stage in _list_stages(run, at_end=at_end)]
    return count_kept_blocks(run, blocks, at_end=at_end) * block_bytes(run) + recomputed_bytes(run)


def recomputed_bytes(run: RunSpec) -> float:
    """Return the bytes of a block that are there only while its backward pass runs: what it computes again."""
    return block_bytes(run.model_copy(update={"recompute": "none"})) - block_bytes(run)


def count_kept_blocks(run: RunSpec, blocks: Sequence[int], *, at_end: bool) -> int:
    """Return of how many blocks a rank keeps a micro-batch at most, counted once a micro-batch.

    Args:
        run: Its schedule says when a micro-batch goes forward, and when it is through.
        blocks: Those of each stage of the rank.
        at_end: Whether it is the rank at the end of the pipeline, or the first.
    """
    par, count = run.parallel, run.full_micro_batches
    if par.pp == 1:
        return sum(blocks)
    if run.all_forward_first:
        return sum(blocks) * count
    if par.vpp == 1:  # zero bubble keeps it until gradients of weights are there, as many passes later as ranks before
        behind = par.pp if run.schedule == "zero-bubble" or not at_end else 1
        return sum(blocks) * min(count, behind)
    size = par.pp if run.is_v else run.round_size
    count -= max(0, count // size - _ROUNDS) * size
    return _find_most_kept(run.order.kind, count, par.vpp, par.pp, run.order_rules, tuple(blocks), at_end=at_end)


_ROUNDS = 3
"""Rounds of micro-batches after which a rank with several stages has been as full as it gets."""


@lru_cache(maxsize=4096)
def _find_most_kept(
    kind: str, count: int, virtual: int, ranks: int, rules: OrderRules, blocks: tuple[int, ...], *, at_end: bool
) -> int:
    """Return the same of a rank with several stages, by its passes one after the other."""
    schedule = Schedule.model_validate({"kind": kind, "microbatches": count, "virtual": virtual})
    rank = ranks - 1 if at_end else 0
    now = most = 0
    for action in rank_order(schedule, rank, ranks, rules):
        own = blocks[action.stage // ranks]
        if action.kind is Pass.FORWARD:
            now += own
            most = max(most, now)
        elif action.kind is not Pass.INPUTS:  # gradients of weights, or of both
            now -= own
    return most


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
