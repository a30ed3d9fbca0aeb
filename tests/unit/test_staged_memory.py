"""The bytes that the planner says ranks of a pipeline have, counted by hand: gradients, borders, outputs, updates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import phalanx as px
from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.partition_points import find_partition_points
from phalanx.auto.capture.step import capture
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost
from phalanx.parallel.pipeline.batch import Batch
from phalanx.parallel.pipeline.partition import record

ROWS, WIDTH, OUTPUTS = 64, 128, 512
FLOAT = 4


def answer_of(*limits: str, ranks: int = 2, optimizer: str = "sgd") -> PlanResult:
    model = nn.Sequential(nn.Linear(32, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS, bias=False))
    sample = torch.zeros(ROWS, 32), torch.zeros(ROWS, dtype=torch.long)
    limits = ("pp=2", *limits) if "schedule=zero_bubble" in limits else ("pp=2", "schedule=1f1b", *limits)
    return px.auto_parallel(
        model, sample, F.cross_entropy, cluster=f"cpux{ranks}", optimizer=optimizer, limits=limits, top_k=1
    )


def problem_of(answer: PlanResult) -> StepProblem:
    config = answer.search.best.config
    return build_problem(answer.work, config, answer.catalog.of(config)).problem


def test_gradients_of_a_micro_batch_are_new_beside_the_sum_of_others_and_that_beside_its_bucket() -> None:
    first = 32 * WIDTH * FLOAT
    two = answer_of("micro=2")
    one = answer_of("micro=1", "vpp=1")
    copies = answer_of("micro=2", "dp=2", "zero=0", ranks=4)
    costs = {name: problem_of(answer).nodes[0].options[0] for name, answer in (("one", one), ("two", two))}
    sharded = answer_of("micro=2", "dp=2", "zero=2", ranks=4)
    costs["copies"] = problem_of(copies).nodes[0].options[0]
    costs["sharded"] = problem_of(sharded).nodes[0].options[0]
    batch = ROWS * 32 * FLOAT
    assert costs["one"].persistent_bytes == costs["two"].persistent_bytes == 2 * first + batch
    assert costs["copies"].persistent_bytes == 3 * first + batch / 2
    # A slice of the parameters beside what is gathered of them; of gradients, slices come when the passes are over.
    assert costs["sharded"].persistent_bytes == first / 2 + 2 * first + batch / 2
    # The gradient of a layer's outputs, of a micro-batch.
    grad = ROWS * WIDTH * FLOAT
    assert costs["one"].workspace_bytes == grad
    assert costs["two"].workspace_bytes == grad / 2 + first
    assert costs["copies"].workspace_bytes == grad / 4 + first


def test_what_the_last_stage_returns_is_kept_with_its_micro_batch() -> None:
    head, loss = (node.options[0] for node in problem_of(answer_of("micro=4")).nodes[2:])
    scores = ROWS * OUTPUTS * FLOAT / 4
    assert head.activation_bytes == scores
    assert loss.activation_bytes == pytest.approx(scores, rel=0.01)  # their logarithms


def test_with_zero_bubble_one_micro_batch_has_what_is_behind_the_last_weights() -> None:
    early, late = (problem_of(answer_of("micro=4", schedule)) for schedule in ("schedule=1f1b", "schedule=zero_bubble"))
    scores = ROWS * OUTPUTS * FLOAT / 4
    (head, loss), (late_head, late_loss) = ([node.options[0] for node in of.nodes[2:]] for of in (early, late))
    # It is gone once gradients of inputs are there, and those of weights are computed from others.
    assert (late_head.activation_bytes, late_loss.activation_bytes) == (0, 0)
    assert late_head.workspace_bytes == head.workspace_bytes + scores
    assert late_loss.workspace_bytes == pytest.approx(loss.workspace_bytes + 2 * scores, rel=0.01)
    inner, late_inner = (of.nodes[1].options[0] for of in (early, late))
    assert late_inner.activation_bytes == inner.activation_bytes == ROWS * WIDTH * FLOAT / 4


def test_with_zero_bubble_stages_without_weights_have_activations_of_all_micro_batches_in_flight() -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    for frozen in layers[2:]:
        frozen.requires_grad_(False)
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    sample = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    limits = "pp=4", "micro=4", "schedule=zero_bubble"
    answer = px.auto_parallel(model, sample, F.mse_loss, cluster="cpux4", optimizer="sgd", limits=limits, top_k=1)
    problem, unit = problem_of(answer), ROWS * WIDTH * FLOAT / 4
    costs = [node.options[0] for node in problem.nodes]
    assert [cost.activation_bytes for cost in costs[1::2]] == [unit] * 4  # of each Tanh; the last one's is returned
    ranks = problem.memory(dict.fromkeys(problem.decisions, 0), (0, 1, 2, 3))
    assert all(rank.activation >= 4 * unit for rank in ranks)
    assert answer.simulate().simulation.peaks == pytest.approx([rank.total for rank in ranks])


@pytest.mark.parametrize("micro", [1, 4])
def test_both_ranks_of_a_border_have_buffers_for_all_micro_batches(micro: int) -> None:
    problem = problem_of(answer_of(f"micro={micro}"))
    hidden = ROWS * WIDTH * FLOAT
    assert set(problem.border_bytes) == {hidden}
    without = StepProblem(nodes=problem.nodes, pieces=problem.pieces, sends=problem.sends, ranks=2, micro_batches=micro)
    pick, stage_of = dict.fromkeys(problem.decisions, 0), (0, 1)
    peaks, fewer = ([rank.total for rank in p.memory(pick, stage_of)] for p in (problem, without))
    assert [peak - less for peak, less in zip(peaks, fewer, strict=True)] == [hidden, hidden]


class Hidden(nn.Module):
    """Returns what its layers make: the first as it is, the second as a view, and half of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.layers[0](x)
        second = self.layers[1](first)
        view = second.view(-1, 2, 4)
        third = self.layers[2](second)
        half = third[:, :4]
        return self.layers[4](self.layers[3](third)), first, view, half


