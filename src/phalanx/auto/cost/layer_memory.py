"""`layer_memory`: bytes of a layer that a rank keeps for the backward pass, and has while the layer runs (pure).

Neither parameters, which are `auto/cost/parameters`, nor what recomputation changes.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.auto.capture.layers import EXPERTS, LayerStrategy
from phalanx.auto.capture.sequence_blocks import SequenceBlocks
from phalanx.auto.cost.layer_work import CallWork
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.shared_sequence import kept_bytes, mask_bytes, traveling_bytes


class LayerMemory(NamedTuple):
    """Of one call and micro-batch."""

    activation_bytes: float
    """From its forward to its backward pass."""

    workspace_bytes: float
    """While it runs."""


def layer_memory(
    work: CallWork,
    strategy: LayerStrategy,
    ranks: int,
    config: ParallelConfig,
    blocks: SequenceBlocks | None,
    *,
    gathers_samples: bool,
) -> LayerMemory:
    """Return what a rank has of a call.

    Args:
        work: Of the call.
        strategy: How the layer is computed.
        ranks: That compute it together.
        config: Of all layers.
        blocks: Of the model, whose sequence ranks may share.
        gathers_samples: Whether it gathers the samples of ranks that read others.
    """
    shares = config.context > 1 and work.sequence is not None
    parts = config.batch_parts * (config.context if shares else 1)
    is_cut = strategy.output_state != "whole" or strategy.style == "row"
    activation_bytes = work.call.saved_bytes / parts / (ranks if is_cut else 1)
    workspace_bytes = _temporary_bytes(work, strategy, ranks) / parts
    if gathers_samples:
        activation_bytes += work.input_bytes
        workspace_bytes = _gathered_rows_bytes(work, strategy, ranks, workspace_bytes)
    if strategy == EXPERTS:
        activation_bytes *= config.load
        workspace_bytes += _traveling_tokens_bytes(work, config)
    if strategy.style == "column" and strategy.input_state == "tokens":
        # Put together, and kept for the gradient of the weight.
        activation_bytes += work.input_bytes / config.batch_parts
    if shares:
        assert work.sequence is not None
        activation_bytes += _kept_of_sequence(work, config, blocks)
        workspace_bytes += sum(traveling_bytes(call, config) for call in work.sequence.attention)
    return LayerMemory(activation_bytes, workspace_bytes)


def _kept_of_sequence(work: CallWork, config: ParallelConfig, blocks: SequenceBlocks | None) -> float:
    """Return the bytes that ranks that share a sequence keep of a call beside their parts."""
    shared = work.sequence
    assert shared is not None
    assert blocks is not None
    extra_bytes = sum(kept_bytes(call, config) for call in shared.attention)
    if shared.is_first:
        first = next(iter(blocks.attention.values()))[0]
        extra_bytes += work.call.inputs[0].value.bytes / config.batch_parts / config.context
        extra_bytes += mask_bytes(first, blocks.tokens, config)
    return extra_bytes


def _traveling_tokens_bytes(work: CallWork, config: ParallelConfig) -> float:
    """Return the bytes of the tokens that a rank sends to experts, and of those that arrive."""
    call = work.call.experts
    assert call is not None
    return call.copies * call.token_bytes * (1 + config.load) / config.batch_parts


def _temporary_bytes(work: CallWork, strategy: LayerStrategy, ranks: int) -> float:
    """Return the bytes of temporary tensors of the global batch while a rank computes its part of a call.

    Gradients of inputs and outputs are among them, of which a rank has a part where it has one of the values.
    """
    away = 1 - 1 / ranks
    inputs = work.input_bytes * away if strategy.input_state != "whole" else 0.0
    outputs = work.output_bytes * away if strategy.output_state != "whole" else 0.0
    return max(work.call.temporary_bytes - inputs - outputs, work.output_bytes - outputs)


def _gathered_rows_bytes(work: CallWork, strategy: LayerStrategy, ranks: int, own_bytes: float) -> float:
    """Return the bytes of temporary tensors of a layer that gathers the samples of all ranks.

    An exchange has what it sends, as cut along features and then one after the other, and what arrives. Terms for all
    samples are not cut: there are these, one after the other, and those that arrive. Gathered gradients arrive apart
    and are put together.

    Args:
        work: Of the call.
        strategy: How the layer is cut.
        ranks: That hold it.
        own_bytes: Of temporary tensors of a rank's own rows.
    """
    if strategy.style == "column":
        return max(own_bytes + 3 * work.output_bytes / ranks, 3 * work.input_bytes)
    return max(3 * work.output_bytes, own_bytes + max(2 * work.output_bytes, 3 * work.input_bytes / ranks))
