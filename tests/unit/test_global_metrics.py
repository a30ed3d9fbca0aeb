"""Metrics from each worker's counts; over several workers in tests/dist/test_global_metrics.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics import fleet
from phalanx.train.metrics.fleet import AUC_BINS, Auc


def exact_auc(score: np.ndarray, label: np.ndarray) -> float:
    """Pairs of a positive and a negative row that are in the right order; half a win for equal scores."""
    positive, negative = score[label == 1][:, None], score[label == 0][None]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


@settings(max_examples=30)  # each example fills two histograms of 65,536 bins
@given(
    rows=st.lists(st.tuples(st.integers(0, AUC_BINS - 1), st.booleans()), min_size=2, max_size=40).filter(
        lambda rows: len({label for _, label in rows}) == 2
    )
)
def test_the_auc_is_exact_when_scores_are_a_bin_apart(rows: list[tuple[int, bool]]) -> None:
    score, label = np.array([r[0] for r in rows]) / AUC_BINS, np.array([r[1] for r in rows]).astype(np.int64)
    auc = Auc()
    auc.update(torch.from_numpy(score), torch.from_numpy(label))
    assert auc.compute() == pytest.approx(exact_auc(score, label), abs=1e-12)


def test_the_auc_of_a_model_equals_scikit_learns_to_its_bin() -> None:
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    label = torch.rand(20_000, generator=generator) < 0.2
    score = (torch.randn(20_000, generator=generator) + label.float()).sigmoid()
    auc = Auc()
    for part in range(4):
        auc.update(score[part::4, None], label[part::4, None].float())
    assert auc.compute() == pytest.approx(roc_auc_score(label.numpy(), score.numpy()), abs=1e-5)


def test_scores_at_both_ends_are_counted() -> None:
    auc = Auc()
    auc.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    assert (auc.negative[0], auc.positive[-1], auc.compute()) == (1, 1, 1.0)


def test_one_label_alone_has_no_auc() -> None:
    assert math.isnan(fleet.auc([1, 2], [0, 0]))


def test_counts_become_means() -> None:
    assert fleet.acc(3, 4) == 0.75
    assert fleet.acc(torch.tensor([True, False]), 2) == 0.5
    assert fleet.mae(np.array([1.0, 2.0]), 6) == 0.5
    assert fleet.mse(8.0, 2) == 4.0
    assert fleet.rmse(torch.tensor(8.0, requires_grad=True), 2) == 2.0
    assert math.isnan(fleet.acc(0, 0))


def test_numbers_arrays_and_tensors_keep_their_shape() -> None:
    assert fleet.sum(3).item() == 3
    assert fleet.max(np.array([[1, 2]], np.int32)).tolist() == [[1, 2]]
    assert fleet.min(torch.tensor([0.5])).dtype == torch.float64


def test_what_is_no_probability_or_label_is_named() -> None:
    with pytest.raises(
        DataError, match=r"The score of row 1 of a batch is 1.5. Give probabilities, such as logits.sigmoid\(\)"
    ):
        Auc().update(torch.tensor([0.5, 1.5]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="The score of row 0 of a batch is nan"):
        Auc().update(torch.tensor([math.nan]), torch.tensor([0]))
    with pytest.raises(DataError, match=r"The label of row 0 of a batch is 2\. Give 0 or 1"):
        Auc().update(torch.tensor([0.5]), torch.tensor([2]))
    with pytest.raises(ConfigError, match="2 scores with 1 labels"):
        Auc().update(torch.tensor([0.5, 0.5]), torch.tensor([1]))
    with pytest.raises(ConfigError, match=r"histograms of shapes \(2,\) and \(3,\)"):
        fleet.auc([1, 2], [1, 2, 3])
