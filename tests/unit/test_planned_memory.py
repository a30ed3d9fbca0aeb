"""The bytes that the planner says a rank has at its peak, counted by hand: what is there when, and how many of it."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost
from phalanx.errors import PlanError
from phalanx.plan.value import Average

ROWS, WORDS = 64, 512
FLOAT = 4


class Head(nn.Module):
    """Scores of many words: more bytes than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inner(x)))


def answer_of(ranks: int, *limits: str, model: nn.Module | None = None, **options: Any) -> PlanResult:
    sample = torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.long)
    return px.auto_parallel(
        model or Head(),
        sample,
        F.cross_entropy,
        cluster=f"cpux{ranks}",
        limits=("pp=1", *limits),
        **({"optimizer": "sgd"} | options),
    )


def test_the_gradient_of_scores_and_of_their_logarithms_are_there_together() -> None:
    scores = ROWS * WORDS * FLOAT
    calls = {call.path or call.kind: call for call in list_module_calls(capture(Head(), _sample(), F.cross_entropy))}
    assert calls["loss"].saved_bytes == pytest.approx(scores, rel=0.01)  # logarithms of the softmax
    assert calls["loss"].temporary_bytes == pytest.approx(2 * scores, rel=0.01)
    assert calls["head"].temporary_bytes == pytest.approx(scores, rel=0.05)
    parameters = 8 * (8 + WORDS) * FLOAT
    saved = 2 * ROWS * 8 * FLOAT  # of the relu, and nothing of the input, which is the user's
    # A loop still has the scores themselves: `scores = model(x)`.
    assert answer_of(1).memory == pytest.approx(parameters + 4 * scores + saved, rel=0.02)
    # One that calls `F.cross_entropy(model(x), y)` has not.
    assert answer_of(1, return_outputs=False).memory == pytest.approx(parameters + 3 * scores + saved, rel=0.02)


def test_a_limit_that_only_a_loop_without_outputs_keeps_to_is_one_for_it_alone() -> None:
    kept, released = (answer_of(1, return_outputs=keeps).memory for keeps in (True, False))
    between = (kept + released) / 2
    fitting = answer_of(1, return_outputs=False, memory=between)
    assert fitting.memory == released
    assert fitting.to_json()["return_outputs"] is False
    with pytest.raises(PlanError, match="needs"):
        answer_of(1, memory=between)
    with pytest.raises(PlanError, match="needs") as refused:
        answer_of(1, return_outputs=False, memory=released / 2)
    assert f"{math.ceil(released)} bytes" in str(refused.value)


def test_what_the_model_returns_is_there_all_through_a_step_and_counts_once() -> None:
    outputs, parameters = ROWS * 4096 * FLOAT, 256 * 4096 * FLOAT
    sample = torch.zeros(ROWS, 256), torch.zeros(ROWS, 4096)
    calls = list_module_calls(capture(_wide(), sample, F.mse_loss))
    assert [call.returned_bytes for call in calls] == [outputs, 0]
    assert [call.saved_bytes for call in calls] == [
        0,
        0,
    ]  # the loss keeps its inputs, which are returned and the user's
    assert [call.temporary_bytes for call in calls] == pytest.approx([outputs, outputs], rel=0.01)
    peaks = [
        px.auto_parallel(_wide(), sample, F.mse_loss, cluster="cpux1", optimizer=name, limits=("pp=1",)).memory
        for name in ("sgd", "adam")
    ]
    released = [
        px.auto_parallel(
            _wide(), sample, F.mse_loss, cluster="cpux1", optimizer=name, limits=("pp=1",), return_outputs=False
        ).memory
        for name in ("sgd", "adam")
    ]
    # While the optimizer runs, none is there. The loss keeps its inputs, and beside what a layer keeps there is always
    # room for its output, so that in the passes a loop without outputs is priced like the other.
    assert [before - after for before, after in zip(peaks, released, strict=True)] == [0, outputs]
    # Beside the target: the gradient of the outputs with that of the weight, or Adam's state and temporary values.
    assert peaks[0] == pytest.approx(2 * parameters + 3 * outputs, rel=0.01)
    assert peaks[1] == pytest.approx(6 * parameters + 2 * outputs, rel=0.01)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 4096, bias=False))


