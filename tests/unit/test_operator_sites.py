"""Which operators of a captured step can be computed in parts, by DTensor's rules, and what they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.module_calls import ModuleCall, list_module_calls
from phalanx.auto.capture.operator_sites import OperatorParts, find_mismatch, find_operator_parts, sites
from phalanx.auto.capture.step import capture
from phalanx.errors import PlanError
from phalanx.plan.sites import Site, axis_of, regions
from phalanx.plan.value import Axis, Layout, OpRule, Plan, Shard, Step

ROWS = 4


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def captured(
    *layers: nn.Module, shape: tuple[int, ...] = (ROWS, 3, 8, 8)
) -> tuple[CapturedStep, dict[str, ModuleCall]]:
    step = capture(nn.Sequential(*layers), (torch.zeros(shape),))
    return step, {one.path: one for one in list_module_calls(step) if not one.is_glue}


def dims(parts: OperatorParts | None) -> dict[str, tuple[int, ...]] | None:
    return None if parts is None else {site.operator: cut for site, cut in parts.placed}


class Biased(nn.Module):
    """Adds rows of a table that indices choose, as windows of attention do with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 8))
        self.register_buffer("chosen", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.chosen]


def test_what_dtensor_fails_on_is_left_whole() -> None:
    step, found = captured(Biased(), shape=(ROWS, 3, 8))
    assert find_operator_parts(step, found["0"].operators, 2) is None


def test_what_works_on_each_row_is_computed_in_parts_of_the_rows() -> None:
    step, found = captured(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    assert [dims(find_operator_parts(step, found[str(place)].operators, 2)) for place in range(4)] == [
        {"aten.convolution.default": (0,)},
        {"aten.relu.default": (0,)},
        {"aten.max_pool2d_with_indices.default": (0, 0)},
        {"aten.view.default": (0,)},
    ]


def test_attention_written_out_is_computed_in_parts_of_its_rows() -> None:
    step, found = captured(Scores(), nn.LayerNorm(8), shape=(ROWS, 3, 8))
    parts = dims(find_operator_parts(step, found["0"].operators, 2))
    assert parts is not None
    assert parts["aten._softmax.default"] == parts["aten.bmm.default"] == (0,)
    assert dims(find_operator_parts(step, found["1"].operators, 2)) == {"aten.native_layer_norm.default": (0, 0, 0)}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm2d(3), (ROWS, 3, 8, 8)),  # mixes rows
        (nn.Dropout(0.5), (ROWS, 3, 8, 8)),  # parts would draw the same
        (nn.ReLU(), (3, 5)),  # neither dim in equal parts
    ],
)
def test_what_mixes_rows_draws_numbers_or_is_uneven_is_not(layer: nn.Module, shape: tuple[int, ...]) -> None:
    step, found = captured(layer, shape=shape)
    assert find_operator_parts(step, found["0"].operators, 2) is None


def test_uneven_rows_are_left_whole_and_the_next_dim_is_cut() -> None:
    step, found = captured(nn.ReLU(), shape=(3, 6))
    assert find_operator_parts(step, found["0"].operators, 2) == OperatorParts(
        1, ((Site("0", 0, "aten.relu.default"), (1,)),)
    )


def plan_of(site: str, axis: str = "model", dim: int = 0, outputs: int = 1, digest: str = "0" * 16) -> Plan:
    layout: Layout = {axis: Shard(dim=dim)}
    mesh = (Axis(name="data", size=2), Axis(name="model", size=2))
    rule = OpRule(site=site, outputs=(layout,) * outputs)
    return Plan(mesh=mesh, step=Step(batch_axes=("data",)), ops=(rule,), capture_digest=digest)


def test_operators_are_named_by_module_number_and_name() -> None:
    step, _ = captured(nn.Linear(8, 8), Scores(), shape=(ROWS, 3, 8))
    named = sites(step)
    assert "1:7:aten._softmax.default" in named
    assert named["1:7:aten._softmax.default"].name == "aten._softmax.default"
    assert all(operator.phase == "forward" for operator in named.values())
    assert str(Site.read("1:7:aten._softmax.default")) == "1:7:aten._softmax.default"


def test_a_plan_of_another_step_is_told_from_one_of_this() -> None:
    step, _ = captured(nn.Linear(8, 8), Scores(), shape=(ROWS, 3, 8))
    softmax = "1:7:aten._softmax.default"
    assert find_mismatch(step, plan_of(softmax, digest=step.digest())) is None
    found = find_mismatch(step, plan_of(softmax))
    assert found is not None
    assert "captured as 0000000000000000" in found
    for plan, said in (
        (plan_of("1:7:aten.softmax.int", digest=step.digest()), f"Did you mean '{softmax}'?"),
        (plan_of(softmax, outputs=2, digest=step.digest()), "has 2 outputs, the operator 1. Say one of each"),
        (plan_of(softmax, dim=-4, digest=step.digest()), "Replicate it, or cut a dim"),
    ):
        assert said in str(find_mismatch(step, plan))


def test_what_a_plan_says_of_operators_must_make_sense_by_itself() -> None:
    assert regions(plan_of("blocks.0.attend:3:aten.relu.default")) == ("blocks.0.attend",)
    for site in ("relu", "act:relu", "act:x:aten.relu.default", "act:1:"):
        with pytest.raises(PlanError, match=r"names no operator\. Write the module, the operator's number in it"):
            regions(plan_of(site))
    with pytest.raises(PlanError, match=r"ranks along 'data' read other rows\. Place them along one axis"):
        axis_of(plan_of("act:0:aten.relu.default", axis="data"))


def test_a_step_is_the_same_where_tokens_are_labels_too_as_one_tensor_or_two() -> None:
    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten())

    ids = torch.zeros(2, 3, dtype=torch.long)
    one, two = ({"ids": ids, "labels": labels} for labels in (ids, ids.clone()))
    assert capture(Predicts(), one).digest() == capture(Predicts(), two).digest()
    assert one["labels"] is ids
