from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from phalanx.comm import context
from phalanx.comm.context import BatchShare
from phalanx.data import ShardedLoader
from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics.accuracy import accuracy, correct_at, topk_correct
from phalanx.train.metrics.base import global_mean, sample_values
from phalanx.train.model.evaluate import evaluate

scores = arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 7)),
    elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0, np.inf, np.nan]),
)


@given(out=scores, k=st.integers(1, 9), data=st.data())
def test_top_k_is_what_a_stable_sort_of_the_negated_scores_says(out: np.ndarray, k: int, data: st.DataObject) -> None:
    label = data.draw(arrays(np.int64, len(out), elements=st.integers(0, out.shape[1] - 1)))
    best = np.argsort(-out, axis=1, kind="stable")[:, :k]
    expected = (best == label[:, None]).any(1)
    assert topk_correct(torch.from_numpy(out), torch.from_numpy(label), k).tolist() == expected.tolist()


def test_fewer_classes_than_k_makes_every_row_a_hit() -> None:
    assert accuracy(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), k=5) == 1.0


def test_labels_may_be_a_column() -> None:
    out = torch.eye(3)
    assert accuracy(out, torch.tensor([[0], [1], [1]])) == pytest.approx(2 / 3)
    assert accuracy(out, torch.tensor([[0], [1], [1]], dtype=torch.int32)).dtype == torch.float32


def test_padded_rows_do_not_count() -> None:
    context.init().batch = BatchShare(rows=0, global_rows=1)
    assert accuracy(torch.eye(2), torch.tensor([0, 1])).isnan()
    assert global_mean(torch.tensor(float("nan"))) == 0


def test_a_mean_weighs_as_its_rows() -> None:
    assert global_mean(torch.tensor(3.0)) == 3.0
    context.init()
    assert global_mean(torch.tensor(3.0, requires_grad=True)) == 3.0
    context.current().batch = BatchShare(rows=1, global_rows=4)
    assert global_mean(torch.tensor(3.0)) == 0.75


@pytest.mark.parametrize(
    ("out", "label", "k", "message"),
    [
        (torch.ones(3), torch.ones(3).long(), 1, r"scores of shape \(3,\). Give \(rows, classes\)"),
        (torch.ones(3, 2), torch.ones(2).long(), 1, r"3 rows of scores with labels of shape \(2,\)"),
        (torch.ones(3, 2), torch.ones(3), 1, "labels of type torch.float32. Give whole numbers"),
        (torch.ones(3, 2), torch.ones(3).long(), 0, "Asked for the top 0 classes"),
    ],
)
def test_what_does_not_fit_is_named(out: Tensor, label: Tensor, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accuracy(out, label, k)


def test_a_metric_of_the_top_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="Asked for the top 0 classes"):
        correct_at(0)


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_outside_the_classes_is_named(label: int) -> None:
    with pytest.raises(DataError, match=f"The label of row 1 is {label}, but the scores have 10 classes"):
        accuracy(torch.ones(2, 10), torch.tensor([3, label]))


def _data(rows: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)


def test_evaluation_is_the_mean_over_all_rows() -> None:
    model, (x, y) = nn.Linear(4, 3), _data()
    found = evaluate(model, (x, y), ["acc1", "loss"], loss_fn=nn.functional.cross_entropy, batch_size=5)
    assert found["acc1"] == (model(x).argmax(1) == y).double().mean().item()
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)


def test_metrics_may_be_functions_per_row_or_per_batch() -> None:
    def mean_square(out: Tensor, _: Tensor) -> Tensor:
        return out.square().mean()

    model, (x, y) = nn.Linear(4, 3), _data()
    named = {"first": lambda out, _: out[:, :1], "acc2": correct_at(2), "five": "acc5"}
    found = evaluate(model, (x, y), named, batch_size=5)
    assert found["first"] == pytest.approx(model(x)[:, 0].mean().item(), rel=1e-5)
    assert found["five"] == 1.0
    assert evaluate(model, (x, y), [mean_square])["mean_square"] == pytest.approx(model(x).square().mean().item())


def test_a_shuffled_loader_that_drops_rows_is_evaluated_whole() -> None:
    model, (x, y) = nn.Linear(4, 3), _data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 5, shuffle=True, drop_last=True)
    assert evaluate(model, loader) == evaluate(model, (x, y))


def test_other_batches_take_a_forward_of_their_own() -> None:
    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.ones(4) * index, "of": {"y": torch.tensor(index)}, "z": torch.zeros(())}

    model = nn.Linear(4, 3)
    with pytest.raises(ConfigError, match=r"Linear takes \(input\), and the batch has 2 inputs beside the target"):
        evaluate(model, Rows())
    found = evaluate(model, Rows(), ["acc3"], forward=lambda net, batch: (net(batch["x"]), batch["of"]["y"]))
    assert found == {"acc3": 1.0}


def test_every_module_returns_to_its_own_mode_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    model[1].eval()
    modes = []
    model[1].register_forward_hook(lambda module, *_: modes.append((model.training, torch.is_grad_enabled())))
    evaluate(model, _data())
    assert modes == [(False, False)]
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    with pytest.raises(ConfigError, match="Metric 'wide' returned shape"):
        evaluate(model, _data(), {"wide": lambda out, _: out})
    assert model.training


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["acc"], r"Asked for the metric 'acc'.* Did you mean 'acc1'"),
        (["loss"], r"without loss_fn a net returns its loss.*found a tensor of shape \(13, 3\).*or pass loss_fn="),
        ({"n": lambda out, _: 3}, "Metric 'n' returned int for 13 rows"),
    ],
)
def test_metrics_that_cannot_be_computed_are_named(metrics: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(nn.Linear(4, 3), _data(), metrics)  # type: ignore[arg-type]


def test_a_training_loader_is_not_evaluated_on() -> None:
    with pytest.raises(ConfigError, match="a ShardedLoader that trains or drops rows"):
        evaluate(nn.Linear(4, 3), ShardedLoader(_data(), batch_size=2))


def test_data_without_rows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="evaluate on data without rows"):
        evaluate(nn.Linear(4, 3), lambda: iter(()))


def test_sums_are_whole_where_the_metric_is() -> None:
    hits = torch.tensor([True, False, True])
    assert sample_values("acc1", hits, 3).dtype == torch.int64
    assert sample_values("acc1", hits, 3).sum() == 2
    assert sample_values("loss", torch.tensor(2.0), 3) == 6.0


def test_progress_is_told_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    monkeypatch.setattr("phalanx.train.model.evaluate.PROGRESS_EVERY_S", -1.0)
    caplog.set_level("INFO", logger="phalanx.train")
    evaluate(nn.Linear(4, 3), _data(), batch_size=5)
    assert "Evaluating: 2 of 3 batches done" in caplog.text
