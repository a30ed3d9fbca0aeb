"""The physical quantities behind a prediction, each with its unit and where its value comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What holds for every device and every run. Fitted over published runs unless a source is named.

    `benchmarks/bench_predict.py --fit` finds the values again and shows what each source alone says.
    """

    tile_start: float = 380.0
    """Steps along the inner dimension that filling and draining the pipeline of one tile costs, in elements."""

    backward_rate: float = 0.79
    """Rate of matrix products of the backward pass over those of the forward pass: operands come transposed."""

    stream: float = 0.63
    """Share of a device's memory bandwidth that element-wise kernels reach."""

    kernel_gap_s: float = 4.6e-6
    """Seconds a device idles between two kernels."""

    launch_s: float = 3.5e-5
    """Seconds the host needs to issue one kernel of eager code, Python and autograd included."""

    compiled_launch_s: float = 3.0e-5
    """The same for compiled code, which has fewer kernels to issue."""

    collective_call_s: float = 5e-5
    """Seconds that autograd and Python add to a collective of a layer; a differentiable all-gather of 4 KiB takes 50 us
    where the collective itself takes 8 (2 ranks of an AMD EPYC)."""

    checkpoint_s: float = 4e-4
    """Seconds to recompute a module, whatever is in it (the same machine)."""

    selective_op_s: float = 1.2e-5
    """Seconds that selective recomputation adds to each operator, in the forward pass and again in the backward pass
    (the same machine, 50 operators)."""

    attention: float = 0.38
    """Rate of fused attention in the forward pass, over that of large matrix products."""

    score_passes: float = 0.51
    """Share of the memory traffic of softmax and dropout over scores that reaches memory rather than the cache."""

    link: float = 0.77
    """Share of a device's link that a ring of all devices of a node reaches; all-reduce of 1 GiB on A100: 230 of
    300 GB/s (vTrain and Galvatron's tables)."""

    network: float = 0.92
    """Share of a node's network ports that gradients reach."""

    link_start_s: float = 3.0e-5
    """Seconds before the first byte of a collective inside a node (1 MiB over 2 A100: 44 us, 5 of them on the wire)."""

    link_hop_s: float = 7.0e-6
    """Seconds more for each further rank of a node (1 MiB over 8 A100: 93 us)."""

    network_hop_s: float = 1e-4
    """Seconds for each doubling of ranks of a collective between nodes."""

    contention: float = 0.56
    """Seconds that overlapped communication and computation cost each other, for each second they share."""

    step_s: float = 4.9e-3
    """Seconds of a step that belong to no micro-batch: loss scaling, norms, the loop itself."""

    optimizer_bytes: float = 30.0
    """Bytes moved for each parameter that a rank updates with Adam in mixed precision."""


DEFAULT = Constants()
