"""`Constants`: efficiency and latency constants of the cost model, with their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.cluster.spec.devices import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What holds for every device and every run: `auto/cost/priors` says from where, and between which values.

    Two are fitted over published runs (`benchmarks/bench_predict.py --fit`): `backward_rate` and `contention`.
    """

    tile_start: float = 200.0
    """Steps along the inner dimension that filling and draining the pipeline of one tile costs, in elements."""

    backward_rate: float = 0.938
    """Rate of matrix products of the backward pass over those of the forward pass: operands come transposed."""

    stream: float = 0.8
    """Share of a device's memory bandwidth that element-wise kernels reach."""

    cast_bytes: float = 6.0
    """Bytes moved for each activation that a product takes in 8 bit: read twice in 16 bit, written as it is and
    transposed."""

    fused_cast_bytes: float = 1.7
    """The same where norms and activation functions write 8 bit: of the operands of three products, one output of
    attention (4 bytes) and the gradients (4) are cast by kernels of their own."""

    kernel_gap_s: float = 4.0e-6
    """Seconds a device idles between two kernels."""

    launch_s: float = 3.5e-5
    """Seconds the host needs to issue one kernel of eager code, Python and autograd included."""

    compiled_launch_s: float = 1e-5
    """The same for compiled code, which has fewer kernels to issue."""

    collective_call_s: float = 5e-5
    """Seconds that autograd and Python add to a collective of a layer; a differentiable all-gather of 4 KiB takes 50 us
    where the collective itself takes 8 (2 ranks of an AMD EPYC)."""

    checkpoint_s: float = 4e-4
    """Seconds to recompute a module, whatever is in it (the same machine)."""

    selective_op_s: float = 1.2e-5
    """Seconds that selective recomputation adds to each operator, in the forward pass and again in the backward pass
    (the same machine, 50 operators)."""

    attention: float = 0.58
    """Share of a device's peak that fused attention written for it reaches forward, masked scores left out: A100 0.62,
    B200 0.55 (SimuMax 1.2, tables of both), H100 0.62 (J. Shah et al., "FlashAttention-3", 2024, causal)."""

    attention_backward: float = 0.46
    """The same backward: A100 0.51, B200 0.43, H100 0.52 (the same tables)."""

    first_attention: float = 0.6
    """Rate of the first fused kernels (Triton, 2022 and 2023) over that of those of today."""

    attention_tail: float = 0.65
    """Part of the longest block of rows that runs on after all others have ended (the same tables: 4 to 64 heads)."""

    score_passes: float = 1.0
    """Share of the memory traffic of softmax and dropout over scores that reaches memory rather than the cache."""

    link: float = 0.8
    """Share of a device's link that a ring of all devices of a node reaches; all-reduce of 1 GiB on A100: 230 of
    300 GB/s (vTrain and Galvatron's tables)."""

    network: float = 0.85
    """Share of a node's network ports that gradients reach."""

    link_start_s: float = 3.0e-5
    """Seconds before the first byte of a collective inside a node (1 MiB over 2 A100: 44 us, 5 of them on the wire)."""

    link_hop_s: float = 7.0e-6
    """Seconds more for each further rank of a node (1 MiB over 8 A100: 93 us)."""

    network_hop_s: float = 1.4e-5
    """Seconds from one node to the next (NCCL's table of latencies: 14 us between nodes, 3.4 us inside one)."""

    contention: float = 0.341
    """Seconds that overlapped communication and computation cost each other, for each second they share."""

    micro_batch_s: float = 1e-3
    """Seconds of a micro-batch that belong to no block: data, embedding, loss, the schedule's own Python."""

    step_s: float = 5e-3
    """Seconds of a step that belong to no micro-batch: loss scaling, norms, the loop itself."""

    optimizer_bytes: float = 30.0
    """Bytes moved for each parameter that a rank updates with Adam in mixed precision."""


DEFAULT = Constants()


def constants_of(device: Device, constants: Constants = DEFAULT) -> Constants:
    """Return the constants for a device: a measured machine has launches and links of its own, no accelerator's."""
    rates = device.measured
    if rates is None:
        return constants
    return replace(
        constants,
        backward_rate=1.0,
        stream=1.0,
        kernel_gap_s=0.0,
        launch_s=rates.launch_s,
        compiled_launch_s=rates.launch_s,
        link=1.0,
        link_start_s=rates.launch_s,
        link_hop_s=0.0,
        contention=min(1.0, rates.contention()),
        micro_batch_s=0.0,
        step_s=0.0,
    )
