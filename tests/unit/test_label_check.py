"""Labels that do not fit a loss over classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.errors import DataError

COLUMN = r"The loss takes labels of shape \(4,\) for outputs of shape \(4, 3\), found \(4, 1\)"
INT32 = r"The loss takes labels of type int64, found int32. Write target.long\(\)"
OUTSIDE = r"The label 7, of sample 3 of this rank's batch, is outside the 3 classes of the output \(0 to 2\)"


def own_loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output, target)


def step_with(loss_fn: Any) -> Any:
    net = nn.Linear(2, 3)
    return px.train_step(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1)), net


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        partial(F.cross_entropy, label_smoothing=0.1),
        lambda o, t: F.nll_loss(o, t),
    ],
)
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([[0], [1], [2], [1]]), COLUMN + r". Write target.squeeze\(1\)"),
        (torch.tensor([0, 1, 2, 1], dtype=torch.int32), INT32),
        (torch.tensor([0, 1, 2, 7]), OUTSIDE),
    ],
)
def test_labels_that_are_no_classes_are_an_error_in_words_and_change_nothing(
    loss_fn: Any, labels: torch.Tensor, message: str, is_first: bool
) -> None:
    step, net = step_with(loss_fn)
    if not is_first:
        step(torch.ones(4, 2), torch.tensor([0, 1, 2, 1]))
    before = net.weight.detach().clone()
    with pytest.raises(DataError, match=message):
        step(torch.ones(4, 2), labels)
    assert torch.equal(net.weight, before)


def test_labels_that_the_loss_takes_are_left_alone() -> None:
    for loss_fn, target in (
        (nn.CrossEntropyLoss(ignore_index=9), torch.tensor([0, 9, 2, 9])),
        (F.cross_entropy, torch.tensor([0, -100, 2, 1])),
        (F.cross_entropy, torch.full((4, 3), 1 / 3)),
        (F.cross_entropy, torch.tensor([0, 1, 2, 1], dtype=torch.uint8)),
        (F.mse_loss, torch.ones(4, 3)),
    ):
        assert step_with(loss_fn)[0](torch.ones(4, 2), target).loss.isfinite()


def test_a_model_names_the_label_that_is_no_class_and_takes_columns_of_labels() -> None:
    def trained(labels: torch.Tensor) -> None:
        net = nn.Linear(2, 3)
        model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))
        model.train(1, (torch.ones(4, 2), labels), batch_size=4, shuffle=False)

    trained(torch.tensor([[0], [1], [2], [1]], dtype=torch.int32))
    with pytest.raises(DataError, match=OUTSIDE):
        trained(torch.tensor([[0], [1], [2], [7]], dtype=torch.int32))
