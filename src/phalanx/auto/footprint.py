"""Bytes that one rank of a described run holds at its peak, by category (pure).

Activations after V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
equations 1 to 5, told apart by kernel so that grouped queries, gated layers, fused attention and experts have theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from phalanx.auto.described_run import Run
from phalanx.auto.transformer import HALF, keeps_every_second_product, tokens

FLOAT = 4
WORKSPACE = 1.0 * 2**30
"""Bytes; cuBLAS and NCCL on one device of 8."""

LOST = 0.05
"""Share of activations that an allocator keeps reserved and unused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of the rank that holds most: the first stage of a pipeline, or the only one."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    """Parameters and gradients of the layers in use, whole again (ZeRO); inputs that were cut over the sequence."""

    workspace: float
    """What libraries of matrix products and of collectives keep, and what is lost between blocks."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def footprint(run: Run) -> Footprint:
    """Return what the fullest rank of a run holds."""
    held, par = parameters_held(run), run.parallel
    shards = par.dp * par.cp // par.hsdp
    mixed = run.precision != "fp32"
    if par.zero >= 2:
        # FSDP keeps float32 parameters and gradients, and casts what it gathers.
        parameters = held * (FLOAT / shards if par.zero == 3 else HALF + FLOAT / shards)
        gradients, optimizer = held * FLOAT / shards, held * 2 * FLOAT / shards
        largest = max(run.model.parameters / run.model.layers / par.tp, run.model.vocab * run.model.hidden / par.tp)
        gathered = largest * (2 * HALF + FLOAT)
    else:
        parameters, gradients, gathered = held * (HALF if mixed else FLOAT), held * FLOAT, 0.0
        optimizer = held * (3 if mixed else 2) * FLOAT / (shards if par.zero == 1 else 1)
    if par.sequence_parallel and par.tp > 1:
        gathered += 2 * HALF * tokens(run) * run.model.hidden
    # With stages, logits are on the last one, which keeps fewer activations.
    activations, logits = _activations(run), logits_bytes(run) if par.pp == 1 else 0.0
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        gathered=gathered,
        workspace=WORKSPACE + LOST * (activations + logits),
    )


def parameters_held(run: Run) -> float:
    """Return the parameters of the fullest rank."""
    model, par = run.model, run.parallel
    experts = max(1, model.experts) / (par.ep if model.experts else 1)
    block = (model.attention_parameters + experts * model.expert_parameters) / par.tp
    return math.ceil(model.layers / par.pp) * block + model.vocab * model.hidden / par.tp * (
        2 if par.pp == 1 and not model.tied else 1
    )


def block_bytes(run: Run) -> float:
    """Return what one block keeps of one micro-batch for its backward pass."""
    model, cut, rows = run.model, run.parallel.tp, tokens(run)
    rest = rows * model.hidden / (cut if run.parallel.sequence_parallel else 1)
    if run.recompute == "full":
        return HALF * rest
    inner = rows * max(1, model.top_k) * model.inner / cut
    kept = 10 * rest if not model.flash else 8 * rest  # norms' inputs and outputs; with dropout, two masks
    kept += HALF * rows * (model.qkv + model.hidden) / cut  # queries, keys, values and the attention's output
    kept += HALF * inner * (3 if model.gated else 2)
    if keeps_every_second_product(run):
        return kept / 2
    if not model.flash and run.recompute == "none":
        kept += 5 * run.micro * model.heads / cut * model.seq * model.seq / run.parallel.cp
    return kept


def _activations(run: Run) -> float:
    par = run.parallel
    layers = math.ceil(run.model.layers / par.pp)
    in_flight = float(min(par.pp, max(1, round(run.micro_batches)))) if run.schedule != "gpipe" else run.micro_batches
    if par.vpp > 1:
        in_flight = min(run.micro_batches, in_flight * (1 + (par.pp - 1) / (par.pp * par.vpp)))
    kept = layers * in_flight * block_bytes(run)
    if run.recompute == "full":  # the block that is computed again is there in whole
        kept += block_bytes(run.model_copy(update={"recompute": "none"}))
    return kept


def logits_bytes(run: Run) -> float:
    """Return the bytes of a micro-batch's logits in half precision, in float32, and of their gradient."""
    return (HALF + FLOAT + FLOAT) * tokens(run) * run.model.vocab / run.parallel.tp
