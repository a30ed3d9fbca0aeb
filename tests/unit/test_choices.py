"""The solver of choices finds what trying everything finds, and its bound holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.auto.solver.milp import Program, ProgramSolution
from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost, TransitionCost
from phalanx.auto.solver.solve import solve

FIELDS = (
    "forward_s",
    "backward_s",
    "grad_sync_s",
    "update_s",
    "persistent_bytes",
    "activation_bytes",
    "workspace_bytes",
    "update_bytes",
    "recomputed_bytes",
)

whole = st.integers(0, 20)
options = st.builds(
    lambda late, *values: with_late_gradients(StrategyCost(label="", **dict(zip(FIELDS, values, strict=True))), late),
    st.sampled_from((0.0, 0.5, 1.0)),
    *[whole.map(float)] * len(FIELDS),
)


def with_late_gradients(cost: StrategyCost, part: float) -> StrategyCost:
    """Return a cost whose backward pass makes a part of what is persistent."""
    return replace(cost, late_bytes=part * cost.persistent_bytes)


@st.composite
def graphs(draw: st.DrawFn) -> StepProblem:
    """Up to six nodes with up to three options, of which some are tied and some linked."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    owners = [*range(len(counts)), *draw(st.lists(st.integers(0, len(counts) - 1), max_size=2))]
    nodes = tuple(
        LayerNode(
            name=str(n), decision=str(d), options=tuple(draw(options) for _ in range(counts[d])), block=str(n // 2)
        )
        for n, d in enumerate(owners)
    )
    links = []
    for first, second in draw(st.lists(st.tuples(*[st.integers(0, len(counts) - 1)] * 2), max_size=4, unique=True)):
        if first != second:
            cost = st.one_of(whole.map(float), st.just(math.inf))
            pairs = {p: draw(cost) for p in itertools.product(range(counts[first]), range(counts[second]))}
            links.append(TransitionCost(first=str(first), second=str(second), seconds=pairs))
    return StepProblem(
        nodes=nodes,
        transitions=tuple(links),
        room=draw(st.one_of(st.just(math.inf), st.integers(1, 150).map(float))),
        contention=draw(st.sampled_from((0.0, 0.1, 0.5, 1.0))),
    )


def all_picks(choices: StepProblem):
    names = list(choices.decisions)
    for places in itertools.product(*(range(choices.decisions[name]) for name in names)):
        yield dict(zip(names, places, strict=True))


def best_by_trying(choices: StepProblem) -> float:
    return min((choices.seconds(p) for p in all_picks(choices) if choices.fits(p)), default=math.inf)


@settings(max_examples=100)
@given(graphs())
def test_the_solver_finds_what_trying_everything_finds(choices: StepProblem):
    found, best = solve(choices), best_by_trying(choices)
    if found is None:
        assert best == math.inf
        return
    assert found.seconds == pytest.approx(best, rel=1e-7, abs=1e-9)
    assert choices.fits(found.pick)
    assert found.bound <= best * (1 + 1e-7)


def random_choices(random: Random) -> StepProblem:
    """A larger step than a strategy draws: a chain of eight nodes, of which the second half repeats the first."""
    counts = [random.randint(1, 3) for _ in range(4)]

    def option(place: int) -> StrategyCost:
        drawn = [random.expovariate(1) for _ in range(9)]
        return StrategyCost(
            label=str(place), forward_s=drawn[0], backward_s=drawn[1], grad_sync_s=2 * drawn[2], update_s=drawn[3] / 4,
            persistent_bytes=drawn[4], late_bytes=drawn[4] * random.random(), activation_bytes=drawn[5],
            workspace_bytes=drawn[6], update_bytes=4 * drawn[7], recomputed_bytes=drawn[8],
        )  # fmt: skip

    nodes = tuple(
        LayerNode(
            name=str(n),
            decision=str(n % 4),
            options=tuple(option(o) for o in range(counts[n % 4])),
            block="" if n < 2 else str(n // 3),
        )
        for n in range(8)
    )
    links = tuple(
        TransitionCost(
            first=str(one),
            second=str(one + 1),
            seconds={
                p: random.choice((0.0, random.random(), math.inf))
                for p in itertools.product(range(counts[one]), range(counts[one + 1]))
            },
        )
        for one in range(3)
    )
    room = random.choice((math.inf, random.uniform(8, 24)))
    return StepProblem(nodes=nodes, transitions=links, room=room, contention=random.random())


def test_the_solver_finds_the_best_of_chains_with_repeated_parts():
    random = Random(0)
    for _ in range(150):
        choices = random_choices(random)
        found, best = solve(choices), best_by_trying(choices)
        assert (math.inf if found is None else found.seconds) == pytest.approx(best, rel=1e-7)
        assert found is None or found.bound <= best * (1 + 1e-7)


@settings(max_examples=40)
@given(graphs(), st.floats(1.01, 3), st.sampled_from(("room", "forward_s", "grad_sync_s", "backward_s")))
def test_more_of_anything_is_never_slower(choices: StepProblem, factor: float, what: str):
    if what == "room":
        better = replace(choices, room=choices.room * factor)
    else:
        nodes = tuple(
            replace(node, options=tuple(replace(o, **{what: getattr(o, what) / factor}) for o in node.options))
            for node in choices.nodes
        )
        better = replace(choices, nodes=nodes)
    before, after = solve(choices), solve(better)
    if before is not None:
        assert after is not None
        assert after.seconds <= before.seconds * (1 + 1e-7)


@settings(max_examples=40)
@given(graphs())
def test_what_is_not_faster_than_asked_is_not_returned(choices: StepProblem):
    best = best_by_trying(choices)
    if 0 < best < math.inf:
        assert solve(choices, below=best) is None
        found = solve(choices, below=best * 1.01 + 0.01)
        assert found is not None
        assert found.seconds == pytest.approx(best, rel=1e-7)


def test_exchanges_run_beside_the_backward_passes_that_are_left():
    early, late = (
        StrategyCost(label="", backward_s=4, grad_sync_s=3),
        StrategyCost(label="", backward_s=2, grad_sync_s=10),
    )
    nodes = (LayerNode(name="a", decision="a", options=(early,)), LayerNode(name="b", decision="b", options=(late,)))
    # b's backward pass ends at 2, its exchange at 12; a's starts then and ends at 15.
    assert StepProblem(nodes=nodes).seconds({"a": 0, "b": 0}) == 15
    assert StepProblem(nodes=nodes, contention=1.0).seconds({"a": 0, "b": 0}) == 19
    assert StepProblem(nodes=nodes, contention=0.5).seconds({"a": 0, "b": 0}) == 17


def test_tied_nodes_with_other_options_are_refused():
    one, two = StrategyCost(label="one"), StrategyCost(label="two")
    with pytest.raises(ValueError, match="different numbers of options"):
        StepProblem(
            nodes=(
                LayerNode(name="a", decision="d", options=(one,)),
                LayerNode(name="b", decision="d", options=(one, two)),
            )
        )


@pytest.mark.parametrize("is_found", [False, True])
def test_what_time_leaves_open_is_not_said_to_be_impossible(monkeypatch, is_found: bool):
    options = StrategyCost(label="slow", forward_s=3), StrategyCost(label="fast", forward_s=1)
    choices = StepProblem(nodes=(LayerNode(name="a", decision="a", options=options),))

    def solved(program: Program, *, time_limit: float | None, below: float) -> ProgramSolution:
        if not is_found:
            raise TimeoutError
        return ProgramSolution([1.0, 0.0, 0.0], bound=0.5 / program.second, is_proved=False)

    monkeypatch.setattr(Program, "solve", solved)
    with pytest.raises(TimeoutError):
        solve(choices, time_limit=1.0, below=2.0)


def test_a_program_that_has_no_time_says_so():
    choices = random_choices(Random(3))
    program = Program(choices, 1.0)
    with pytest.raises(TimeoutError, match="in time"):
        program.solve(time_limit=0.0, below=math.inf)
