"""`block`, `head`: cost of a transformer's layers on one rank per micro-batch (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.auto.cost.kernels import ROWS, Kernels, alignment
from phalanx.auto.predict.rank_groups import block_shard_parameters
from phalanx.auto.predict.run_spec import RunSpec

FLOAT = 4
"""Bytes of an element in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelWork:
    """Seconds of the device, and kernels that the host has to issue, for a forward and a backward pass."""

    forward: float
    backward: float
    forward_launches: float = 0.0
    backward_launches: float = 0.0
    attention: float = 0.0
    """The attention's part of `forward`."""

    attention_backward: float = 0.0
    """The attention's part of `backward`."""

    attention_launches: float = 0.0
    weights: float = 0.0
    """The gradients of weights' part of `backward`."""

    plain: float = 0.0
    """The element-wise kernels' part of `forward`."""

    closing_product: float = 0.0
    """The last product's part of `forward`: nothing that is kept comes after it."""


def keeps_every_second_product(run: RunSpec) -> bool:
    """Return whether selective recomputation is PyTorch's policy for sharded models: half of a block again.

    Elsewhere it is Megatron's: the scores of attention again, of which fused attention keeps none anyway.
    """
    return run.recompute == "selective" and run.habits.stops_checkpoints


def tokens(run: RunSpec) -> float:
    """Return the tokens of a micro-batch on one rank."""
    return run.micro * run.model.seq / run.parallel.cp


def routed_rows(run: RunSpec) -> float:
    """Return the rows that experts of a rank compute for a micro-batch: each token once for each of its choices."""
    return run.expert_load * tokens(run) * run.model.top_k * run.expert_tp / run.parallel.tp


def sent_rows(run: RunSpec) -> float:
    """Return the rows that a rank sends to experts for a micro-batch: each token once for each of its choices.

    Of tokens that all tensor-parallel ranks have, each sends what belongs to its own part of an expert.
    """
    par = run.parallel
    return tokens(run) * run.model.top_k * (1 if par.sequence_parallel else run.expert_tp) / par.tp


def boundary_bytes(run: RunSpec) -> float:
    """Return the bytes of the activations between two blocks, before they are cut over ranks."""
    return run.element_bytes * tokens(run) * run.model.hidden


def block(run: RunSpec, kernels: Kernels) -> KernelWork:
    """Return the work of one block: attention, feed-forward, and what stands between them."""
    products_f, products_b, closing = _products(run, kernels)
    attention = _attention(run, kernels.in_half())
    plain = _element_wise(run, kernels)
    return KernelWork(
        forward=products_f + attention.forward + plain.forward,
        backward=products_b + attention.backward + plain.backward + kernels.streamed(_gradient_copy_bytes(run)),
        forward_launches=attention.forward_launches + plain.forward_launches + 4,
        backward_launches=attention.backward_launches + plain.backward_launches + 8,
        attention=attention.forward,
        attention_backward=attention.backward,
        attention_launches=attention.forward_launches,
        weights=products_b / 2,  # as many FLOP as the gradients of inputs
        plain=plain.forward,
        closing_product=closing,
    )


def _gradient_copy_bytes(run: RunSpec) -> float:
    """Return the bytes that one micro-batch moves to join a block's gradients, or to add them to those before.

    Without shards each gradient is read, and read and written. Later Megatron adds within products. Stages copy what
    they shard once a step (`StepSeconds.optimizer`).
    """
    if run.parallel.zero >= 2:
        return shard_copy_bytes(run) if run.parallel.pp == 1 else 0.0
    if run.habits.adds_in_products:
        return 0.0
    return 3 * run.element_bytes * run.block_parameters * (1 - 1 / max(1.0, run.micro_batches))


def shard_copy_bytes(run: RunSpec) -> float:
    """Return the bytes that shards move for each gather and scatter of a block: two copies of what passes compute with.

    PyTorch's first FSDP lays gradients side by side and divides them, its second copies the parameters out of each of
    two gathers.
    """
    return 4 * run.element_bytes * block_shard_parameters(run) if run.parallel.zero >= 2 else 0.0


