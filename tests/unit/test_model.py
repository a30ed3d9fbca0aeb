"""`px.Model` in one process: what it takes, what it makes of batches, how it continues, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx as px
from phalanx import fleet
from phalanx.data import ShardedLoader
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.session import applied_to
from phalanx.train.callbacks import progress
from phalanx.train.callbacks.run import Run

ROWS, CLASSES = 50, 5


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, CLASSES))


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def model(net: nn.Module | None = None, loss_fn: Any = F.cross_entropy, **settings: Any) -> px.Model:
    net = small() if net is None else net
    return px.Model(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), **settings)


class Losses(px.Callback):
    """Keeps the loss of every update, and where `on_step_end` came."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.losses: list[Tensor] = []
        self.ends: list[int] = []
        self.stop_at = stop_at

    def on_update(self, run: Run) -> None:
        assert run.loss is not None
        self.losses.append(run.loss)

    def on_step_end(self, run: Run) -> None:
        self.ends.append(run.step)
        if self.stop_at is not None and run.step >= self.stop_at:
            run.stop("seen enough")


def trained(dataset: Any = None, epochs: int = 2, **options: Any) -> tuple[list[float], list[int]]:
    seen = Losses()
    made = options.pop("model", None) or model()
    torch.manual_seed(3)
    made.train(epochs, data() if dataset is None else dataset, callbacks=[seen], **options)
    return [loss.item() for loss in seen.losses], seen.ends


# -- training ----------------------------------------------------------------------------------------------------------


def test_it_trains_as_the_loop_written_by_hand() -> None:
    net, (x, y) = small(), data()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    loader = ShardedLoader((x, y), batch_size=8)
    torch.manual_seed(3)
    by_hand = []
    for _ in range(2):
        for image, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(image), label)
            loss.backward()
            optimizer.step()
            by_hand.append(loss.item())
    assert trained(batch_size=8)[0] == by_hand


@pytest.mark.parametrize(("sink_size", "ends"), [(-1, [7, 14]), (3, [3, 6, 7, 10, 13, 14]), (100, [7, 14])])
def test_sinks_give_the_same_losses_bit_for_bit_and_fewer_edges(sink_size: int, ends: list[int]) -> None:
    plain, every = trained(batch_size=8)
    assert every == list(range(1, 15))
    assert trained(batch_size=8, dataset_sink_mode=True, sink_size=sink_size) == (plain, ends)


def test_a_sink_never_asks_for_a_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, real=real, name=name: asked.append(name) or real(self))
    seen = Losses()
    model().train(1, data(), [seen], dataset_sink_mode=True, sink_size=3, batch_size=8)
    in_sinks = list(asked)
    asked.clear()
    model().train(1, data(), [px.LossMonitor(1)], batch_size=8)
    assert not in_sinks
    assert len(asked) == 7


def test_a_pipelines_repeat_does_not_lengthen_an_epoch() -> None:
    dataset = Pipeline(TensorDataset(*data())).batch(8, drop_remainder=True)
    assert dataset.get_dataset_size() == 6
    once, _ = trained(dataset)
    assert len(once) == 12
    assert trained(dataset.repeat(10))[0] == once


def test_any_kind_of_data_gives_the_same_losses() -> None:
    expected = trained(batch_size=8, shuffle=False)[0]
    x, y = data()
    assert trained(TensorDataset(x, y), batch_size=8, shuffle=False)[0] == expected
    assert trained(DataLoader(TensorDataset(x, y), batch_size=8))[0] == expected
    assert trained(ShardedLoader((x, y), batch_size=8, shuffle=False))[0] == expected
    assert trained(lambda: zip(x, y, strict=True), batch_size=8)[0] == expected


def test_a_stream_without_a_length_is_one_sink_an_epoch() -> None:
    x, y = data()
    assert trained(lambda: zip(x, y, strict=True), batch_size=8, dataset_sink_mode=True)[1] == [7, 14]


def test_a_model_trains_on_for_as_many_passes_as_it_is_told() -> None:
    made, loader = model(), ShardedLoader(data(), batch_size=8)
    first = trained(loader, 2, model=made)[0]
    assert len(first) == 14
    assert len(trained(loader, 1, model=made)[0]) == 7
    assert loader.epoch == 3