def test_what_the_model_returns_travels_to_the_last_stage_as_the_engine_sends_it() -> None:
    model, sample, unit = Hidden(), (torch.zeros(ROWS, 8), torch.zeros(ROWS, 8)), ROWS * 8 * FLOAT
    captured = capture(model, sample, lambda outputs, target: F.mse_loss(outputs[0], target))
    points = find_partition_points(model, captured, list_module_calls(captured))
    assert points.starts == tuple(f"layers.{at}" for at in range(5))
    # The second layer's output goes to the third as it is, the view beside it to the end.
    assert points.crossing == (unit, 3 * unit, 3.5 * unit, 3.5 * unit)
    engine = record(model, {start: at for at, start in enumerate(points.starts)}, 5)
    assert [len(engine.crossing(stage)) for stage in range(4)] == [1, 3, 4, 4]


def test_a_rank_that_has_both_stages_of_a_border_has_both_buffers() -> None:
    nodes = tuple(LayerNode(name=at, decision=at, options=(StrategyCost(label=""),)) for at in "ab")
    problem = StepProblem(nodes=nodes, pieces=(0, 1), sends=(0.0,), border_bytes=(3.0,), virtual=2, micro_batches=2)
    assert [rank.total for rank in problem.memory({"a": 0, "b": 0}, (0, 1))] == [6.0]


def test_a_rank_of_stages_is_fullest_in_its_passes_or_while_its_optimizer_runs() -> None:
    sizes = ((10.0, 3.0, 2.0, 9.0), (20.0, 1.0, 1.0, 1.0))
    nodes = tuple(
        LayerNode(
            name=str(at),
            decision=str(at),
            options=(
                StrategyCost(
                    label="", persistent_bytes=held, activation_bytes=kept, workspace_bytes=working, update_bytes=update
                ),
            ),
        )
        for at, (held, kept, working, update) in enumerate(sizes)
    )
    problem = StepProblem(nodes=nodes, pieces=(0, 1), sends=(0.0,), border_bytes=(0.5,), ranks=2, micro_batches=4)
    peaks = [rank.total for rank in problem.memory({"0": 0, "1": 0}, (0, 1))]
    assert peaks == [10 + 0.5 + 9, 20 + 0.5 + 1 + 1]  # two micro-batches and a workspace take 8


@pytest.mark.parametrize("limits", [("micro=4",), ("micro=1",), ("micro=4", "dp=2", "zero=2")])
def test_the_simulation_of_stages_has_the_same_peak(limits: tuple[str, ...]) -> None:
    answer = answer_of(*limits, ranks=4 if len(limits) > 1 else 2, optimizer="adam")
    problem, pick = problem_of(answer), dict.fromkeys(problem_of(answer).decisions, 0)
    peaks = [rank.total for rank in problem.memory(pick, (0, 1))]
    assert answer.memory == max(peaks)
    assert answer.simulate().simulation.peaks == pytest.approx(peaks)


@pytest.mark.parametrize("keeps", [True, False])
def test_outputs_of_micro_batches_stay_only_where_they_are_asked_for(keeps: bool) -> None:
    batch = Batch([], [torch.zeros(4)], _distance, 1.0, keeps_outputs=keeps)
    output = torch.ones(4, requires_grad=True) * 2
    storage = StorageWeakRef(output.untyped_storage())
    batch.loss({"tensor": 0}, (output,), 0)
    del output
    assert storage.expired() is not keeps
    if keeps:
        assert torch.equal(batch.full_output({"tensor": 0}), torch.full((4,), 2.0))


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()