def _products(run: RunSpec, kernels: Kernels) -> tuple[float, float, float]:
    """Return the seconds of the matrix products of one block's layers, forward and backward, and of the last alone."""
    model, tp, token_count = run.sharded_model, run.parallel.tp, tokens(run)
    h = model.hidden
    layers = [(token_count, model.qkv / tp, h, 1.0), (token_count, h, h / tp, 1.0)]
    wide = (2 if model.gated else 1) * model.inner
    if model.experts:
        own_experts = model.experts / run.parallel.ep
        each, cut = routed_rows(run) / own_experts, run.expert_tp
        layers += [
            (each, wide / cut, h, own_experts),
            (each, h, model.inner / cut, own_experts),
            (token_count, model.experts, h, 1.0),
        ]
    else:
        layers += [(token_count, wide / tp, h, 1.0), (token_count, h, model.inner / tp, 1.0)]
    forward = [kernels.matmul(m, n, k, batch=count) for m, n, k, count in layers]
    backward = sum(
        kernels.matmul(m, k, n, batch=count, backward=True) + kernels.matmul(k, n, m, batch=count, backward=True)
        for m, n, k, count in layers
    )
    return sum(forward), backward, 0.0 if model.experts else forward[-1]


def _attention(run: RunSpec, kernels: Kernels) -> KernelWork:
    """Return scores, softmax and their product with the values: fused, or kernel by kernel."""
    model, tp, seq = run.model, run.parallel.tp, run.model.seq
    if model.flash:
        # The upper half of the scores is masked and not computed.
        flops = 4 * run.micro * seq * seq * model.hidden / tp / run.parallel.cp / 2
        longest = 4 * ROWS * seq * model.hidden / model.heads
        forward, backward = (
            kernels.attention(
                flops, width=model.hidden / model.heads, backward=back, longest=longest, generation=run.habits.attention
            )
            for back in (False, True)
        )
        return KernelWork(
            forward=forward,
            backward=backward,
            forward_launches=1,
            backward_launches=2,
        )
    heads, width, own = run.micro * model.heads / tp, model.hidden / model.heads, seq / run.parallel.cp
    products = [(own, seq, width), (own, width, seq)]
    aligned = alignment(width, run.element_bytes)
    forward = sum(kernels.matmul(m, n, k, batch=heads, aligned=aligned) for m, n, k in products)
    backward = sum(
        kernels.matmul(m, k, n, batch=heads, backward=True, aligned=aligned)
        + kernels.matmul(k, n, m, batch=heads, backward=True, aligned=aligned)
        for m, n, k in products
    )
    scores = heads * own * seq * kernels.constants.score_passes
    moved, moved_back, launches = _softmax_bytes(run)
    gap = kernels.constants.kernel_gap_s
    return KernelWork(
        forward=forward + kernels.streamed(moved * scores) + (3 + launches) * gap,
        backward=backward + kernels.streamed(moved_back * scores) + (3 + launches) * gap,
        forward_launches=5 + launches,
        backward_launches=8 + launches,
    )


def _softmax_bytes(run: RunSpec) -> tuple[float, float, int]:
    """Return the bytes that softmax and dropout move for each score, forward and backward, and launches on top of one.

    Softmax reads and writes the scores, dropout too, with a mask of one byte; backward reads them once more.
    """
    element = run.element_bytes
    if not run.splits_softmax:
        return 4 * element + 1, 5 * element + 1, 0
    if element == FLOAT:  # scales, masks and softmax, an operator each
        return 8 * element + 1, 9 * element + 1, 2
    return 41, 45, 4  # casts to float32 and back too