def test_gradient_merge_counts_updates_and_sinks_end_with_the_epoch() -> None:
    strategy = px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    losses, ends = trained(model=model(strategy=strategy), batch_size=8, dataset_sink_mode=True, sink_size=2)
    assert len(losses) == 7
    assert ends == [2, 3, 5, 7]


def test_whether_steps_are_compiled_is_an_argument() -> None:
    made = model(compiled=False, strategy=px.DistributedStrategy(graph=True))
    assert trained(model=made, batch_size=8)[0] == trained(batch_size=8)[0]


def test_the_run_comes_back() -> None:
    run = model(metrics=["acc1"]).fit(3, data(), [Losses(stop_at=5)], valid_dataset=data(), batch_size=10)
    assert (run.step, run.stop_reason) == (5, "seen enough")
    run = model(metrics=["acc1"]).fit(1, data(), valid_dataset=data(), batch_size=10)
    assert set(run.metrics) == {"acc1", "loss"}
    assert run.train_s > 0 == run.compile_s


def test_a_net_that_was_put_in_evaluation_mode_trains_again() -> None:
    made = model()
    made.net.eval()
    made.train(1, data(), batch_size=10)
    made.eval(data())
    assert made.net.training


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [{}, {"dataset_sink_mode": True, "sink_size": 2}])
def test_a_resumed_run_goes_on_inside_the_epoch_exactly(tmp_path: Path, sink: dict[str, Any]) -> None:
    whole, _ = trained(batch_size=8, epochs=3, **sink)
    seen = Losses(stop_at=10)
    made = model()
    torch.manual_seed(3)
    run = made.train(3, data(), [seen, px.ModelCheckpoint(tmp_path)], batch_size=8, **sink)
    # In sinks of 2 the 10th step is no edge: 7 batches are sinks of 2, 2, 2 and 1.
    done = run.step
    assert 10 <= done < 21
    again = Losses()
    run = model(small(9)).train(3, data(), [again, px.ModelCheckpoint(tmp_path)], batch_size=8, resume=True, **sink)
    assert run.step == 21
    assert [loss.item() for loss in (*seen.losses, *again.losses)] == whole


def test_a_run_that_ended_at_the_last_batch_of_an_epoch_still_evaluates_it(tmp_path: Path) -> None:
    model().train(2, data(), [Losses(stop_at=7), px.ModelCheckpoint(tmp_path)], batch_size=8, dataset_sink_mode=True)
    evaluated: list[int] = []

    class Seen(px.Callback):
        def on_eval_end(self, run: Run) -> None:
            evaluated.append(run.epoch)

    run = model().train(2, data(), [Seen()], batch_size=8, resume=tmp_path, valid_dataset=data())
    assert evaluated == [0, 1]
    assert run.step == 14


def test_a_folder_without_checkpoints_is_a_start(tmp_path: Path) -> None:
    assert model().train(1, data(), batch_size=10, resume=tmp_path / "none").resumed_from is None


def test_a_resumed_run_with_nothing_left_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = px.ModelCheckpoint(tmp_path, background=False)
    model().train(2, data(), saver, batch_size=10)
    run = model().train(2, data(), batch_size=10, resume=tmp_path)
    assert run.step == 10
    assert "has made 2 passes of the 2 asked for: nothing is left to train" in caplog.text


# -- batches -----------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Samples made by a function of (x, y)."""

    def __init__(self, of: Any) -> None:
        self.x, self.y = data()
        self.of = of

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.of(self.x[row], self.y[row])


