"""What ranks that take turns at several stages keep, micro-batch by micro-batch, and choices that keep to the room."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from phalanx.auto.simulate.events import simulate
from phalanx.auto.simulate.values import PassWork, PipelineSpec, StageWork
from phalanx.auto.solver.min_memory import minimize_peak, peak_lower_bound
from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost
from phalanx.auto.solver.solve import solve
from phalanx.plan.value import Schedule


def test_stages_that_differ_hold_as_much_as_event_by_event():
    random = Random(2)
    for _ in range(100):
        ranks, virtual, rounds = random.randint(2, 8), random.randint(2, 5), random.choice((1, 2, 3, 5, 8))
        sizes = [random.choice((1.0, 2.0, random.uniform(1, 4), 0.0)) for _ in range(ranks * virtual)]
        problem = kept_by(sizes, ranks, virtual, rounds)
        works = tuple(
            StageWork(
                forward=PassWork(compute=1.0),
                inputs=PassWork(compute=1.0),
                weights=PassWork(compute=0.0),
                activation_bytes=size,
            )
            for size in sizes
        )
        pipeline = PipelineSpec(
            schedule=Schedule(kind="interleaved", virtual=virtual, microbatches=problem.micro_batches),
            ranks=ranks,
            stages=works,
            persistent_bytes=(0.0,) * ranks,
            optimizer=(0.0,) * ranks,
        )
        memory = problem.memory(dict.fromkeys(problem.decisions, 0), range(len(sizes)))
        assert simulate(pipeline).peaks == pytest.approx([rank.total for rank in memory])


def kept_by(sizes: list[float], ranks: int, virtual: int, rounds: int) -> StepProblem:
    """Return a chain of pieces that keep so much for their backward passes."""
    options = [StrategyCost(label="", forward_s=1.0, activation_bytes=size) for size in sizes]
    return StepProblem(
        nodes=tuple(
            LayerNode(name=str(piece), decision=str(piece), options=(option,)) for piece, option in enumerate(options)
        ),
        pieces=tuple(range(len(sizes))),
        sends=(0.0,) * (len(sizes) - 1),
        ranks=ranks,
        virtual=virtual,
        micro_batches=rounds * ranks,
    )


def test_the_least_memory_of_stages_that_take_turns_is_that_of_the_best_cut():
    random = Random(3)
    for _ in range(15):
        problem = kept_by([random.uniform(1, 4) for _ in range(7)], 2, 2, random.randint(1, 3))
        pick = dict.fromkeys(problem.decisions, 0)
        peaks = [problem.peak(pick, np.repeat(range(4), np.diff([0, *cut, 7]))) for cut in inner_borders(7)]
        least = minimize_peak(problem)
        assert least is not None
        assert least.peak == pytest.approx(min(peaks))
        assert peak_lower_bound(problem) <= min(peaks)


@pytest.mark.parametrize("most_picks", [100_000, 0])  # the search, and the program
def test_with_room_for_one_cut_alone_that_is_chosen(most_picks, monkeypatch):
    monkeypatch.setattr("phalanx.auto.solver.stage_partition._MOST_PICKS", most_picks)
    random = Random(4)
    for _ in range(8):
        problem = kept_by([random.uniform(1, 4) for _ in range(6)], 2, 2, random.randint(1, 3))
        pick = dict.fromkeys(problem.decisions, 0)
        cuts = [tuple(np.repeat(range(4), np.diff([0, *cut, 6])).tolist()) for cut in inner_borders(6)]
        fullest = {stage_of: problem.peak(pick, stage_of) for stage_of in cuts}
        solution = solve(replace(problem, room=min(fullest.values())))
        assert solution is not None
        assert solution.stage_of == min(fullest, key=fullest.__getitem__)


@pytest.mark.parametrize("all_cuts", [4_000, 0])  # the best of all, and of numbers of equal pieces by rank
def test_a_chain_of_equal_pieces_keeps_to_its_room(all_cuts, monkeypatch):
    monkeypatch.setattr("phalanx.auto.solver.stage_partition._ALL_CUTS", all_cuts)
    random, gaps = Random(5), []
    for _ in range(30):
        sizes = [random.uniform(0, 3), *[random.uniform(1, 2)] * random.randint(4, 6), random.uniform(0, 5)]
        problem = kept_by(sizes, 2, 2, random.randint(1, 3))
        nodes = [
            replace(node, decision="block") if 0 < i < len(sizes) - 1 else node for i, node in enumerate(problem.nodes)
        ]
        problem = replace(problem, nodes=tuple(nodes))
        pick = dict.fromkeys(problem.decisions, 0)
        cuts = [np.repeat(range(4), np.diff([0, *cut, len(sizes)])).tolist() for cut in inner_borders(len(sizes))]
        peaks = sorted(problem.peak(pick, stage_of) for stage_of in cuts)
        problem = replace(problem, room=random.choice((peaks[0] * 0.99, peaks[0], peaks[2], peaks[len(peaks) // 2])))
        times = [problem.seconds(pick, stage_of) for stage_of in cuts if problem.fits(pick, stage_of)]
        solution = solve(problem)
        assert (solution is None) == (not times)
        if solution is not None:
            assert problem.fits(solution.pick, solution.stage_of)
            assert solution.bound <= min(times) * (1 + 1e-9)
            gaps.append(solution.seconds / min(times) - 1)
    assert len(gaps) > 10
    assert max(gaps) < 0.01


def inner_borders(pieces: int) -> list[tuple[int, ...]]:
    """Return where the second, third and fourth stage of pieces can begin."""
    return list(itertools.combinations(range(1, pieces), 3))
