"""Cost of attention whose sequence several ranks share: `ring_steps`, `ring_again_s`, `exchange_keys` (pure).

What is sent and kept is what `parallel/tensor/context/attention` sends and keeps.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.auto.capture.sequence_blocks import AttentionCall
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.machine_model import MachineModel, OperatorTimes
from phalanx.auto.cost.operators import PassTimes
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.cluster.calibration.figures import Kind

_SCORE_PASSES = 4
"""Passes over scores in memory, of attention from plain products; half as many more in the backward pass."""

_FLOAT32 = 4


def ring_steps(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> PassTimes:
    """Return the seconds of the attention of all steps of a ring, and of what merges their results."""
    step, merge_s = _step(call, machine, config), _merge_s(call, machine, config)
    return PassTimes(config.context * step.forward + merge_s, config.context * step.backward + merge_s)


def ring_again_s(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> float:
    """Return the seconds of what a backward pass computes again of the attention of a ring.

    Where the results of products are kept (`selective`), those are the passes over scores, and merging.
    """
    if config.recompute == "full":
        return ring_steps(call, machine, config).forward
    scores_s = 0.0 if machine.ring_operators is None else _scores_s(call, machine.ring_operators, config)
    return config.context * scores_s + _merge_s(call, machine, config)


def ring_product_bytes(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> float:
    """Return the bytes of the results of products in all steps of a ring, which `selective` keeps.

    A fused kernel's result is its output. Plain products have scores in float32 too, of all keys: with a causal mask
    a step meets half of its scores, but for the one in which a rank meets its own keys.
    """
    steps, outputs = config.context, call.query_bytes / config.batch_parts
    if machine.ring_operators is None:
        return outputs
    tokens, rows = call.tokens / steps, call.score_rows / config.batch_parts / steps
    met = (steps + 1) / 2 if call.mask_item_bytes else steps
    return _FLOAT32 * rows * (tokens + call.features) * met


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
    product_s = plain.matmul_s(_score_rows(call, config), tokens, call.features)
    scores_s = _scores_s(call, plain, config)
    return PassTimes(2 * product_s + scores_s, 5 * product_s + 1.5 * scores_s)


def _score_rows(call: AttentionCall, config: ParallelConfig) -> float:
    """Return the queries, times heads, that meet all keys of a step: of a causal mask half is skipped."""
    rows = call.score_rows / config.batch_parts / config.context
    return rows * (0.5 if call.mask_item_bytes else 1.0)


def _scores_s(call: AttentionCall, plain: OperatorTimes, config: ParallelConfig) -> float:
    """Return the seconds of a step's passes over scores in memory."""
    keys = call.tokens / config.context
    return _SCORE_PASSES * plain.operator_s("elementwise", _FLOAT32 * _score_rows(call, config) * keys)


def _merge_s(call: AttentionCall, machine: MachineModel, config: ParallelConfig) -> float:
    merged = call.query_bytes / config.batch_parts / config.context
    return 2 * machine.operators.operator_s("elementwise", merged) * (config.context - 1)
