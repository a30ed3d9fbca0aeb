"""Forward passes are split into stages that make up the whole; micro-batches and ranks are as they should be."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.pipeline.partition import owner_stages, record
from phalanx.parallel.pipeline.rng_streams import Streams
from phalanx.parallel.pipeline.schedule import StageModule, StageRoute, _splits, infer_stage_shapes, microbatches_of
from phalanx.parallel.pipeline.stage_io import pack, unpack
from phalanx.plan.report.explain import explain
from phalanx.plan.value import Schedule
from pipeline_models import GLUED4, TWO, WIDTH, Glued, chain

STREAMS = Streams(4, torch.device("cpu"))
UNITS = {str(index): stage for index, stage in enumerate((0, 1, 2, 3, 3, 3))}


def route(schedule: Schedule, ranks: int, index: int = 0) -> StageRoute:
    return StageRoute(schedule, ranks, index, None, torch.device("cpu"))


def alone(stages: int) -> StageRoute:
    """All stages on one rank."""
    return route(Schedule(kind="gpipe", virtual=stages), 1)


@pytest.mark.parametrize(("model", "stages"), [(Glued(), GLUED4), (chain(), UNITS)], ids=["glue", "chain"])
def test_stages_one_after_another_are_the_model(model: nn.Module, stages: dict[str, int]) -> None:
    recorded = record(model, stages, 4)
    x = torch.randn(4, WIDTH)
    made = [StageModule(recorded.body(model, index), index, lambda _: (x.clone(),), STREAMS) for index in range(4)]
    ends = infer_stage_shapes(made, alone(4))
    torch.testing.assert_close(unpack(made[3].output_form, ends[3][1]), model(x.clone()))
    own = {id(param) for param in model.parameters()}
    assert {id(param) for stage in made for param in stage.parameters()} == own


def test_a_value_travels_through_the_stages_between() -> None:
    recorded = record(Glued(), GLUED4, 4)
    crossing = [[node.name for node in recorded.crossing(stage)] for stage in range(2)]
    kept = [name for name in crossing[0] if name.startswith("add")]
    assert len(kept) == 1
    assert all(kept[0] in names for names in crossing)


def test_what_is_in_no_unit_is_where_it_is_used_first() -> None:
    class Late(Glued):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = F.gelu(self.first(x))
            for block in self.blocks:
                h = block(h)
            return self.head(h.view(-1, 2, WIDTH).sum(1) + self.shift)

    model = Late()
    owners = owner_stages(model, record(model, GLUED4, 4), GLUED4)
    assert owners["shift"] == 2
    assert owners["head.weight"] == 3


def test_recording_leaves_nothing_in_the_model() -> None:
    class Constant(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x) * torch.full((3,), 2.0))

    model = Constant(nn.Linear(2, 3), nn.Linear(3, 1))
    before = dict(vars(model))
    recorded = record(model, {"0": 0, "1": 1}, 2)
    assert vars(model) == before
    x = torch.randn(5, 2)
    (handed,) = recorded.body(model, 0)(x)
    torch.testing.assert_close(recorded.body(model, 1)(handed), model(x))


def test_any_number_of_inputs_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(nn.Sequential):
        def forward(self, *xs: Tensor) -> Tensor:
            return self[1](self[0](xs[0]))

    model = Many(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"Many cannot be split.*takes any number of inputs \(xs\)\. Name each"):
        record(model, {"0": 0, "1": 1}, 2)
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(PlanError, match=r"任意数量的输入（xs）。请在其签名中"):
        record(model, {"0": 0, "1": 1}, 2)


def test_values_keep_their_form() -> None:
    tensors: list[Tensor] = []
    value = (torch.ones(2), [torch.zeros(1), None, 3], {"a": torch.Size([2, 5]), "b": True})
    form = pack(value, tensors)
    again = unpack(form, tensors)
    assert len(tensors) == 2
    assert again[0] is value[0]
    assert again[1][1:] == [None, 3]
    assert again[2] == {"a": (2, 5), "b": True}
    with pytest.raises(PlanError, match="found device"):
        pack(torch.device("cpu"), [])


@pytest.mark.parametrize(
    ("schedule", "rows", "ranks", "expected"),
    [
        (Schedule(kind="1f1b", microbatches=4), 8, 2, (4, 4)),
        (Schedule(kind="1f1b", microbatches=4), 6, 2, (3, 4)),
        (Schedule(kind="1f1b", microbatches=4), 7, 2, (1, 4)),
        (Schedule(kind="1f1b", microbatches=4), 3, 2, (3, 4)),
        (Schedule(kind="1f1b", microbatch_rows=4), 12, 2, (3, 3)),
        (Schedule(kind="1f1b", microbatch_rows=4), 10, 2, (2, 2)),
        (Schedule(kind="1f1b", microbatch_rows=40), 10, 2, (1, 1)),
        # Interleaved ones go in rounds of one size: 5 on 2 ranks would be rounds of 2.5.
        (Schedule(kind="interleaved", microbatches=5, virtual=2), 10, 2, (2, 5)),
        (Schedule(kind="zero_bubble", microbatches=5, virtual=2), 10, 2, (5, 5)),
    ],
)
def test_batches_are_cut_into_equal_micro_batches(
    schedule: Schedule, rows: int, ranks: int, expected: tuple[int, int]
) -> None:
    assert microbatches_of(route(schedule, ranks), rows) == expected


def test_copies_that_meet_in_a_step_cut_as_many_micro_batches() -> None:
    schedule = Schedule(kind="1f1b", microbatches=4)
    assert [microbatches_of(route(schedule, 2), *rows) for rows in ((8, 6), (5, 4))] == [(2, 4), (1, 4)]


def test_ranks_hold_stages_in_turn_or_in_a_v() -> None:
    looped = Schedule(kind="interleaved", virtual=2)
    assert [route(looped, 2, rank).mine for rank in range(2)] == [[0, 2], [1, 3]]
    folded = Schedule(kind="zero_bubble", virtual=2)
    assert [route(folded, 2, rank).mine for rank in range(2)] == [[0, 3], [1, 2]]


def test_a_backward_pass_is_taken_apart_where_torch_can(caplog: pytest.LogCaptureFixture) -> None:
    model = Glued()
    x = torch.randn(4, WIDTH)
    recorded = record(model, GLUED4, 4)
    made = [StageModule(recorded.body(model, index), index, lambda _: (x,), STREAMS) for index in range(4)]
    ends = infer_stage_shapes(made, alone(4))
    assert all(_splits(stage, *ends[stage.index]) for stage in made)
    assert all(param.grad is None for param in model.parameters())
    model = chain()
    recorded = record(model, UNITS, 4)
    made = [StageModule(recorded.body(model, index), index, lambda _: (x,), STREAMS) for index in range(4)]
    ends = infer_stage_shapes(made, alone(4))
    with caplog.at_level(logging.WARNING):
        assert [_splits(stage, *ends[stage.index]) for stage in made] == [True, True, False, True]
    assert "backward pass of stage 2 cannot be taken apart" in caplog.text


def test_a_plan_says_which_rank_holds_which_stage() -> None:
    case = TWO["zero bubble in a v"]
    told = explain(case.plan(), shape_of(case.build()))
    assert [(row.stage, row.holder, row.units) for row in told.stages] == [
        (0, 0, ("0",)), (1, 1, ("1",)), (2, 1, ("2", "3")), (3, 0, ("4", "5")),
    ]  # fmt: skip
    assert told.rows[0].rank_bytes < told.rows[0].bytes
    assert "stages by schedule zero_bubble, micro-batches: 4 a step" in str(told)
    sized = replace(case, schedule=Schedule(kind="zero_bubble", microbatch_rows=2, virtual=2))
    assert "micro-batches: of 2 rows" in str(explain(sized.plan(), shape_of(case.build())))
