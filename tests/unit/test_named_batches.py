"""Columns that have names come to the parameters of these names, whichever call reads the batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import phalanx as px
from phalanx.auto.capture.step import arguments_of
from phalanx.data import GeneratorDataset, ShardedLoader
from phalanx.data.loader.binding import Binding, bind
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.samples.batch import move_to_device
from phalanx.errors import ConfigError
from phalanx.train.model.planning import global_batch
from phalanx.train.step.step import TrainStep

ROWS = 12


class Tokens(nn.Module):
    """Each of its inputs counts for something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        scores: Tensor = self.head(ids * mask)
        return scores if segments is None else scores + segments.sum(1, keepdim=True)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class WithLoss(Tokens):
    """As models of transformers are: labels among the inputs, and an output of several values."""

    def forward(  # type: ignore[override]
        self, ids: Tensor | None = None, mask: Tensor | None = None, labels: Tensor | None = None, **options: Any
    ) -> dict[str, Tensor]:
        assert ids is not None
        logits = super().forward(ids, torch.ones_like(ids) if mask is None else mask)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randn(ROWS, 4, generator=generator),
        "segments": torch.rand(ROWS, 4, generator=generator),
        "mask": torch.randint(2, (ROWS, 4), generator=generator).float(),
        "labels": torch.randint(3, (ROWS,), generator=generator),
    }


class Rows(Dataset[Any]):
    """Rows as dictionaries, of these columns."""

    def __init__(self, *names: str, make: Callable[[dict[str, Tensor]], Any] = dict) -> None:
        self._columns = {name: columns()[name] for name in names}
        self._make = make

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self._make({name: column[row] for name, column in self._columns.items()})


ORDER = ("ids", "segments", "mask", "labels")


