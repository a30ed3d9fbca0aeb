"""Predicted runs in float32 and in 8 bit: which bytes and which products a precision changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.cost.kernels import Kernels
from phalanx.auto.predict.memory_model import block_bytes
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.transformer import embedding_backward
from phalanx.cluster.spec.devices import DEVICES
from predicted_runs import EXPERTS, alter, describe, footprint, seconds, step


def in_both(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run in bfloat16 and the same in float32."""
    run = describe(nodes=2, **changes)
    return run, alter(run, precision="fp32")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_in_float32_take_twice_the_memory(recompute: str) -> None:
    bf16, fp32 = in_both(recompute=recompute)
    assert footprint(fp32).activations == 2 * footprint(bf16).activations
    bf16, fp32 = in_both(model={"flash": False}, recompute=recompute)
    assert footprint(bf16).activations < footprint(fp32).activations < 2 * footprint(bf16).activations, "but masks"


def test_logits_in_float32_are_no_copy_of_others() -> None:
    bf16, fp32 = in_both(stack="megatron-2021")
    assert footprint(fp32).logits == 8 / 10 * footprint(bf16).logits
    bf16, fp32 = in_both(stack="megatron-core")
    assert footprint(fp32).logits == 2 * footprint(bf16).logits


def test_collectives_carry_what_passes_compute_with() -> None:
    model, parallel = {**EXPERTS, "top_k": 4}, {"tp": 2, "dp": 4, "pp": 2, "ep": 4, "zero": 3}
    bf16, fp32 = (step(run) for run in in_both(model=model, parallel=parallel, batch={"global": 16}))
    part = bf16.exchanges.block_parameters[0]
    start = bf16.links.ring_start(part.shards)
    assert fp32.exchanges.gather_of(part) - start == pytest.approx(2 * (bf16.exchanges.gather_of(part) - start))
    assert fp32.exchanges.scatter_of(part) == bf16.exchanges.scatter_of(part), "float32 in both"
    for name in ("dense_sum", "experts_forward"):
        assert getattr(fp32.exchanges, name) > 1.5 * getattr(bf16.exchanges, name)
    assert fp32.send_once > 1.5 * bf16.send_once


def test_kernels_that_memory_bounds_take_twice_as_long_in_float32() -> None:
    bf16, fp32 = (step(run) for run in in_both(stack="megatron-core"))
    assert embedding_backward(fp32.run, fp32.kernels) == 2 * embedding_backward(bf16.run, bf16.kernels)
    assert 1.8 * bf16.block.plain < fp32.block.plain < 2 * bf16.block.plain
    device = DEVICES["H100-80GB-SXM"]
    thin = [Kernels(device, DEFAULT, precision).matmul(1, 8192, 8192) for precision in ("bf16", "fp32")]
    assert thin[1] > 1.9 * thin[0]


def test_plain_pytorch_casts_nothing_in_float32() -> None:
    bf16, fp32 = (step(run) for run in in_both(stack="pytorch"))
    assert fp32.block.plain < 1.5 * bf16.block.plain


@pytest.mark.parametrize("device", ["H100", "B200", "MI300X", "L40S"])
def test_no_step_gains_more_from_8_bit_than_products_do(device: str) -> None:
    """Those of backward passes in 8 bit read operands in their order, and gain that too."""
    numbers = random.Random(0)
    for _ in range(25):
        hidden = numbers.choice([2048, 8192, 16384, 65536])
        run = describe(
            nodes=8,
            cluster={"device": device},
            model={"hidden": hidden, "heads": hidden // 128, "ffn": 4 * hidden, "seq": numbers.choice([512, 8192])},
            parallel={"tp": numbers.choice([1, 8]), "sequence_parallel": True},
            batch={"global": 64, "micro": numbers.choice([1, 8])},
            stack=numbers.choice(["megatron-core", "pytorch"]),
            recompute=numbers.choice(["none", "full"]),
        )
        figures = read_run(run).device
        gain = seconds(run) / seconds(alter(run, precision="fp8"))
        rates = figures.rate("fp8") / figures.rate("bf16")
        assert rates <= figures.flops["fp8"] / figures.flops["bf16"] * (1 + 1e-9)
        assert gain < rates * (1 + 2 / DEFAULT.backward_rate) / 3


def test_attention_and_the_projection_stay_in_16_bit() -> None:
    bf16 = step(describe())
    fp8 = step(alter(describe(), precision="fp8"))
    assert (fp8.block.attention, fp8.head) == (bf16.block.attention, bf16.head)
    assert block_bytes(fp8.run) == block_bytes(bf16.run)
