"""A step as calls of modules: chains, branches, attention and repeated blocks are as the models have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.alexnet_hybrid.model import AlexNet
from examples.resnet.model import ResNet
from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.module_calls import ModuleCall, list_module_calls
from phalanx.auto.capture.step import capture
from tensor_models import Block, Transformer, whole_loss


def step(name: str) -> CapturedStep:
    labels = torch.zeros(4, dtype=torch.long)
    if name == "alexnet":
        return capture(AlexNet(10), (torch.zeros(4, 3, 224, 224), labels), F.cross_entropy)
    if name == "resnet":
        return capture(ResNet(10, 18, width=4), (torch.zeros(4, 3, 64, 64), labels), F.cross_entropy)
    words = torch.zeros(2, 6, dtype=torch.long)
    return capture(Transformer(0.1), (words, words), whole_loss)


def by_path(found: tuple[ModuleCall, ...]) -> dict[str, list[ModuleCall]]:
    paths: dict[str, list[ModuleCall]] = {}
    for segment in found:
        paths.setdefault(segment.path, []).append(segment)
    return paths


def backward_flops(captured: CapturedStep, segment: ModuleCall) -> int:
    """Return those of the operators whose forward operator is of the segment."""
    return sum(op.flops for op in captured.operators if op.origin in segment.operators)


def sources(segment: ModuleCall) -> list[int | str]:
    return [read.source for read in segment.inputs]


@pytest.mark.parametrize("name", ["alexnet", "resnet", "transformer"])
def test_segments_add_up_to_the_step(name: str) -> None:
    captured = step(name)
    found = list_module_calls(captured)
    assert sum(s.saved_bytes for s in found) == captured.saved_bytes
    forward = [at for at, operator in enumerate(captured.operators) if operator.phase != "backward"]
    assert sorted(at for s in found for at in s.operators) == forward
    for at, segment in enumerate(found):
        assert all(source < at for source in sources(segment) if isinstance(source, int))
    assert {p.name for s in found for p in s.parameters} == {p.name for p in captured.parameters}
    assert [s.kind for s in found].index("loss") == len(found) - 1


def test_alexnet_is_a_chain() -> None:
    captured = step("alexnet")
    found = list_module_calls(captured)
    assert [s.kind for s in found[:3]] == ["Conv2d", "ReLU", "MaxPool2d"]
    assert [sources(s)[0] for s in found] == ["sample:0", *range(len(found) - 1)]
    assert [s.keeps_rows for s in found] == [True] * (len(found) - 1) + [False]
    classifier = {s.path: s for s in found if s.path.startswith("classifier")}
    assert {path: s.last_dim_parts for path, s in classifier.items() if s.last_dim_parts} == {
        "classifier.0": 2304,
        "classifier.2": 4096,
        "classifier.3": 4096,
        "classifier.5": 4096,
    }
    linear = classifier["classifier.1"]
    assert [(p.name, p.shape) for p in linear.parameters] == [
        ("classifier.1.weight", (4096, 2304)),
        ("classifier.1.bias", (4096,)),
    ]
    assert sum(captured.operators[at].flops for at in linear.operators) == 2 * 4 * 2304 * 4096
    assert backward_flops(captured, linear) == 4 * 4 * 2304 * 4096
    assert linear.outputs[0].shape == (4, 4096)
    flatten = next(s for s in found if not s.path)
    assert flatten.is_glue
    assert not any(captured.operators[at].read_bytes for at in flatten.operators)


def test_branches_of_resnet_meet_in_its_blocks_and_batch_norm_mixes_rows() -> None:
    found = list_module_calls(step("resnet"))
    paths = by_path(found)
    (plain,), (wider,) = paths["blocks.0"], paths["blocks.2"]
    assert [found[int(source)].path for source in sources(plain)] == ["blocks.0.residual.4", "stem.3"]
    assert [found[int(source)].path for source in sources(wider)] == ["blocks.2.residual.4", "blocks.2.shortcut.1"]
    assert wider.is_glue
    assert wider.keeps_rows
    assert wider.last_dim_parts == wider.outputs[0].shape[-1]
    assert {s.kind for s in found if not s.keeps_rows} == {"BatchNorm2d", "loss"}


def test_evaluated_batch_norm_keeps_rows() -> None:
    found = list_module_calls(capture(ResNet(10, 18, width=4).eval(), torch.zeros(4, 3, 32, 32)))
    assert all(segment.keeps_rows for segment in found)


def test_attention_between_its_layers_is_one_segment_that_passes_heads() -> None:
    found = list_module_calls(step("transformer"))
    paths = by_path(found)
    attention, first_sum, second_sum = paths["block"]
    assert [found[int(source)].path for source in sources(attention)] == ["block.q", "block.k", "block.v"]
    assert attention.last_dim_parts == 4
    assert attention.keeps_rows
    assert [read.follows for read in attention.inputs] == [True] * 3
    assert [found[int(source)].path for source in sources(first_sum)] == ["tokens", "block.drop"]
    assert next(found[int(source)] for source in sources(second_sum)) is first_sum
    assert paths["block.norm1"][0].last_dim_parts == 0
    assert paths["block.mlp.1"][0].last_dim_parts == 24
    assert found[-1].path == ""
    assert not found[-1].keeps_rows


def test_repeated_blocks_are_tied_segment_by_segment() -> None:
    model = nn.Sequential(nn.Linear(3, 12), *(Block(12, 4, 0.0, False) for _ in range(3)))
    found = list_module_calls(capture(model, torch.zeros(2, 6, 3)))
    tied = [[at for at, s in enumerate(found) if s.template == one] for one in {s.template for s in found}]
    assert sorted(map(len, tied)) == [1] + [3] * (len(found) // 3)
    for group in tied:
        assert len({(found[at].kind, len(found[at].operators), found[at].last_dim_parts) for at in group}) == 1


def test_torchs_own_attention_keeps_rows_where_they_come_first() -> None:
    kept = {}
    for batch_first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        kept[batch_first] = list_module_calls(capture(layer, torch.zeros(3, 4, 8)))[0].keeps_rows
    assert kept == {True: True, False: False}, "otherwise the first dimension is that of places"


class Masked(nn.Module):
    """The mask is made by the whole model, and attention is spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.attention = Spelled()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.o(self.attention(self.q(x), self.k(x), self.v(x), mask))