def test_gradients_of_a_shared_parameter_are_there_one_for_each_use_and_are_of_no_batch() -> None:
    size = WORDS * 8 * FLOAT
    loss = partial(_of_tokens, WORDS)
    calls = {call.path or call.kind: call for call in list_module_calls(capture(Tied(), _ids(), loss))}
    # Gradients of activations alone: neither those of both uses nor their sum.
    assert (calls["tokens"].temporary_bytes, calls["head"].temporary_bytes) == (0, 2 * WORDS * FLOAT)
    answer = px.auto_parallel(Tied(), _ids(), loss, cluster="cpux2", optimizer="sgd", limits=("dp=2", "zero=0", "pp=1"))
    config = answer.search.best.config
    problem = build_problem(answer.work, config, answer.catalog.of(config)).problem
    assert (config.data, config.model) == (2, 1)
    shared = [work.shared_grad_bytes for work in answer.work.all]
    assert shared == [2 * size, size, size, 0]  # both beside their sum; on its way; in the making; not yet
    whole = [node.options[0].workspace_bytes for node in problem.nodes]
    assert whole[1] == pytest.approx(size + 2 * 8 * 8 * FLOAT, rel=0.1)


class Tied(nn.Module):
    """Scores of words, from the words' own table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.tokens(ids)))


def _of_tokens(words: int, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.view(-1, words), target)


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)


def test_what_a_layer_keeps_for_the_next_alone_is_gone_in_its_own_backward_pass() -> None:
    width = 128
    model = nn.Sequential(nn.Linear(8, width, bias=False), nn.GELU(), nn.Linear(width, 1, bias=False))
    calls = list_module_calls(capture(model, (torch.zeros(ROWS, 8), torch.zeros(ROWS, 1)), F.mse_loss))
    hidden = ROWS * width * FLOAT
    linear, gelu = calls[:2]
    assert (linear.saved_bytes, gelu.saved_bytes) == (hidden, hidden)
    # Gradients of its output and input stand beside the output of the layer before, in place of its own output.
    assert gelu.temporary_bytes == hidden


def test_a_result_dies_with_its_own_last_use_whatever_its_operator_keeps_besides() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    sample = torch.zeros(2, 8, 16, 16), torch.zeros(2, 8, 16, 16)
    captured = capture(nn.Sequential(*(block() for _ in range(4))), sample, F.mse_loss)
    unit, statistics = sample[0].numel() * FLOAT, 2 * 8 * FLOAT
    calls = [call for call in list_module_calls(captured) if call.kind != "loss"]
    assert calls[-1].returned_bytes == unit
    convolution, norm, relu = ([call for call in calls if call.kind == kind] for kind in KINDS)
    # The norm keeps mean and deviation, and the convolution's output is kept for it. Its own output is not kept.
    assert [call.saved_bytes for call in (convolution[1], norm[1], relu[1])] == [unit, statistics, unit]
    # In their backward passes, two gradients: the convolution's output is gone in its own, and counts there.
    assert [call.temporary_bytes for call in (convolution[1], norm[1], relu[1])] == [unit, 2 * unit, 2 * unit]
    for alike in (convolution, norm, relu):
        assert len({call.temporary_bytes for call in alike[1:-1]}) == 1
    live = captured.list_live_bytes()
    after = [live[max(call.operators)] for call in relu]
    assert [later - earlier for earlier, later in itertools.pairwise(after)] == [2 * unit + statistics] * 2 + [
        unit + statistics
    ]


KINDS = ("Conv2d", "BatchNorm2d", "ReLU")


def test_gradients_come_with_the_backward_pass_but_for_those_in_buckets() -> None:
    wide = nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Linear(4096, 10, bias=False))
    alone, copies = answer_of(1, model=wide), answer_of(2, "dp=2", "zero=0", *WHOLE, model=wide)
    for answer, late in ((alone, 1.0), (copies, 0.0)):
        config = answer.search.best.config
        problem = build_problem(answer.work, config, answer.catalog.of(config)).problem
        for node, weight in zip(problem.nodes, (8 * 4096, 4096 * 10), strict=False):
            cost = node.options[0]
            assert cost.persistent_bytes == pytest.approx(2 * weight * FLOAT, rel=0.02)  # and the batch
            assert cost.late_bytes == late * weight * FLOAT


WHOLE = ("0=whole", "1=whole")


def test_gradients_of_parameters_that_are_averaged_are_in_no_bucket() -> None:
    wide = nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Linear(4096, 10, bias=False))
    answer = answer_of(2, "dp=2", "zero=0", *WHOLE, model=wide)
    config = replace(answer.search.best.config, update=Average(every=2))
    problem = build_problem(answer.work, config, answer.catalog.of(config)).problem
    late = [node.options[0].late_bytes for node in problem.nodes]
    assert late == [8 * 4096 * FLOAT, 4096 * 10 * FLOAT, 0.0]  # the loss has none


def test_adam_has_two_temporary_values_for_each_of_its_largest_parameter() -> None:
    wide = nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Linear(4096, 512, bias=False))
    sizes = 8 * 4096 * FLOAT, 4096 * 512 * FLOAT
    peaks = {name: answer_of(1, model=wide, optimizer=name).memory for name in ("sgd", "adam")}
    outputs = ROWS * 512 * FLOAT
    assert peaks["adam"] == pytest.approx(4 * sum(sizes) + 2 * sizes[1] + outputs, rel=0.001)  # and the batch
    assert 2 * sum(sizes) <= peaks["sgd"] < 2.5 * sum(sizes)


class Table(nn.Module):
    """Adds a buffer to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.zeros(ROWS, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.x


def test_a_buffer_is_no_part_of_the_batch_whatever_its_name() -> None:
    layers = {"upsample": Table(), "linear": nn.Linear(8, 10)}
    answer = answer_of(1, model=nn.Sequential(OrderedDict(layers)))
    rows, targets = ROWS * 8 * FLOAT, ROWS * 8
    assert sum(work.sample_bytes for work in answer.work.all) == rows + targets


class Residual(nn.Module):
    """Four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def test_what_a_block_computes_again_is_there_while_it_does_and_results_of_products_once() -> None:
    blocks, rows = nn.Sequential(*(Residual() for _ in range(4))), 4096
    sample, unit = (torch.zeros(rows, 64), torch.zeros(rows, 64)), rows * 64 * FLOAT
    none, selective, full = (
        px.auto_parallel(
            blocks, sample, F.mse_loss, cluster="cpux1", optimizer="sgd", limits=(f"recompute={how}",)
        ).memory
        for how in ("none", "selective", "full")
    )
    # All are fullest at the last block's GELU. Blocks before it keep 4 + 4 units and their output, or products of 4 + 1
    # and their output, which the next is computed again from, or that alone.
    assert none - selective == pytest.approx(3 * (9 - 6) * unit, rel=0.01)
    assert selective - full == pytest.approx(3 * 5 * unit, rel=0.01)


class Hidden(nn.Module):
    """Blocks whose outputs it may return, some as views of them."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head, self.returns = nn.Linear(64, 8), returns

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x.view(-1, 8, 8) if len(hidden) == 1 else x)
        return (self.head(x), *hidden) if self.returns else (self.head(x),)


