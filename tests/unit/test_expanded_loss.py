"""`SoftmaxCrossEntropyExpand` of whole logits equals torch's; logits that are cut are in tests/dist/test_model.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx as px
from phalanx.errors import ConfigError, DataError


def drawn(scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64) * scale
    return logits.to(dtype).requires_grad_(), torch.randint(5, (6,), generator=generator)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparse", [True, False])
def test_loss_and_gradient_equal_torchs(scale: float, dtype: torch.dtype, sparse: bool) -> None:
    logits, label = drawn(scale, dtype)
    target = label if sparse else F.softmax(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), 1).to(dtype)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide, target.to(wide.dtype) if not sparse else target)
    (wanted,) = torch.autograd.grad(expected, logits)
    loss = px.SoftmaxCrossEntropyExpand(sparse=sparse)(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6 if dtype is not torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_labels_of_any_whole_number_type_come_as_column_too(dtype: torch.dtype) -> None:
    logits, label = drawn(1.0)
    loss = px.SoftmaxCrossEntropyExpand(sparse=True)
    assert loss(logits, label.to(dtype).unsqueeze(1)) == loss(logits, label)


def test_a_class_that_is_ruled_out_by_minus_infinity_is_no_nan() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    label = torch.tensor([0])
    torch.testing.assert_close(px.SoftmaxCrossEntropyExpand(sparse=True)(logits, label), F.cross_entropy(logits, label))


def test_wrong_labels_are_named() -> None:
    loss, (logits, label) = px.SoftmaxCrossEntropyExpand(sparse=True), drawn(1.0)
    with pytest.raises(
        ConfigError, match=r"sparse=True\) of 6 rows takes classes .* found torch.float64 of shape \(6, 5\)"
    ):
        loss(logits, logits)
    with pytest.raises(ConfigError, match=r"found torch.int64 of shape \(3,\)"):
        loss(logits, label[:3])
    label[2] = 5
    with pytest.raises(DataError, match=r"The label of row 2 is 5, but the logits have 5 classes \(0 to 4\)"):
        loss(logits, label)
    with pytest.raises(ConfigError, match=r"sparse=False\) takes one probability for each class, shape \(6, 5\)"):
        px.SoftmaxCrossEntropyExpand()(logits, label)
    with pytest.raises(ConfigError, match=r"takes logits of shape \(rows, classes\), found \(6,\)"):
        loss(logits[:, 0], label)


def test_it_compiles_into_one_graph() -> None:
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    logits, label = drawn(1.0)
    compiled = torch.compile(px.SoftmaxCrossEntropyExpand(sparse=True), backend=count, fullgraph=True)
    torch.testing.assert_close(compiled(logits, label), F.cross_entropy(logits, label))
    assert len(graphs) == 1
