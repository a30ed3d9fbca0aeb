"""Cost of attention whose sequence several ranks share: `ring_steps`, `exchange_keys`, `kept_bytes` (pure).

What is sent and kept is what `parallel/tensor/context/attention` sends and keeps.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.auto.capture.sequence_blocks import AttentionCall
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.cost.operators import PassTimes
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.cluster.calibration.figures import Kind

_SCORE_PASSES = 4
"""Passes over scores in memory, of attention from plain products; half as many more in the backward pass."""

_FLOAT32 = 4


def ring_steps(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> PassTimes:
    """Return the seconds of the attention of all steps of a ring, and of what merges their results."""
    step = _step(call, machine, config)
    merged = call.query_bytes / config.batch_parts / config.context
    merge_s = 2 * machine.operators.operator_s("elementwise", merged) * (config.context - 1)
    return PassTimes(config.context * step.forward + merge_s, config.context * step.backward + merge_s)


def exchange_keys(
    call: AttentionCall,
    machine: MachineModel,
    config: ParallelConfig,
    comm_s: Callable[[Kind, float, GroupTopology], float],
) -> PassTimes:
    """Return what passes wait for keys, values and their gradients.

    Args:
        call: Of attention.
        machine: Of the rank.
        config: Of the ranks.
        comm_s: Seconds of a collective of a layer.
    """
    sizes, where = (call.key_bytes / config.batch_parts, call.value_bytes / config.batch_parts), config.over_context
    if config.attention == "all_gather":
        forward, backward = (sum(comm_s(kind, size, where) for size in sizes) for kind in ("all_gather", "all_to_all"))
        return PassTimes(forward, backward)
    steps, step = config.context, _step(call, machine, config)
    shift_s = machine.collective_s("send", sum(sizes) / steps, config.over_ring) + machine.host.collective_call_s

    def exposed(sent_s: float, computed_s: float) -> float:
        return max(0.0, sent_s - computed_s) + machine.contention * min(sent_s, computed_s)

    # The last gradients have nothing to hide behind.
    backward = (steps - 1) * exposed(2 * shift_s, step.backward) + shift_s
    return PassTimes((steps - 1) * exposed(shift_s, step.forward), backward)


def kept_bytes(call: AttentionCall, config: ParallelConfig) -> float:
    """Return the bytes that a rank keeps for the backward pass beside its part of what one process keeps."""
    if config.attention == "ring":
        return 0.0
    # The outputs of two chunks are put together.
    joined = call.query_bytes / config.context if call.mask_item_bytes else 0.0
    return (call.key_bytes + call.value_bytes + joined) / config.batch_parts


def mask_bytes(call: AttentionCall, tokens: int, config: ParallelConfig) -> float:
    """Return the bytes of causal masks, which all layers share."""
    if config.attention == "ring":
        return 0.0
    chunk = tokens / config.context / 2
    return call.mask_item_bytes * chunk * chunk * (2 * config.context + 1)


def traveling_bytes(call: AttentionCall, config: ParallelConfig) -> float:
    """Return the bytes of keys, values and their gradients that a rank holds while attention runs."""
    whole = (call.key_bytes + call.value_bytes) / config.batch_parts
    # A gather holds them as they arrived and in order; a ring those it has, those that arrive, and gradients likewise.
    return 2 * whole if config.attention == "all_gather" else 5 * whole / config.context


def _step(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> PassTimes:
    """Return the seconds of the attention of a rank's queries to the keys of one rank."""
    tokens = call.tokens / config.context
    heads = call.score_rows / call.tokens / config.batch_parts
    plain = machine.ring_operators
    if plain is None:
        extent = heads, tokens, call.features
        return PassTimes(machine.operators.attention_s(*extent), machine.operators.attention_s(*extent, backward=True))
    # Of a causal mask half is skipped.
    rows = heads * tokens * (0.5 if call.mask_item_bytes else 1.0)
    product_s = plain.matmul_s(rows, tokens, call.features)
    scores_s = _SCORE_PASSES * plain.operator_s("elementwise", _FLOAT32 * rows * tokens)
    return PassTimes(2 * product_s + scores_s, 5 * product_s + 1.5 * scores_s)