class Sum(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.inner(first + second)


class WithLoss(nn.Module):
    """Takes the target too and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), y)


@pytest.mark.parametrize(
    "of",
    [
        lambda x, y: {"image": x, "label": y},
        lambda x, y: {"label": y, "image": x},
        lambda x, y: {"a": x, "b": y},
        lambda x, y: {"input": x, "y": y},
        lambda x, y: (x, y.reshape(1)),
        lambda x, y: (x, y.int()),
    ],
)
def test_batches_by_column_and_labels_of_other_shapes_are_taken(of: Any) -> None:
    made = model(metrics=["acc1"])
    assert trained(Rows(of), batch_size=8, model=made)[0] == trained(batch_size=8)[0]
    assert made.eval(Rows(of)).keys() == {"acc1", "loss"}
    assert made.predict(Rows(of)).shape == (ROWS, CLASSES)


def test_several_inputs_and_a_net_that_returns_its_loss() -> None:
    expected = trained(batch_size=8)[0]
    halves = Rows(lambda x, y: (x / 2, x / 2, y))
    assert trained(halves, batch_size=8, model=model(Sum()))[0] == expected
    assert trained(batch_size=8, model=model(WithLoss(), None))[0] == expected
    made = model(Sum(), metrics=["acc1"])
    x, y = data()
    assert made.eval(halves)["acc1"] == made.eval(TensorDataset(x, torch.zeros_like(x), y))["acc1"]
    assert made.predict(x[:3], x[:3]).shape == (3, CLASSES)
    assert torch.equal(made.predict(TensorDataset(x / 2, x / 2)), made.predict(halves))


@pytest.mark.parametrize(
    ("net", "loss_fn", "dataset", "message"),
    [
        (
            None,
            F.cross_entropy,
            (torch.zeros(9, 6),),
            r"a batch is \(input, ..., target\), found 1 column\. Let the data yield the target too, leave loss_fn out",
        ),
        (
            Sum(),
            F.cross_entropy,
            data(),
            r"Sum takes \(first, second\), and the batch has 1 input beside",
        ),
        (WithLoss(), None, (torch.zeros(9, 6),), r"WithLoss takes \(x, y\), and the batch has 1 input\."),
        (None, nn.CrossEntropyLoss(reduction="none"), data(), r"loss_fn returned shape \(8,\). Return the mean"),
        (None, lambda output, target: 1.0, data(), "loss_fn returned float. Return the mean"),
        (None, F.cross_entropy, (torch.zeros(0, 6), torch.zeros(0)), "The training data has no batch"),
        (None, F.cross_entropy, None, "Model.train needs data, found None"),
    ],
)
def test_data_that_does_not_fit_is_named(net: Any, loss_fn: Any, dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(net, loss_fn).train(1, dataset, batch_size=8)


def test_a_column_of_another_type_than_the_net_is_named() -> None:
    x, y = (part.numpy() for part in data())
    wide, told = (x.astype("float64"), y), r"column {} of the batch is {} and Sequential computes in float32, which .* "
    piped = Pipeline(wide, ["image", "label"]).batch(8)
    conv = nn.Sequential(nn.Conv1d(1, 1, 2), nn.Flatten(), nn.Linear(5, CLASSES))
    for name, dtype, call in (
        ("0", "float64", lambda: model().train(1, wide, batch_size=8)),
        ("0", "float64", lambda: model().eval(wide)),
        ("0", "float64", lambda: model().predict(wide[0])),
        ("'image'", "float64", lambda: model().train(1, piped)),
        ("'image'", "float64", lambda: model().eval(piped)),
        ("'image'", "float64", lambda: model().predict(piped)),
        ("0", "uint8", lambda: model().train(1, (x.astype("uint8"), y), batch_size=8)),
        ("0", "float64", lambda: model(conv).train(1, (wide[0][:, None], y), batch_size=8)),
    ):
        with pytest.raises(ConfigError, match=told.format(name, dtype) + r"Convert it .*astype\('float32'\).*TypeCast"):
            call()
    fits = piped.map(px.data.vision.TypeCast("float32"), "image")
    assert model().train(1, fits).step == 7
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model().train(1, (x[:, :5], y), batch_size=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callback": []}, r"Model\.train has no argument 'callback'\. Did you mean 'callbacks'"),
        ({"validation_data": data()}, r"Model\.train has no argument 'validation_data'\. Did you mean 'valid_dataset'"),
        ({"globalbatch": 8}, "has no argument 'globalbatch'. Did you mean 'global_batch'"),
        (
            {"callbacks": px.EarlyStopping("acc1")},
            "EarlyStopping follows an evaluation, and training was asked for none",
        ),
        ({"callbacks": px.ModelCheckpoint("runs", best="acc1")}, "ModelCheckpoint follows an evaluation"),
        ({"callbacks": px.LearningRateSchedule(print, monitor="loss")}, "LearningRateSchedule follows an evaluation"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model().train(1, data(), **options)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), F.l1_loss, nn.BCEWithLogitsLoss()])
def test_one_number_a_row_meets_its_own_row(loss_fn: Any) -> None:
    x, y = data()[0], torch.rand(ROWS)
    made = model(nn.Linear(6, 1), loss_fn)
    expected = float(loss_fn(made.net(x).detach().squeeze(1), y))
    for target in (y, y[:, None]):
        assert made.eval((x, target), batch_size=ROWS)["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("metrics", "valid", "message"),
    [
        (["accuracy"], data(), "the metric 'accuracy'"),
        (["acc1"], "digits", "Asked to load from a str"),
        (["acc1"], ShardedLoader(data(), batch_size=8), "evaluate on a ShardedLoader that trains"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_training(metrics: Any, valid: Any, message: str) -> None:
    seen = Losses()
    with pytest.raises(ConfigError, match=message):
        model(metrics=metrics).train(1, data(), seen, batch_size=8, valid_dataset=valid)
    assert seen.losses == []


class AtStep(px.Callback):
    """Does something with the Model at the end of every step."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def on_step_end(self, run: Run) -> None:
        self._act()


def test_a_callback_may_evaluate_and_predict_and_nothing_of_the_run_changes() -> None:
    made, seen, scores = model(metrics=["acc1"]), Losses(), []
    x, y = data()

    def look() -> None:
        scores.append(made.eval(DataLoader(TensorDataset(x, y), 7, shuffle=True))["acc1"])
        made.predict((x, y))
        made.predict(x[:2])

    torch.manual_seed(3)
    run = made.train(2, (x, y), [AtStep(look), seen], batch_size=8)
    assert [loss.item() for loss in seen.losses] == trained(batch_size=8)[0]
    assert (run.samples, len(scores), made.net.training) == (2 * ROWS, 14, True)


def test_training_inside_training_is_refused_and_may_follow() -> None:
    made = model()
    inside = AtStep(lambda: made.train(1, data(), batch_size=8))
    with pytest.raises(ConfigError, match=r"Model\.train was called while this Model trains, by one of its callbacks"):
        made.train(1, data(), inside, batch_size=8)
    assert made.train(1, data(), batch_size=8).step == 7


def test_a_model_says_what_it_is() -> None:
    made = model(parallel_mode="DATA_PARALLEL")
    assert repr(made) == (
        "Model(Sequential of 101 parameters, loss cross_entropy, SGD, DATA_PARALLEL, not distributed yet)"
    )
    made.eval(data())
    assert repr(made) == "Model(Sequential of 101 parameters, loss cross_entropy, SGD, DATA_PARALLEL, on 1 rank)"
    assert repr(px.Model(made.net, nn.CrossEntropyLoss())) == (
        "Model(Sequential of 101 parameters on this rank, loss CrossEntropyLoss, no optimizer, on 1 rank)"
    )
    assert repr(px.Model(WithLoss())).startswith("Model(WithLoss of ")


@pytest.mark.parametrize(
    "callback",
    [
        px.EarlyStopping("acc"),
        px.ModelCheckpoint("nowhere", best="acc"),
        px.LearningRateSchedule(lambda optimizer: ReduceLROnPlateau(optimizer), monitor="acc"),
    ],
)
def test_a_misspelt_metric_to_follow_is_refused_before_training(callback: px.Callback) -> None:
    seen = Losses()
    told = rf"{type(callback).__name__} follows the metric 'acc', and the evaluation gives acc1, loss\. Did you mean"
    with pytest.raises(ConfigError, match=told):
        model(metrics=["acc1"]).train(1, data(), [seen, callback], batch_size=8, valid_dataset=data())
    assert seen.losses == []


def test_momentum_and_l2_decay_are_those_of_the_formula_and_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    x, y = data(40)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES)).double()
    net[0].requires_grad_(False)
    frozen, w, b = (p.detach().numpy().copy() for p in (net[0].weight, net[1].weight, net[1].bias))
    inputs, velocity = net[0](x.double()).detach().numpy(), [np.zeros_like(w), np.zeros_like(b)]
    trained = filter(lambda p: p.requires_grad, net.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4)
    px.Model(net, F.cross_entropy, optimizer).train(10, (x.double(), y), batch_size=20, shuffle=False)
    for step in range(20):
        rows = slice(20 * (step % 2), 20 * (step % 2) + 20)
        scores = np.exp(inputs[rows] @ w.T + b)
        error = (scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y[rows]]) / 20
        gradients = (error.T @ inputs[rows] + 1e-4 * w, error.sum(0) + 1e-4 * b)
        velocity = [0.9 * v + gradient for v, gradient in zip(velocity, gradients, strict=True)]
        w, b = w - 0.1 * velocity[0], b - 0.1 * velocity[1]
    np.testing.assert_allclose(net[1].weight.detach(), w, atol=1e-6)
    np.testing.assert_allclose(net[1].bias.detach(), b, atol=1e-6)
    np.testing.assert_array_equal(net[0].weight.detach(), frozen)