class Many(nn.Module):
    """Returns 16 tensors that nothing keeps, and the sum of one of them where there is no loss function."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.inner, self.sums = nn.Linear(8, 8, bias=False), sums

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner(x)
        outputs = {str(number): hidden + number for number in range(16)}
        return outputs | ({"loss": outputs["0"].exp().sum()} if self.sums else {})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sums", [False, True])
def test_what_the_model_returned_in_the_step_before_is_there_until_it_returns_anew(sums: bool, ranks: int) -> None:
    inputs, rows = torch.zeros(4096, 8), 4096 // ranks
    unit, weights = rows * 8 * FLOAT, 8 * 8 * FLOAT
    plan = partial(
        px.auto_parallel,
        Many(sums),
        inputs if sums else (inputs, torch.zeros(4096)),
        None if sums else lambda outputs, target: (outputs["0"].exp().sum(dim=1) * target).sum(),
        cluster=f"cpux{ranks}",
        optimizer="sgd",
        limits=("pp=1", f"dp={ranks}", "zero=0"),
    )
    answer, released = plan(), plan(return_outputs=False)
    kept = unit if sums else 0  # of exp, which the model computes or the loss
    target = 0 if sums else rows * FLOAT
    assert answer.memory == pytest.approx(unit + target + 2 * 16 * unit + kept, abs=8 * weights)
    # A loop that lets all go has them up to the end of the loss.
    in_loss = 2 * target  # sums of rows, and what the target makes of them
    assert released.memory == pytest.approx(unit + target + 16 * unit + unit + in_loss, abs=8 * weights)
    for planned in (answer, released):
        assert max(planned.simulate().simulation.peaks) == pytest.approx(planned.memory)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_block_is_computed_again_from_counts_once_if_it_is_of_the_batch_or_returned(stages: int) -> None:
    rows, micro = 64, 1 if stages == 1 else 2
    sample, unit = (torch.zeros(rows, 64), torch.zeros(rows, 8)), rows * 64 * FLOAT / micro
    limits = f"pp={stages}", "recompute=full", *(() if stages == 1 else ("schedule=1f1b", f"micro={micro}"))

    def checkpoints(returns: bool, **options: Any) -> list[float]:
        answer = px.auto_parallel(
            Hidden(returns),
            sample,
            _of_first,
            cluster=f"cpux{stages}",
            optimizer="sgd",
            limits=limits,
            top_k=1,
            **options,
        )
        config = answer.search.best.config
        nodes = build_problem(answer.work, config, answer.catalog.of(config)).problem.nodes
        works = zip(answer.work.all, nodes, strict=True)
        returned = 0 if stages == 1 else 1 / micro  # with its micro-batch, where it counts as an activation
        return [
            node.options[0].activation_bytes - returned * work.call.returned_bytes
            for work, node in works
            if work.starts_block
        ]

    assert checkpoints(returns=False) == [0, unit, unit, unit]
    assert checkpoints(returns=True) == [0, 0, 0, 0]
    # Stages keep what is returned with its micro-batch, whatever the loop does.
    assert checkpoints(returns=True, return_outputs=False) == ([0, unit, unit, unit] if stages == 1 else [0, 0, 0, 0])


def _of_first(outputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], target)


def test_a_step_is_fullest_at_a_node_or_while_the_optimizer_runs() -> None:
    nodes = tuple(
        LayerNode(name=str(at), decision=str(at), options=(StrategyCost(label="", **costs),))
        for at, costs in enumerate(
            (
                {"persistent_bytes": 10.0, "late_bytes": 4.0, "activation_bytes": 5.0, "workspace_bytes": 1.0},
                {"persistent_bytes": 20.0, "late_bytes": 9.0, "activation_bytes": 7.0, "workspace_bytes": 2.0},
            )
        )
    )
    pick = {"0": 0, "1": 0}
    first, second = 30.0 + 5 + 1, 30.0 - 4 + 5 + 7 + 2  # all gradients; those of the second node alone
    assert StepProblem(nodes=nodes).peak(pick) == max(first, second) == 40
    with_update = LayerNode(
        name="1", decision="1", options=(StrategyCost(label="", persistent_bytes=20.0, update_bytes=15.0),)
    )
    assert StepProblem(nodes=(nodes[0], with_update)).peak(pick) == 30 + 15


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.long)
