"""Attention to parts of the keys, merged, against torch's attention to all."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.tensor.context import attention_parts
from phalanx.parallel.tensor.context.attention_parts import PartialAttention, attend, attend_backward, merge
from phalanx.parallel.tensor.context.ring_attention import RingCall
from phalanx.parallel.tensor.shard_spec import ShardSpec

TOKENS, SCALE = 6, 0.4
PARTS = ((0, 6), (6, 6), (12, 6))


def tensors(heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, TOKENS, 8), (2, heads, 18, 8), (2, heads, 18, 8), (2, 4, TOKENS, 8)
    query, key, value, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_parts_merge_to_attention_to_all(
    kernel: bool, heads: int, dtype: torch.dtype, exact: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(attention_parts, "_KERNEL_DTYPES", ())
        monkeypatch.setattr(attention_parts, "_SCORE_BYTES", 500)  # a few rows at once
    query, key, value, grad = tensors(heads, dtype)
    parts = [(key.narrow(-2, *part), value.narrow(-2, *part)) for part in PARTS]
    merged = reduce(merge, (attend(query, *part, None, SCALE, is_causal=False) for part in parts))
    merged = PartialAttention(merged.output.to(dtype), merged.log_sum)
    grads = [attend_backward(grad, query, *part, None, merged, SCALE, is_causal=False) for part in parts]

    whole = [x.double().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*whole, scale=SCALE, enable_gqa=True)
    expected.backward(grad.double())
    results = (
        merged.output,
        sum(each.query for each in grads),
        torch.cat([each.key for each in grads], -2),
        torch.cat([each.value for each in grads], -2),
    )
    for result, reference in zip(results, (expected, *(x.grad for x in whole)), strict=True):
        assert (result.double() - reference).norm() <= exact * reference.norm()


@pytest.mark.parametrize("kind", ["bool", "numbers", "causal"])
def test_a_query_that_may_see_no_key_of_a_part_gets_nothing_from_it(kind: str) -> None:
    query, key, value, grad = tensors(4, torch.float64)
    key, value = key[..., :12, :].contiguous(), value[..., :12, :].contiguous()
    seen = torch.ones(TOKENS, 12, dtype=torch.bool).tril(3)
    seen[0] = False  # nothing at all
    if kind == "causal":
        seen = torch.cat([torch.ones(TOKENS, 6, dtype=torch.bool), torch.ones(TOKENS, 6, dtype=torch.bool).tril()], 1)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf) if kind == "numbers" else seen
    halves = [(0, 6), (6, 6)]

    def part_of(first: int, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = None if kind == "causal" else mask.narrow(-1, first, count)
        return key.narrow(-2, first, count), value.narrow(-2, first, count), columns

    causal = [kind == "causal" and half == (6, 6) for half in halves]
    calls = [(part_of(*half), is_causal) for half, is_causal in zip(halves, causal, strict=True)]
    merged = reduce(merge, (attend(query, *part, SCALE, is_causal=is_causal) for part, is_causal in calls))
    grads = [attend_backward(grad, query, *part, merged, SCALE, is_causal=is_causal) for part, is_causal in calls]

    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*whole, mask, scale=SCALE)
    expected.backward(grad)
    expected_grads = [x.grad.nan_to_num() for x in whole]
    assert torch.allclose(merged.output, expected.nan_to_num(), atol=1e-12)
    assert torch.allclose(sum(each.query for each in grads), expected_grads[0], atol=1e-12)
    assert torch.allclose(torch.cat([each.key for each in grads], -2), expected_grads[1], atol=1e-12)
    assert torch.allclose(torch.cat([each.value for each in grads], -2), expected_grads[2], atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("zigzag", [True, False])
def test_slices_join_to_the_whole_and_each_pair_of_a_causal_ring_is_computed_once(ranks: int, zigzag: bool) -> None:
    tokens = 4
    specs = [ShardSpec(None, rank, (tokens,) * ranks, zigzag=zigzag) for rank in range(ranks)]
    whole = torch.arange(tokens * ranks)
    places = [spec.part(whole, 0) for spec in specs]
    assert torch.equal(specs[0].join(places, 0), whole)
    computed = torch.zeros(len(whole), len(whole), dtype=torch.int64)
    work = []
    for rank, spec in enumerate(specs):
        of_rank = torch.zeros_like(computed)
        for source in range(ranks):
            region = RingCall(spec, 1.0, is_causal=True).region(source)
            if region is not None:
                queries, keys = places[rank].narrow(0, *region.queries), places[source].narrow(0, *region.keys)
                block = torch.ones(len(queries), len(keys), dtype=torch.int64)
                of_rank[queries[:, None], keys[None]] += block.tril() if region.is_causal else block
        computed += of_rank
        work.append(int(of_rank.sum()))
    assert torch.equal(computed, torch.ones_like(computed).tril())
    assert len(set(work)) == 1 or not zigzag