def test_an_epoch_of_a_stream_in_one_sink_has_one_line(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    x, y = data()
    with caplog.at_level(logging.INFO, "phalanx.train"):
        model().train(1, lambda: zip(x, y, strict=True), px.ProgressBar(), dataset_sink_mode=True, batch_size=8)
    assert sum("samples/s" in record.getMessage() for record in caplog.records) == 1


# -- evaluation and prediction -----------------------------------------------------------------------------------------


def test_eval_before_train_is_exact_and_train_may_follow() -> None:
    made, (x, y) = model(metrics=["acc1"]), data()
    made.net.eval()
    with torch.no_grad():
        loss, hits = F.cross_entropy(made.net(x), y), (made.net(x).argmax(1) == y).sum()
    found = made.eval((x, y), batch_size=7)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert found["acc1"] == hits.item() / ROWS
    assert trained(batch_size=8, model=made)[0] == trained(batch_size=8)[0]


def test_predict_gives_all_rows_in_order() -> None:
    made, (x, y) = model(), data()
    made.net.eval()
    with torch.no_grad():
        expected = made.net(x)
    made.net.train()
    for given in (
        x,
        x.numpy(),
        TensorDataset(x),
        (TensorDataset(x, y)),
        DataLoader(TensorDataset(x, y), 7, shuffle=True),
    ):
        torch.testing.assert_close(made.predict(given), expected)
    torch.testing.assert_close(made.predict(ShardedLoader((x, y), batch_size=7, training=False)), expected)
    assert made.net.training


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ShardedLoader(data(), batch_size=7),), "predict on a ShardedLoader that trains or drops rows"),
        ((TensorDataset(torch.zeros(0, 6)),), "TensorDataset is empty: it has 0 samples"),
        ((), "takes the tensors of one batch, or one dataset; found nothing"),
        ((data(), data()), "found tuple, tuple"),
        ((data()[0], data()[0], data()[0]), r"Sequential takes \(input\), and the batch has 3 inputs"),
    ],
)
def test_predict_says_what_it_cannot_do(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model().predict(*given)


def test_eval_says_when_there_is_nothing_to_compute() -> None:
    with pytest.raises(
        ConfigError, match=r"without loss_fn a net returns its loss, .*found a tensor of shape \(50, 5\)"
    ):
        px.Model(small()).eval(data())


# -- what it is made of ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((nn.Linear,), "found the class Linear. Make one"),
        ((3,), "takes a torch.nn.Module first, found int"),
        ((small(), nn.CrossEntropyLoss), "loss_fn is the class CrossEntropyLoss. Make one: CrossEntropyLoss()"),
        ((small(), "mse"), r"loss_fn is a function of \(output, target\), found str"),
        (
            (small(), lambda output: output),
            r"as loss_fn\(output, target\), and <lambda> takes \(output\). Wrap it",
        ),
        ((small(), None, torch.optim.SGD), "takes a torch optimizer, found the class SGD"),
        ((small(), None, [1]), "takes a torch optimizer, found list"),
        ((small(), None, torch.optim.SGD(small().parameters())), "the optimizer holds no parameter of the Sequential"),
    ],
)
def test_parts_of_another_kind_are_named(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        px.Model(*parts)


def test_a_strategy_and_a_plan_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="takes a strategy or a plan, found both"):
        px.Model(small(), strategy=px.DistributedStrategy(), plan=px.Plan(mesh=()))