def as_batches(rows: list[dict[str, Tensor]]) -> UserDict[str, Tensor]:
    """What tokenizers return."""
    return UserDict({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def generated() -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*columns().values(), strict=True)


class Batch(NamedTuple):
    ids: Tensor
    segments: Tensor
    mask: Tensor
    labels: Tensor


DATA: dict[str, Callable[[], Any]] = {
    "dictionaries": lambda: ShardedLoader(Rows(*ORDER), batch_size=ROWS, shuffle=False),
    "a UserDict": lambda: ShardedLoader(Rows(*ORDER), batch_size=ROWS, shuffle=False, collate_fn=as_batches),
    "a pipeline": lambda: Pipeline(tuple(columns().values()), ORDER).batch(ROWS),
    "a pipeline whose target is first": lambda: Pipeline(
        tuple(columns()[name] for name in reversed(ORDER)), ORDER[::-1]
    ).batch(ROWS),
    "feeds": lambda: ShardedLoader(GeneratorDataset(generated, ORDER), batch_size=ROWS),
    "named tuples": lambda: ShardedLoader(Rows(*ORDER, make=lambda row: Batch(**row)), batch_size=ROWS, shuffle=False),
}


def expected() -> Tensor:
    given = columns()
    with torch.no_grad():
        return Tokens()(given["ids"], given["mask"], given["segments"])


class Losses(px.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_update(self, run: Any) -> None:
        self.seen.append(run.loss.item())


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("sink", [False, True])
def test_a_model_trains_on_columns_by_name(kind: str, sink: bool) -> None:
    net, losses = Tokens(), Losses()
    px.Model(net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1)).train(1, DATA[kind](), [losses], sink)
    assert losses.seen == [pytest.approx(F.cross_entropy(expected(), columns()["labels"]).item())]


@pytest.mark.parametrize("make", [dict, UserDict])
def test_every_call_reads_a_dictionary_by_name(make: Any) -> None:
    net, given = Tokens(), columns()
    label = given.pop("labels")
    loss = F.cross_entropy(expected(), label).item()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    step = px.train_step(net, F.cross_entropy, optimizer, fetch={"out": lambda out, _: out})
    for out in (step(make(given), label), step((make(given), label)), step(make({"labels": label, **given}))):
        assert out.loss.item() == pytest.approx(loss)
        torch.testing.assert_close(out["out"], expected())
    rows = Rows(*ORDER)
    assert px.evaluate(net, rows, "loss", loss_fn=F.cross_entropy)["loss"] == pytest.approx(loss, rel=1e-6)
    assert px.evaluate(net, rows)["acc1"] == (expected().argmax(1) == label).double().mean().item()
    model = px.Model(net, F.cross_entropy, optimizer, ["acc1"])
    assert model.eval(rows)["loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(model.predict(rows), expected())
    torch.testing.assert_close(model.predict(Rows(*ORDER[:3])), expected())
    torch.testing.assert_close(model.predict(make(given)), expected())
    assert px.explain(net, make(given)).activation_bytes
    assert {type(x) for x in (move_to_device(make(given), torch.device("cpu")),)} == {make}


def test_a_planner_sees_the_call_by_name() -> None:
    net, given = Tokens(), columns()
    loader = ShardedLoader(Rows(*ORDER), batch_size=ROWS, shuffle=False)
    for has_target in (True, None):
        sample = global_batch(loader, net, has_target=has_target)
        assert sample.positional == ()
        assert {name: part.shape for name, part in sample.keywords.items()} == dict.fromkeys(ORDER[:3], (ROWS, 4))
    label = given.pop("labels")
    assert arguments_of(net, (given, label), has_target=True).keywords.keys() == given.keys()
    piped = ShardedLoader(Pipeline(tuple(columns().values()), ORDER).batch(ROWS))
    assert global_batch(piped, net, has_target=True).keywords.keys() == given.keys()


# -- a net that returns its loss ---------------------------------------------------------------------------------------


def loss_of() -> float:
    given = columns()
    with torch.no_grad():
        return WithLoss()(given["ids"], given["mask"], given["labels"])["loss"].item()


def test_a_model_that_returns_its_loss_works_as_it_is() -> None:
    names, losses = ("labels", "mask", "ids"), Losses()
    net = WithLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    model = px.Model(net, None, optimizer, ["acc1"])
    model.train(1, Rows(*names), [losses], batch_size=ROWS)
    assert losses.seen == [pytest.approx(loss_of())]
    step = px.train_step(net, None, optimizer, fetch={"hits": lambda out, y: (out["logits"].argmax(1) == y).sum()})
    batch = {name: columns()[name] for name in names}
    hits = int(step(batch)["hits"])
    assert step(UserDict(batch)).loss.item() == pytest.approx(loss_of())
    assert px.Model(net).eval(Rows(*names), batch_size=5)["loss"] == pytest.approx(loss_of(), rel=1e-6)
    assert model.eval(Rows(*names)) == {"acc1": hits / ROWS}
    found = px.evaluate(net, Rows(*names), ["loss", "acc1"], batch_size=7)
    assert found == {"acc1": hits / ROWS, "loss": pytest.approx(loss_of(), rel=1e-6)}
    outputs = model.predict(Rows(*names), batch_size=5)
    assert {name: part.shape for name, part in outputs.items()} == {"logits": (ROWS, 3)}


def test_torchs_losses_take_the_logits_of_an_output_of_several_values() -> None:
    net = WithLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        losses = Losses()
        model = px.Model(net, loss, optimizer)
        model.train(1, Rows("ids", "mask", "labels"), [losses], batch_size=ROWS)
        assert losses.seen == [pytest.approx(loss_of())]
        assert model.eval(Rows("ids", "mask", "labels"))["loss"] == pytest.approx(loss_of(), rel=1e-6)
        given = columns()
        label = given.pop("labels")
        del given["segments"]
        assert px.train_step(net, loss, optimizer)(given, label).loss.item() == pytest.approx(loss_of())


def test_tensors_without_names_reach_a_net_that_returns_its_loss() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.inner(x).squeeze(1) - y).square().mean()

    net, x, y = Square(), torch.randn(6, 4), torch.randn(6)
    step = px.train_step(net, None, torch.optim.SGD(net.parameters(), 0.0))
    loss = net(x, y).item()
    assert [step(x, y).loss.item(), step((x, y)).loss.item()] == [loss, loss]
    assert px.evaluate(net, (x, y), "loss", batch_size=4)["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_mean_over_targets_that_count_is_no_mean_of_rows() -> None:
    rows = Rows("ids", "mask", "labels")
    rows._columns["labels"][3] = -100
    with pytest.raises(ConfigError, match=r"1 are -100: the mean over all data cannot be told from means of batches"):
        px.evaluate(WithLoss(), rows, "loss")


def test_a_net_that_returns_no_loss_is_named_before_the_first_update() -> None:
    net = WithLoss()
    before = net.head.weight.clone()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(
        ConfigError, match=r"found a dict without a loss of one element. Let the data yield the targets"
    ):
        px.Model(net, None, optimizer).train(1, Rows("ids", "mask"), batch_size=ROWS)
    with pytest.raises(ConfigError, match=r"found a tensor of shape \(12, 3\)"):
        px.train_step(net.head, None, optimizer)(columns()["ids"])
    assert torch.equal(net.head.weight, before)


# -- what cannot be told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("ids", "masks", "labels"), r"Tokens takes \(ids, mask, segments=None\), and the batch has the columns ids"),
        (("ids", "masks", "labels"), r"no parameter is called 'masks'. Did you mean 'mask'\?"),
        (("ids", "segments", "labels"), "the columns ids, segments: nothing for 'mask'"),
        (("mask", "labels"), "the column mask: nothing for 'ids'"),
        (("a", "b", "labels"), "the columns a, b: no parameter is called 'a'"),
        (("ids", "mask"), "found the columns ids, mask, of which none is the target. Call one column label, labels"),
        (("ids", "mask", "y", "label"), "of which y and label may be the target"),
    ],
)  # fmt: skip
def test_columns_that_fit_no_parameter_are_named(names: tuple[str, ...], message: str) -> None:
    net, of = Tokens(), columns()
    batch = {name: of.get(name, of["ids"]) for name in names}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ConfigError, match=message):
        px.Model(net, F.cross_entropy, optimizer).train(1, DictRows(batch), batch_size=4)
    with pytest.raises(ConfigError, match=message):
        px.train_step(net, F.cross_entropy, optimizer)(batch)
    with pytest.raises(ConfigError, match=message):
        px.evaluate(net, DictRows(batch))