def _element_wise(run: RunSpec, kernels: Kernels) -> KernelWork:
    """Return norms, residual sums, dropouts, rotary embeddings and the activation function."""
    model, tp = run.sharded_model, run.parallel.tp
    rest = boundary_bytes(run) / (tp if run.parallel.sequence_parallel else 1)
    inner = run.element_bytes * run.expert_load * tokens(run) * (max(1, model.top_k) * model.inner) / tp
    qkv = run.element_bytes * tokens(run) * model.qkv / tp
    # Reads and writes: two norms (2 and 3 each way), two residual sums with dropout (3 or 3.5), the activation.
    sums = 8.5 if run.compile else 10.5
    forward, backward, launches = sums * rest + qkv / 2, 15 * rest + qkv / 2, 8 if run.compile else 16
    if not model.gated:
        forward, backward = forward + 2 * inner, backward + 3 * inner
    elif run.habits.fuses or run.compile:  # a gate, a rotation of queries and keys
        forward, backward = forward + 3 * inner + 2 * qkv, backward + 5 * inner + 2 * qkv
    else:  # norms and rotations in float32, an operator each: 13 and 25 reads and writes of norms; casts around both
        norms, wide = rest * FLOAT / run.element_bytes, 2 if run.element_bytes == FLOAT else 10
        forward += 13 * norms - 4 * rest + 5 * inner + wide * qkv
        backward += 25 * norms - 6 * rest + 9 * inner + wide * qkv
        launches = 40
    if model.experts:  # scores, their choice, and tokens put in order and back
        sent = _ordering_bytes(run)
        forward, backward, launches = forward + sent, backward + sent, launches + 8
    gap = kernels.constants.kernel_gap_s
    return KernelWork(
        forward=kernels.streamed(forward) + launches / 2 * gap,
        backward=kernels.streamed(backward) + launches * gap,
        forward_launches=launches,
        backward_launches=2 * launches,
    )


def _ordering_bytes(run: RunSpec) -> float:
    """Return the bytes that a pass moves to copy tokens in the order of experts, once a choice, and to add them up.

    Both ways a row is read and written; those that other ranks sent are put in the order of this rank's experts too.
    """
    rows = sent_rows(run) + (routed_rows(run) if run.parallel.ep > 1 else 0.0)
    return 4 * run.element_bytes * run.model.hidden * rows


def embedding_backward(run: RunSpec, kernels: Kernels) -> float:
    """Return the seconds of the embedding's gradient: a full table of zeros, filled, and added to what is there."""
    return kernels.streamed(5 * run.element_bytes * run.model.vocab / run.parallel.tp * run.model.hidden)


def head(run: RunSpec, kernels: Kernels) -> KernelWork:
    """Return the projection to the vocabulary, the loss in float32, and their backward pass."""
    model, token_count, columns = run.model, tokens(run), run.model.vocab / run.parallel.tp
    kernels = kernels.in_half()
    forward = kernels.matmul(token_count, columns, model.hidden)
    backward = kernels.matmul(token_count, model.hidden, columns, backward=True)
    backward += kernels.matmul(model.hidden, columns, token_count, backward=True)
    read, write = _loss_bytes(run)
    return KernelWork(
        forward=forward + kernels.streamed(read * token_count * columns),
        backward=backward + kernels.streamed(write * token_count * columns),
        weights=backward / 2,
    )


def _loss_bytes(run: RunSpec) -> tuple[float, float]:
    """Return the bytes moved for each logit by the loss and by its backward pass.

    Fused, logits in half precision are read twice, and their gradient is written. PyTorch's operators copy them to
    float32, and write the logarithms of shares and two gradients. Megatron's cut loss takes the maximum, subtracts it,
    raises, adds up and divides, each over float32 in place; the gradient is scaled and cast. MosaicML's loss is fused,
    and two training metrics go over the logits again: its times say that they take what PyTorch's operators do.
    """
    if run.compile or run.habits.loss == "fused":
        return 3 * run.element_bytes, 3 * run.element_bytes
    # Casts read one of the two and write the other.
    cast = FLOAT + run.element_bytes if run.element_bytes < FLOAT else 0
    return (32 + cast, 8 + cast) if run.habits.loss == "megatron" else (8 + cast, 14 + cast)