def test_models_one_after_the_other_have_strategies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = (
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}},
        {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
        {"ema": True},
        {},
    )
    for settings in strategies:
        made = model(strategy=px.DistributedStrategy(**settings), metrics=["acc1"])
        made.train(1, data(), [Losses()], batch_size=8, valid_dataset=data())
        told = (
            r"while a Sequential that was .* is alive; they differ in .*localsgd.* For models one after the other, let"
        )
        with pytest.raises(StrategyError, match=told):
            model(strategy=px.DistributedStrategy(localsgd=True)).train(1, data(), batch_size=8)
        del made


def test_what_fleet_was_told_holds_for_a_model_that_says_nothing() -> None:
    strategy = px.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    net = small()
    model(net).train(1, data(), global_batch=4)
    made = applied_to(net)
    assert made is not None
    assert made.plan.step.accumulate == 2


def test_a_strategy_for_a_distributed_net_is_too_late() -> None:
    net = small()
    px.distribute(net)
    assert px.Model(net).predict(data()[0]).shape == (ROWS, CLASSES)
    with pytest.raises(ConfigError, match="given a net that is distributed already, and a strategy"):
        px.Model(net, strategy=px.DistributedStrategy()).predict(data()[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 0}, "takes a number of passes over the data first, found 0"),
        ({"epoch": data()}, "takes a number of passes over the data first, found tuple"),
        ({"epoch": "3"}, "takes a number of passes over the data first, found 3"),
        ({"sink_size": 3}, "sink_size=3 needs dataset_sink_mode=True"),
        ({"sink_size": 0, "dataset_sink_mode": True}, "sink_size is a number of steps, or -1 .* found 0"),
        ({"sink_size": True, "dataset_sink_mode": True}, "found True"),
        ({"resume": True}, "resume=True resumes from the folder of the ModelCheckpoint among the callbacks, found 0"),
        ({"callbacks": px.LossMonitor}, "callbacks has the class LossMonitor"),
        ({"bath_size": 3}, "no argument 'bath_size'. Did you mean 'batch_size'"),
    ],
)
def test_arguments_of_train_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model().train(**{"epoch": 1, "train_dataset": data(), "batch_size": 8, **settings})


