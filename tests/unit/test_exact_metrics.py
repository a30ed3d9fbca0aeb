"""Metrics of all rows, against scikit-learn and torchmetrics; sums against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import sklearn.metrics as reference
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics.base import AllRanks
from phalanx.train.metrics.exact_sum import ExactSum, quotient


def evaluated(outputs: Tensor, targets: Tensor, metrics: Any, batch_size: int = 7) -> dict[str, Any]:
    return px.evaluate(nn.Identity(), (outputs, targets), metrics, batch_size=batch_size)


def scored(rows: int = 53, classes: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=generator)
    # Of few different values, so that scores are tied.
    return torch.randint(6, (rows, classes), generator=generator) / 4 + torch.eye(classes)[labels] / 2, labels


@settings(max_examples=50)
@given(st.lists(st.floats(width=64), max_size=30), st.randoms())
def test_sums_are_exact_in_any_order(values: list[float], random: Any) -> None:
    first, second = ExactSum(), ExactSum()
    first.add(torch.tensor(values, dtype=torch.float64))
    random.shuffle(values)
    for value in values:
        second.add(torch.tensor(value, dtype=torch.float64))
    assert torch.equal(first.total, second.total)
    found = ExactSum.value(first.total)
    if all(map(math.isfinite, values)):
        assert found == sum(map(Fraction, values))
    else:
        specials = {value for value in values if math.isinf(value)}
        assert str(found) == str(math.nan if any(map(math.isnan, values)) or len(specials) == 2 else specials.pop())


def test_numbers_that_cancel_in_floating_point_add_up() -> None:
    total = ExactSum()
    total.add(torch.tensor([1e300, 1.0, -1e300, 2.0**-1074], dtype=torch.float64))
    assert ExactSum.value(total.total) == 1 + Fraction(2.0**-1074)
    assert quotient(Fraction(1), 3) == 1 / 3
    assert math.isnan(quotient(Fraction(1), 0))


@pytest.mark.parametrize("average", ["micro", "macro", "weighted"])
@pytest.mark.parametrize("classes", [2, 4])
def test_precision_recall_and_f1_are_those_of_scikit_learn(average: Any, classes: int) -> None:
    out, labels = scored(classes=classes)
    predicted = out.argmax(1)
    found = evaluated(out, labels, [f"{name}_{average}" for name in ("precision", "recall", "f1")])
    expected = reference.precision_recall_fscore_support(labels, predicted, average=average, zero_division=0)[:3]
    assert list(found.values()) == pytest.approx(expected, rel=1e-12)


def test_two_classes_are_binary_by_one_score_or_two() -> None:
    out, labels = scored(classes=2)
    expected = reference.f1_score(labels, out.argmax(1))
    assert evaluated(out, labels, "f1")["f1"] == pytest.approx(expected, rel=1e-12)
    margin = out[:, 1:] - out[:, :1]
    assert evaluated(margin, labels.unsqueeze(1), px.F1(threshold=0.0))["F1"] == pytest.approx(expected, rel=1e-12)
    assert evaluated(out.argmax(1), labels, px.F1(classes=2))["F1"] == pytest.approx(expected, rel=1e-12)


def test_a_class_nobody_is_of_or_predicted_does_not_count_in_the_mean() -> None:
    out, labels = torch.eye(5)[torch.tensor([0, 1, 1, 2])], torch.tensor([0, 1, 2, 2])
    expected = reference.f1_score(labels, out.argmax(1), average="macro")
    assert evaluated(out, labels, "f1")["f1"] == pytest.approx(expected, rel=1e-12)


def test_the_confusion_matrix_is_that_of_scikit_learn_and_prints_as_a_table() -> None:
    out, labels = scored(classes=3)
    found = evaluated(out, labels, px.ConfusionMatrix(names=["cat", "dog", "owl"]))["ConfusionMatrix"]
    assert found.counts.tolist() == reference.confusion_matrix(labels, out.argmax(1)).tolist()
    assert found.accuracy == reference.accuracy_score(labels, out.argmax(1))
    lines = str(found).splitlines()
    assert lines[0].strip() == f"53 rows, accuracy {found.accuracy:.4f}"
    row = next(line for line in lines if "cat" in line and "recall" not in line)
    assert [cell.strip() for cell in row.strip("│┃").split("│")][1:4] == [str(n) for n in found.counts[0].tolist()]
    assert any("precision" in line for line in lines)


@pytest.mark.parametrize("shape", ["one", "column", "two"])
def test_auc_is_exact_where_scores_are_tied(shape: str) -> None:
    out, labels = scored(rows=211, classes=2)
    score = (out[:, 1] - out[:, 0]).sigmoid()
    given = {"one": score, "column": score.unsqueeze(1), "two": out}[shape]
    assert len(score.unique()) < 30
    assert evaluated(given, labels, "auc")["auc"] == pytest.approx(reference.roc_auc_score(labels, score), rel=1e-12)


def test_auc_of_bins_is_near_and_needs_no_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(2, (5000,), generator=generator)
    score = (torch.randn(5000, generator=generator) + labels).sigmoid()
    found = evaluated(score, labels, {"auc": px.AUC(bins=65536), "coarse": px.AUC(bins=16)}, batch_size=512)
    expected = reference.roc_auc_score(labels, score)
    assert found["auc"] == pytest.approx(expected, abs=1e-5)
    assert found["coarse"] == pytest.approx(expected, abs=1e-2)


def test_auc_without_one_of_the_labels_is_no_number() -> None:
    assert math.isnan(evaluated(torch.rand(5), torch.ones(5), "auc")["auc"])


@pytest.mark.parametrize("far", [0.0, 1e6])
def test_regression_is_that_of_scikit_learn(far: float) -> None:
    generator = torch.Generator().manual_seed(4)
    wanted = torch.randn(61, 1, generator=generator) + far
    out = wanted + torch.randn(61, 1, generator=generator) / 2
    found = evaluated(out, wanted.squeeze(1), ["mae", "mse", "rmse", "r2"])
    true, guess = wanted.double().numpy(), out.double().numpy()
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(true, guess), rel=1e-12)
    assert found["mse"] == pytest.approx(reference.mean_squared_error(true, guess), rel=1e-12)
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(true, guess), rel=1e-12)
    assert found["r2"] == pytest.approx(reference.r2_score(true, guess), rel=1e-9)


def test_r2_of_equal_targets_is_that_of_scikit_learn() -> None:
    for out in (torch.full((4,), 2.0), torch.tensor([2.0, 2.0, 2.0, 3.0])):
        wanted = torch.full((4,), 2.0)
        assert evaluated(out, wanted, "r2")["r2"] == reference.r2_score(wanted, out)
    assert math.isnan(evaluated(torch.tensor([1.0]), torch.tensor([1.0]), "r2")["r2"])


def test_torchmetrics_objects_are_taken() -> None:
    out, labels = scored()
    metrics = {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(4, average="micro"),
        "matrix": torchmetrics.classification.MulticlassConfusionMatrix(4),
        "auroc": torchmetrics.classification.MulticlassAUROC(4),
    }
    found = evaluated(out, labels, metrics)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(labels, out.argmax(1)))
    assert found["matrix"].tolist() == reference.confusion_matrix(labels, out.argmax(1)).tolist()
    assert found["auroc"] == torchmetrics.classification.MulticlassAUROC(4)(out, labels).item()
    pair = torchmetrics.MetricCollection(
        [torchmetrics.classification.MulticlassF1Score(4), torchmetrics.classification.MulticlassRecall(4)]
    )
    assert set(evaluated(out, labels, pair)) == {"MulticlassF1Score", "MulticlassRecall"}


class Hits:
    """A metric as users write one."""

    def reset(self) -> None:
        self.hits = torch.zeros((), dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.hits += (output.argmax(1) == target).sum()

    def compute(self, ranks: AllRanks) -> int:
        return int(ranks.sum(self.hits))


def test_an_object_of_the_user_starts_anew_each_time() -> None:
    out, labels = scored()
    hits = Hits()
    for _ in range(2):
        assert evaluated(out, labels, hits) == {"Hits": int((out.argmax(1) == labels).sum())}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ("accuracy", r"the metric 'accuracy'; known by name are .*Did you mean 'acc1'\?"),
        ("f1_makro", r"the metric 'f1_makro'; known by name are .*Did you mean 'f1_macro'\?"),
        (px.F1, r"'F1', which is a class\. Make one: F1\(\)"),
        ([3], "found int. Give a name, a function"),
        ([Hits(), Hits()], "two metrics called 'Hits'"),
        (px.F1("binary"), "'binary' for 2 classes, found 4"),
        (px.ConfusionMatrix(3), "Asked for 3 classes, and outputs have scores of 4"),
        ("auc", r"AUC of outputs of shape \(7, 4\)"),
        ("mae", r"predictions of shape \(7, 4\) for targets of shape \(7,\)"),
    ],
)
def test_what_cannot_be_computed_is_said(metrics: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        evaluated(*scored(), metrics)


@pytest.mark.parametrize(
    ("out", "labels", "metric", "told"),
    [
        (torch.eye(3), torch.tensor([0, 3, 1]), "f1", "The label of row 1 of a batch is 3, and there are 3 classes"),
        (torch.rand(3), torch.tensor([0, 2, 1]), "auc", r"The label of row 1 of a batch is 2\. Give 0 or 1"),
        (torch.tensor([0.1, math.nan]), torch.tensor([0, 1]), "auc", "The score of row 1 of a batch is nan"),
        (torch.tensor([0.1, 1.5]), torch.tensor([0, 1]), px.AUC(bins=8), r"is 1\.5.* Give probabilities"),
    ],
)
def test_data_that_cannot_be_right_is_named(out: Tensor, labels: Tensor, metric: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        evaluated(out, labels, metric)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: px.F1("makro"), "knows the averages binary, micro, macro, weighted, found 'makro'"),
        (lambda: px.ConfusionMatrix(1), "tell 1 classes apart"),
        (lambda: px.ConfusionMatrix(3, names=["a", "b"]), "3 classes with 2 names"),
        (lambda: px.AUC(bins=1), "at least 2 bins, found 1"),
    ],
)
def test_wrong_settings_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_fractions_as_labels_lead_to_metrics_of_numbers() -> None:
    with pytest.raises(ConfigError, match=r"found fractions\. For regression use MAE"):
        evaluated(torch.eye(2), torch.tensor([0.5, 1.0]), "f1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_gives_the_bits_of_the_cpu() -> None:
    out, labels = scored(rows=211, classes=2)
    for make in (px.AUC, px.F1, px.MSE, px.R2, px.ConfusionMatrix, partial(px.AUC, bins=8)):
        score = out.softmax(1)[:, 1]
        values = []
        for device in ("cpu", "cuda"):
            metric = make()
            metric.update(score.to(device), labels.to(device))
            values.append(repr(metric.compute(AllRanks())))
        assert values[0] == values[1]
