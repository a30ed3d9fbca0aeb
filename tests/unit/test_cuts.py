"""A cut that is said to pass does: parts computed alone are the parts of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.auto.capture.module_calls import ModuleCall, list_module_calls
from phalanx.auto.capture.step import capture

B, S, D = 4, 6, 12
WEIGHT = torch.arange(D * D, dtype=torch.float64).view(D, D).cos()
KERNEL = torch.arange(81, dtype=torch.float64).view(3, 3, 3, 3).cos()


class Fn(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 3)).transpose(1, 2)


def spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q) @ heads(k).mT / 3**0.5).softmax(-1)
    return (weights @ heads(v)).transpose(1, 2).flatten(2)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    return y.transpose(1, 2).flatten(2)


def rotated(x: Tensor) -> Tensor:
    y = x.unflatten(-1, (-1, 6))
    one, two = y.chunk(2, -1)
    places = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]
    return torch.cat([one * places.cos() - two * places.sin(), two * places.cos() + one * places.sin()], -1).flatten(2)


CASES: dict[str, tuple[Callable[..., Tensor], int, int, bool]] = {
    # What runs, on how many tensors, parts of the last dimension, whether rows are kept. Some that would pass are not
    # known to: a whole factor that is repeated for every row, padding of no width.
    "relu": (torch.relu, 1, D, True),
    "add": (torch.add, 2, D, True),
    "add to its flip": (lambda x, y: x + y.transpose(0, 1).transpose(0, 1), 2, D, True),
    "casts": (lambda x: x.float().clone().double(), 1, D, True),
    "in place": (lambda x: (x * 1).mul_(2).relu_(), 1, D, True),
    "where": (lambda x, y: torch.where(x > 0, y, 0.0), 2, D, True),
    "layer norm": (lambda x: F.layer_norm(x, (D,)), 1, 0, True),
    "layer norm of all": (lambda x: F.layer_norm(x, (B, S, D)), 1, 0, False),
    "softmax": (lambda x: x.softmax(-1), 1, 0, True),
    "softmax over places": (lambda x: x.softmax(1), 1, D, True),
    "softmax over rows": (lambda x: x.softmax(0), 1, D, False),
    "linear": (lambda x: F.linear(x, WEIGHT, WEIGHT[0]), 1, 0, True),
    "product from the left": (lambda x: WEIGHT[:S, :S] @ x, 1, D, False),
    "products": (lambda x, y: x @ y.transpose(1, 2) @ y, 2, 0, True),
    "mean over places": (lambda x: x.mean(1), 1, D, True),
    "mean over rows": (lambda x: x.mean(0), 1, D, False),
    "norm kept": (lambda x: x.square().mean(-1, keepdim=True), 1, 0, True),
    "merged and split": (lambda x: x.flatten(0, 1).relu().unflatten(0, (-1, S)), 1, D, True),
    "merged the other way": (lambda x: x.transpose(0, 1).flatten(0, 1).exp().unflatten(0, (S, -1))
                             .transpose(0, 1), 1, D, True),
    "turned and back": (lambda x: F.linear(x.transpose(0, 1).flatten(0, 1), WEIGHT).unflatten(0, (S, -1))
                        .transpose(0, 1), 1, 0, True),
    "split at the start": (lambda x: x.unflatten(-1, (-1, 3)).tanh().flatten(2), 1, 4, True),
    "split at the end": (lambda x: x.unflatten(-1, (3, -1)).tanh().sum(-2), 1, 0, True),
    "cat": (lambda x, y: torch.cat([x, y], 1), 2, D, True),
    "cat along the cut": (lambda x, y: torch.cat([x, y], -1), 2, 0, True),
    "cat along rows": (lambda x, y: torch.cat([x, y]), 2, D, False),
    "stack": (lambda x, y: torch.stack([x, y], 1).amax(1), 2, D, True),
    "places one on": (lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)), 1, 0, True),
    "half of it": (lambda x: x[..., : x.shape[-1] // 2], 1, 0, True),
    "every row but the first": (lambda x: x[1:], 1, D, False),
    "one place": (lambda x: x[:, 0].unsqueeze(1).expand(-1, S, -1), 1, D, True),
    "sums so far": (lambda x: x.cumsum(1).sort(1)[0], 1, D, True),
    "largest": (lambda x: x.topk(2, -1)[0], 1, 0, True),
    "gate": (lambda x: F.glu(x, -1), 1, 0, True),
    "no rule": (lambda x: x.flip(1), 1, 0, False),
    "lengths": (lambda x: x.norm(dim=1) + x.logsumexp(1) + x.prod(1) + x.std(1), 1, D, True),
    "attention": (spelled, 3, 4, True),
    "fused attention": (fused, 3, 4, True),
    "rotation": (rotated, 1, 2, True),
    "convolution": (lambda x: F.conv2d(x.unflatten(-1, (3, -1)).movedim(2, 1), KERNEL, padding=1).movedim(1, 2)
                    .flatten(2), 1, 0, True),
    "pool": (lambda x: F.max_pool2d(x.unflatten(-1, (-1, 4)).transpose(1, 2), 2).transpose(1, 2).flatten(2),
             1, 3, True),
    "group norm": (lambda x: F.group_norm(x, 2), 1, 0, True),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), 1, 0, False),
    "permuted": (lambda x: x.permute(1, 2, 0).neg().permute(2, 0, 1), 1, D, True),
}  # fmt: skip


def told(run: Callable[..., Tensor], inputs: list[Tensor]) -> ModuleCall:
    (found,) = list_module_calls(capture(Fn(run), [x.requires_grad_() for x in inputs]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_passes_is_computed_in_parts(name: str) -> None:
    run, count, parts, rows = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(B, S, D, dtype=torch.float64) for _ in range(count)]
    found = told(run, inputs)
    assert (found.last_dim_parts, found.keeps_rows) == (parts, rows)
    whole = run(*inputs)
    for dim, divisors in ((-1, [n for n in (2, 3, 4, 6, 12) if parts and parts % n == 0]), (0, [2, 4] if rows else [])):
        for number in divisors:
            alone = [run(*part) for part in zip(*(x.chunk(number, dim) for x in inputs), strict=True)]
            torch.testing.assert_close(torch.cat(alone, dim), whole)


def test_groups_of_queries_share_keys() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    found = told(run, [torch.randn(B, S, width, dtype=torch.float64) for width in (D, D // 2, D // 2)])
    assert found.keeps_rows
    assert found.last_dim_parts == 2


def test_words_are_looked_up_row_by_row() -> None:
    table = torch.randn(9, D)
    (found,) = list_module_calls(capture(Fn(lambda ids: F.embedding(ids, table)), torch.zeros(B, S, dtype=torch.long)))
    assert (found.last_dim_parts, found.keeps_rows) == (0, True)