def test_train_without_an_optimizer_says_so() -> None:
    with pytest.raises(ConfigError, match=r"Model.train needs an optimizer"):
        px.Model(small(), F.cross_entropy).train(1, data(), batch_size=8)


# -- sinks refuse ------------------------------------------------------------------------------------------------------


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = px.ps.SparseEmbedding(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.ids(ids))


def test_a_sink_names_the_module_it_cannot_sink() -> None:
    made = model(WithTable())
    with pytest.raises(ConfigError, match="dataset_sink_mode cannot sink 'ids': SparseEmbedding pulls the rows"):
        made.train(1, (torch.arange(9), torch.zeros(9)), dataset_sink_mode=True, batch_size=3)
    net = nn.Sequential(nn.Embedding(9, CLASSES, sparse=True))
    with pytest.raises(ConfigError, match=r"cannot sink '0': the gradient of Embedding\(sparse=True\)"):
        model(net).train(1, (torch.arange(9), torch.zeros(9)), dataset_sink_mode=True, batch_size=3)


def test_a_sink_names_the_callback_that_needs_every_step() -> None:
    class Every(px.Callback):
        needs_every_step = True

    with pytest.raises(ConfigError, match="callback Every must act after every step, and sinks of 7 steps"):
        model().train(1, data(), [Every()], dataset_sink_mode=True, batch_size=8)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    px.set_auto_parallel_context(strategy_ckpt_save_file=path)
    expected = trained(batch_size=8)[0]
    assert json.loads(path.read_text())["version"] == 1
    px.reset_auto_parallel_context()
    px.set_auto_parallel_context(strategy_ckpt_load_file=str(path))
    assert trained(batch_size=8)[0] == expected
    with pytest.raises(ConfigError, match=r"strategy_ckpt_load_file=.*and Model was given another strategy"):
        model(strategy=px.DistributedStrategy()).eval(data())


def test_a_plan_says_how_gradients_combine() -> None:
    net = small()
    px.distribute(net)
    from phalanx.parallel.session import applied_to

    made = applied_to(net)
    assert made is not None
    px.set_auto_parallel_context(mirror_mean=False)
    with pytest.raises(ConfigError, match=r"set_auto_parallel_context says how gradients .* and so does the Plan"):
        model(plan=made.plan).eval(data())