class DictRows(Dataset[Any]):
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self._batch.items()}


def test_a_misspelt_column_is_not_lost_in_keyword_arguments() -> None:
    given = columns()
    batch = {"ids": given["ids"], "masks": given["mask"], "labels": given["labels"]}
    step: TrainStep = px.train_step(net := WithLoss(), None, torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"no parameter is called 'masks'. Did you mean 'mask'\?"):
        step(batch)
    del batch["masks"]
    assert step({**batch, "rows_in_all": torch.tensor(ROWS)}).loss.isfinite()


class Feeds(nn.Module):
    def forward(self, dense: Tensor, *slots: Tensor) -> Tensor: ...


class AnyName(nn.Module):
    def forward(self, **batch: Tensor) -> Tensor: ...


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **named: Any) -> Any: ...


@pytest.mark.parametrize(
    ("net", "names", "is_ordered", "found"),
    [
        (Tokens(), ("mask", "ids"), True, Binding(("mask", "ids"), by_name=True)),
        (Wrapper(Tokens()), ("mask", "ids"), False, Binding(("mask", "ids"), by_name=True)),
        (torch.compile(Tokens(), backend="eager"), ("mask", "ids"), False, Binding(("mask", "ids"), by_name=True)),
        (Tokens(), ("image", "other"), True, Binding(("image", "other"))),
        (Tokens(), (0, 1, 2), True, Binding((0, 1, 2))),
        (nn.Sequential(), ("image",), False, Binding(("image",))),
        (nn.Sequential(), ("input",), False, Binding(("input",))),
        (Wrapper(nn.Sequential()), ("image",), False, Binding(("image",))),
        (Feeds(), ("dense", "C1", "C2"), True, Binding(("dense", "C1", "C2"))),
        (AnyName(), ("a", "b"), False, Binding(("a", "b"), by_name=True)),
        (AnyName(), ("a",), False, Binding(("a",), by_name=True)),
    ],
)
def test_the_signature_decides_how_columns_are_given(
    net: nn.Module, names: tuple[Any, ...], is_ordered: bool, found: Binding
) -> None:
    assert bind(net, names, is_ordered=is_ordered) == found


def test_a_net_that_takes_a_whole_dictionary_is_given_it() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tokens()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(**batch)  # type: ignore[no-any-return]

    given = columns()
    label = given.pop("labels")
    net = Whole()
    loss = px.train_step(net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1))(given, label).loss
    assert loss.item() == pytest.approx(F.cross_entropy(expected(), label).item())