class Spelled(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_mask_stays_whole_where_heads_are_cut() -> None:
    found = list_module_calls(capture(Masked(), torch.zeros(2, 6, 12)))
    attention = next(s for s in found if s.path == "attention")
    assert attention.last_dim_parts == 4
    assert [read.follows for read in attention.inputs] == [True, True, True, False]


class Padded(Masked):
    """Samples differ in length, and caches of keys and values begin empty, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Cached()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) < lengths.unsqueeze(1))[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        return self.o(self.attention(self.q(x), self.k(x), self.v(x), mask))


class Cached(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in (q, k, v))
        k, v = (torch.cat([torch.tensor([]), part], dim=-2) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def test_a_mask_of_the_samples_stays_whole_where_heads_are_cut() -> None:
    found = list_module_calls(capture(Padded(), (torch.zeros(2, 6, 12), torch.ones(2, dtype=torch.long))))
    attention = next(s for s in found if s.path == "attention")
    assert (attention.last_dim_parts, attention.keeps_rows) == (4, True)
    assert [read.follows for read in attention.inputs if isinstance(read.source, int)] == [True, True, True, False]


class Twice(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.run = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def test_calls_of_one_module_are_segments_each() -> None:
    captured = capture(Twice(lambda layers, x: layers(layers(x))), torch.zeros(2, 4))
    found = list_module_calls(captured)
    assert [s.path for s in found] == ["layers.0", "layers.1"] * 2
    assert [sources(s) for s in found] == [["sample:0"], [0], [1], [2]]
    assert [backward_flops(captured, s) for s in found] == [2 * 2 * 4 * 4, 0, 2 * 2 * 2 * 4 * 4, 0]


def test_recomputation_counts_backward() -> None:
    captured = capture(Twice(lambda n, x: checkpoint(n, x, use_reentrant=False)), torch.zeros(2, 4))
    assert [s.path for s in list_module_calls(captured)] == ["layers.0", "layers.1"]
    flops: Counter[tuple[str, str]] = Counter()
    for op in captured.operators:
        flops[op.phase, op.module] += op.flops
    assert +flops == {("forward", "layers.0"): 64, ("backward", "layers.0"): 128}


def test_what_is_not_known_passes_nothing() -> None:
    words = torch.zeros(2, 6, dtype=torch.long)
    captured = capture(Transformer(), (words, words), whole_loss, level="hooks")
    found = list_module_calls(captured)
    assert not any(s.keeps_rows or s.last_dim_parts for s in found)
    assert [s.kind for s in found[:3]] == ["Embedding", "LayerNorm", "Linear"]
