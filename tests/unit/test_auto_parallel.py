"""The planner of modules finds the best Plan of its space, and its Plans can be applied."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.auto.capture.layers import ALL_STRATEGIES, PARTS, LayerStrategy
from phalanx.auto.cost.operators import ShardFraction
from phalanx.auto.planner import planner
from phalanx.auto.planner.lower_bound import LowerBound
from phalanx.auto.planner.report.picture import COLOURS, draw_plan
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.search.request import read_size
from phalanx.auto.search.result import format_percent
from phalanx.auto.shape_check import find_shardable_layers
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.units import format_bytes
from tensor_models import Transformer


class Hybrid(nn.Module):
    """Convolutions that compute much, and linear layers that hold much: AlexNet, small."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(3600, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class FixedHeads(nn.Module):
    """Attention that names its number of heads, so that no rank can compute some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean((1, 2))


class Tokens(nn.Module):
    """Layers between which tokens may be apart, each a piece of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(F.relu(self.up(self.norm(self.tokens(ids))))))


IMAGES = torch.zeros(32, 3, 64, 64), torch.zeros(32, dtype=torch.long)
TOKENS = torch.zeros(8, 16, dtype=torch.long), torch.zeros(8, 16, dtype=torch.long)


def of_tokens(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


SLOW = "a100x1,nodes=2,gbps=1"
"""Cards between which little travels: what a layer exchanges decides."""

SLOW_CARDS = {
    "nodes": [{"device": "slow", "devices": 2}],
    "devices": [{"name": "slow", "like": "A100-80GB-SXM", "tflops": {"fp32": 0.02}, "link_gb_s": 2}],
}


@cache
def subject(name: str) -> tuple[nn.Module, Any, Any]:
    """A model with its sample and loss; it is the same one in every plan, which would keep its weights otherwise."""
    torch.manual_seed(0)
    return {
        "hybrid": lambda: (Hybrid(), IMAGES, F.cross_entropy),
        "tokens": lambda: (Tokens(), TOKENS, of_tokens),
        "transformer": lambda: (Transformer(), TOKENS, of_tokens),
        "heads": lambda: (FixedHeads(), (torch.zeros(8, 16, 64), torch.zeros(8)), F.mse_loss),
    }[name]()


@pytest.fixture(autouse=True, scope="module")
def nothing_kept() -> Iterator[None]:
    yield
    planned.cache_clear()
    subject.cache_clear()


@cache
def planned(
    name: str,
    cluster: str,
    *limits: str,
    memory: float | None = None,
    optimizer: str = "sgd",
    return_outputs: bool = True,
) -> PlanResult:
    model, sample, loss = subject(name)
    where = read_cluster(SLOW_CARDS) if cluster == "slow" else cluster
    return px.auto_parallel(
        model,
        sample,
        loss,
        cluster=where,
        limits=limits,
        memory=memory,
        optimizer=optimizer,
        return_outputs=return_outputs,
    )


def every_plan(answer: PlanResult) -> list[tuple[float, float]]:
    """Return seconds and peak of every pick, and every split into stages, of every arrangement."""
    found = []
    for at in answer.search.configs:
        choices = build_problem(answer.work, at, answer.catalog.of(at), answer.room).problem
        for places in itertools.product(*(range(count) for count in choices.decisions.values())):
            pick = dict(zip(choices.decisions, places, strict=True))
            pieces = choices.piece_count
            for cut in itertools.combinations(range(1, pieces), choices.stages - 1):
                stages = [sum(piece >= start for start in cut) for piece in range(pieces)]
                found.append((choices.seconds(pick, stages), choices.peak(pick, stages)))
    return found


@pytest.mark.parametrize(
    ("name", "cluster", "limits"),
    [
        ("hybrid", SLOW, ()),
        ("hybrid", "a100x1,nodes=4,gbps=1", ("micro=2", "zero<=1")),
        ("hybrid", "slow", ("pp=2",)),
        ("heads", "a100x2", ()),
        ("tokens", "a100x4", ("tp=2", "pp=2", "micro=2")),
    ],
)
def test_the_search_finds_what_trying_every_plan_finds(name, cluster, limits):
    answer = planned(name, cluster, *limits)
    tried = every_plan(answer)
    assert len(tried) > 20
    assert answer.seconds == pytest.approx(min(seconds for seconds, peak in tried if peak <= answer.room), rel=1e-7)
    assert answer.bound <= answer.seconds
    assert answer.gap == 0
    # With room for less than the fastest needs, another one is the best.
    tight = planned(name, cluster, *limits, memory=answer.memory * 0.9)
    fitting = [seconds for seconds, peak in every_plan(tight) if peak <= tight.room]
    assert tight.seconds == pytest.approx(min(fitting), rel=1e-7)
    assert tight.memory <= tight.room * (1 + 1e-9)


@pytest.mark.parametrize(("name", "cluster", "limits"), [("hybrid", SLOW, ()), ("heads", "a100x2", ())])
def test_the_search_finds_what_trying_every_plan_finds_where_the_loop_lets_outputs_go(name, cluster, limits):
    kept = planned(name, cluster, *limits)
    released = planned(name, cluster, *limits, return_outputs=False)
    assert released.seconds == pytest.approx(kept.seconds)  # there is room for either
    peaks = zip(every_plan(kept), every_plan(released), strict=True)
    assert all(after <= before * (1 + 1e-9) for (_, before), (_, after) in peaks)
    assert released.memory < kept.memory
    for part in (0.75, 0.85, 0.95):
        tight = planned(name, cluster, *limits, memory=released.memory * part, return_outputs=False)
        fitting = [seconds for seconds, peak in every_plan(tight) if peak <= tight.room]
        assert tight.seconds == pytest.approx(min(fitting), rel=1e-7)
        assert tight.bound <= tight.seconds
        assert max(tight.simulate().simulation.peaks) == pytest.approx(tight.memory)


class OwnProduct(nn.Module):
    """Has no style, and on an accelerator takes longer in parts of few rows, which are cut along the inner dim too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize(
    ("blocks", "rows", "again"),
    [
        ([nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)], 16, 3),
        ([nn.Sequential(*(OwnProduct() for _ in range(16)))], 3840, 1),
    ],
)
def test_no_arrangement_is_faster_than_its_arithmetic(blocks, rows, again):
    answer = px.auto_parallel(nn.Sequential(*blocks, nn.Linear(64, 8)), torch.zeros(rows, 64), cluster="a100x4")
    assert len({at.recompute for at in answer.search.configs}) == again
    first = LowerBound(answer.catalog, answer.work)
    for at in answer.search.configs:
        by_arithmetic = planner.pipeline_lower_bound(answer.work.least_s(at), at.stages, at.virtual, at.micro_batches)
        assert 0 < by_arithmetic <= first.least_s(at) * (1 + 1e-11), str(at)


def test_what_leaves_a_model_without_its_loss_is_whole():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 512))
    answer = px.auto_parallel(model, torch.zeros(8, 64), cluster="a100x2", limits=("tp=2",))
    ways = build_problem(
        answer.work, answer.search.best.config, answer.catalog.of(answer.search.best.config)
    ).strategies
    last = answer.layers.calls[-1]
    assert {way.output_state for way in ways[str(last.template)]} == {"whole"}
    assert LayerStrategy("column", output_state="features") in ways[str(answer.layers.calls[0].template)]


def test_what_a_model_returns_is_whole_though_it_reads_it_too():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 512)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.up(x)
            return hidden, self.down(hidden)

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs[1], target)

    for arguments in ((torch.zeros(8, 64),), ((torch.zeros(8, 64), torch.zeros(8, 512)), loss)):
        answer = px.auto_parallel(Hidden(), *arguments, cluster="a100x2", limits=("tp=2",))
        ways = build_problem(
            answer.work, answer.search.best.config, answer.catalog.of(answer.search.best.config)
        ).strategies
        first = next(segment for segment in answer.layers.calls if segment.path == "up")
        assert {way.output_state for way in ways[str(first.template)]} == {"whole"}


def test_linear_layers_are_cut_and_convolutions_are_not_where_both_cost():
    """Krizhevsky's hybrid (arXiv:1404.5997) is the best of all Plans where copies exchange too much and others idle."""
    answer = planned("hybrid", "slow")
    assert answer.seconds == pytest.approx(min(seconds for seconds, _ in every_plan(answer)), rel=1e-7)
    assert answer.search.best.config.shards_over_data
    assert {path for path in answer.search.best.sharded_layers} >= {"classifier.0", "classifier.3"}
    assert answer.plan.step.batch_axes == ("data",)
    assert answer.plan.rule_for("features.0.weight").managed == "phalanx"
    assert answer.plan.rule_for("classifier.3.weight").managed == "module"


def test_copies_are_best_where_there_is_little_to_exchange():
    small = px.auto_parallel(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(28800, 2)),
        IMAGES,
        F.cross_entropy,
        cluster="cpux2",
        optimizer="sgd",
        limits=["*=whole"],
    )
    assert small.search.best.config.data == 2
    assert not small.search.best.sharded_layers


def test_attention_and_mlp_are_cut_over_columns_then_rows():
    for column, row in (("block.q", "block.o"), ("block.mlp.0", "block.mlp.3")):
        forced = planned(
            "transformer", "a100x2", "tp=2", f"{column}=column", f"{row}=row", "block.k=column", "block.v=column"
        )
        cut = {path: str(way) for path, way in forced.search.best.sharded_layers.items()}
        assert cut[column] == "column to cut"
        assert cut[row] == "row from cut"


def test_a_chain_is_cut_into_stages_of_even_work():
    answer = planned("transformer", "slow", "pp=2", "micro=4", "schedule=1f1b")
    assert answer.plan.schedule.kind == "1f1b"
    assert answer.plan.schedule.microbatches == 4
    stages = {rule.match: rule.stage for rule in answer.plan.modules if rule.stage is not None}
    assert set(stages.values()) == {0, 1}
    assert stages["tokens"] == 0
    assert stages["head"] == 1


def test_parts_are_tried_with_stages_where_a_limit_asks_for_them():
    unasked = planned("hybrid", "a100x4", "pp=2", "tp=2")
    asked = planned("hybrid", "a100x4", "pp=2", "tp=2", "features.0=parts")
    assert "modules in parts together with stages, but for those that a limit asks for" in unasked.left_out
    assert not any(PARTS in one.call_strategies for one in unasked.search.top_k)
    assert all(PARTS in one.call_strategies for one in asked.search.top_k)
    assert asked.search.top_k


def test_a_model_that_cannot_be_cut_into_stages_says_why():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    sample = torch.zeros(4, 8), torch.zeros(4, 8)
    answer = px.auto_parallel(Backwards(), sample, F.mse_loss, cluster="a100x2")
    assert "not searched: pipelines, as the forward pass does not call the model's units in the order" in str(answer)
    assert answer.to_json()["space"]["stages"] == [1]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_attention_that_drops_scores_is_not_cut(share):
    """Each rank would drop the same of its heads."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
            seen = F.scaled_dot_product_attention(q, k, v, dropout_p=share)
            return self.o(seen.transpose(1, 2).flatten(2)).mean((1, 2))

    limits = ("tp=2", "[qkv]=column", "o=row")
    sample = torch.zeros(8, 16, 64), torch.zeros(8)
    answer = px.auto_parallel(Attention(), sample, F.mse_loss, cluster="a100x2", limits=limits)
    assert str(answer.search.best.strategies["o"]) == ("row" if share else "row from cut")


def test_code_that_names_its_heads_is_not_left_with_some():
    answer = planned("heads", "a100x2", "tp=2", "q=column", "o=row")
    ways = {path: str(way) for path, way in answer.search.best.sharded_layers.items()}
    assert ways["q"] == "column"
    assert ways["o"] == "row"


def test_more_memory_is_never_slower_and_too_little_says_how_much():
    best = planned("hybrid", SLOW)
    times = [planned("hybrid", SLOW, memory=best.memory * share).seconds for share in (0.7, 0.8, 1.0, 2.0)]
    assert times == sorted(times, reverse=True)
    with pytest.raises(
        PlanError, match=r"every one needs [\d.]+ MiB a rank or more .*, most of it parameters.* there are 1 MiB"
    ):
        planned("hybrid", SLOW, memory=2**20)


def test_faster_links_are_never_slower():
    seconds = [planned("hybrid", f"a100x1,nodes=4,gbps={gbps}").seconds for gbps in (1, 10, 100, 1000)]
    assert seconds == sorted(seconds, reverse=True)


def test_adam_and_its_state_are_counted():
    sgd, adam = planned("hybrid", SLOW), planned("hybrid", SLOW, optimizer="adam")
    assert adam.memory > sgd.memory


def test_an_answer_says_what_was_searched_and_why():
    answer = planned("hybrid", SLOW)
    told = answer.to_json()
    assert told["gap_percent"] == 0
    assert told["captured"] == "graph"
    assert told["space"]["zero"] == [0, 1, 2, 3]
    assert {one["kind"] for one in told["traffic"]} <= {"all_gather", "all_to_all", "all_reduce", "reduce_scatter"}
    assert told["traffic"]
    assert 0 < told["listed"] <= told["arrangements"]
    assert [one["step_time_s"] for one in told["top_k"]] == sorted(one["step_time_s"] for one in told["top_k"])
    assert "Fastest Plan of each configuration" in str(answer)
    assert "> " in answer.explain("classifier.3")
    assert "ms a step, +" in answer.why_not("*=whole")
    with pytest.raises(ConfigError, match=r"does not call.*classifier.3.*It calls features.0, .* more\."):
        answer.explain("classifier.33")
    assert "keeps to zero<=3 already" in answer.why_not("zero<=3")
    with pytest.raises(ConfigError, match="why_not needs a limit"):
        answer.why_not()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "net"}, "takes a torch.nn.Module, got str"),
        ({"limits": "tp=2"}, r"Write limits=\['tp=2'\]"),
        ({"memory": 0}, "memory=0. Give a number above 0"),
        ({"memory": -1}, "memory=-1. Give a number above 0"),
        ({"memory": "much"}, "memory='much'. Give bytes, or an amount such as '8GiB'"),
        ({"memory": "0GiB"}, "memory=0.0. Give a number above 0"),
        ({"memory": [8]}, r"memory=\[8\]. Give bytes"),
        ({"top_k": 0}, "top_k=0. Give a number above 0"),
        ({"top_k": "5"}, "top_k=5. Give a number above 0"),
        ({"time_limit": -1}, "time_limit=-1. Give seconds, 0 or more"),
        ({"time_limit": "5"}, "time_limit='5'. Give seconds, 0 or more"),
    ],
)
def test_what_could_never_be_planned_is_named(asked, message):
    with pytest.raises(ConfigError, match=message):
        px.auto_parallel(asked.pop("model", Hybrid()), IMAGES, F.cross_entropy, cluster="a100x2", **asked)


@pytest.mark.parametrize(("words", "size"), [("1GiB", 2**30), ("1.5 Gi", 1.5 * 2**30), ("900MB", 9e8), ("7", 7)])
def test_sizes_are_read_as_people_write_them(words, size):
    assert read_size(words) == size


def test_memory_may_be_said_in_words():
    assert planned("hybrid", SLOW, memory="2GiB").room == 2**31


def test_percentages_and_sizes_are_said_with_their_digits():
    assert [format_percent(gap) for gap in (0.0, 0.123, 9.96, 12.3, 99.7, 200.0)] == [
        "0",
        "0.12",
        "10",
        "12",
        "100",
        "200",
    ]
    assert format_bytes(1.0641 * 2**30, up=True) == "1.065 GiB"
    assert format_bytes(1.0641 * 2**30) == "1.064 GiB"


@pytest.mark.parametrize("limits", [("pp=1", "micro=4"), ("micro>=3",), ("micro=4", "zero=1", "pp=1")])
def test_gradient_accumulation_is_named_as_not_searched(limits):
    cluster = "a100x1" if "pp=1" not in limits else SLOW
    with pytest.raises(
        PlanError, match=r"not searched: micro-batches without stages.*strategy\.gradient_merge adds up"
    ):
        planned("hybrid", cluster, *limits)
    with pytest.raises(PlanError) as error:
        planned("hybrid", SLOW, "pp=2", "micro=3")
    assert "without stages" not in str(error.value)
    shown = " ".join(str(planned("hybrid", SLOW)).split())
    assert "not searched: micro-batches without stages, which is gradient accumulation" in shown
    assert "micro_batches (how many, of stages) 1, 2" in shown


@pytest.mark.parametrize("limits", [("dp=2", "zero=1"), ("dp=2", "zero=3"), ("pp=2", "dp=2", "zero=2")])
def test_sharding_is_a_part_of_its_own(limits):
    best = planned("tokens", "a100x4" if "pp=2" in limits else "a100x2", *limits).search.best
    parts = best.parts
    assert parts["sharding"] > 0
    assert parts["collectives of layers"] == parts["exchange of gradients"] == 0
    assert sum(parts.values()) == pytest.approx(best.step_time_s)


def test_collectives_of_layers_are_told_from_sharding():
    both = planned("tokens", "a100x4", "tp=2", "dp=2", "zero=1").search.best
    assert both.parts["collectives of layers"] > 0
    assert both.parts["sharding"] > 0
    assert sum(both.parts.values()) == pytest.approx(both.step_time_s)
    plain = planned("tokens", "a100x4", "tp=2", "dp=2", "zero=0").search.best
    assert plain.parts["sharding"] == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["tpp=2"], "Write a knob .* or a layer and one of whole, column, row, vocab"),
        (["clasifier.*=row"], r"the model calls no layer 'clasifier\.\*'\. Did you mean 'classifier"),
        (["classifier.0=diagonal"], "one of whole, column, row, vocab"),
        (["tp=3"], "No parallel configuration keeps to the limits"),
        (["features.0=column"], "'features.0' is a Conv2d, and 'column' is a style of Linear. Use another"),
    ],
)
def test_limits_that_cannot_be_are_named(limits, message):
    with pytest.raises((ConfigError, PlanError), match=message):
        planned("hybrid", SLOW, *limits)


def test_a_plan_is_drawn_with_every_layer_and_its_place():
    picture = draw_plan(planned("transformer", "slow", "pp=2"))
    root = ElementTree.fromstring(picture)
    said = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"tokens", "block.q", "head", "loss"} <= set(said)
    assert "whole, stage 0" in said
    assert "whole, stage 1" in said


def test_every_style_has_a_colour():
    assert {way.style for way in ALL_STRATEGIES if way.style} < COLOURS.keys()
    picture = draw_plan(planned("hybrid", "a100x2", "tp=2", "features.1=parts"))
    assert f'fill="{COLOURS["parts"]}"/>' in picture
    assert ">parts</text>" in picture


def test_settings_that_the_planner_decides_are_refused():
    strategy = px.DistributedStrategy()
    strategy.sharding = True
    with pytest.raises(PlanError, match=r"strategy.sharding sets what the planner is to decide"):
        px.auto_parallel(Hybrid(), IMAGES, F.cross_entropy, cluster="cpux2", strategy=strategy)


def test_a_plan_is_kept_in_a_small_file(tmp_path):
    for number, plan in enumerate(planned("hybrid", SLOW).top_k):
        path = tmp_path / f"{number}.json"
        save_plan(plan, path)
        assert load_plan(path).digest() == plan.digest()
        assert path.stat().st_size < 10_000


def test_two_searches_find_the_same():
    found = [px.auto_parallel(Transformer(), TOKENS, of_tokens, cluster="a100x2").plan.digest() for _ in range(2)]
    assert found[0] == found[1]


class Scaled(nn.Module):
    """Parameters of the model itself, the one without dims."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


@pytest.mark.parametrize("model", [nn.Linear(8, 10), nn.ReLU()])
def test_a_model_without_parts_has_plans(model):
    answer = px.auto_parallel(model, (torch.zeros(4, 8), torch.zeros(4).long()), F.cross_entropy, cluster="a100x2")
    assert answer.plan.world_size == 2
    assert "not searched: pipelines, as the model holds no modules with parameters" in str(answer)


def test_what_sharding_cannot_cut_is_not_sharded():
    sample = torch.zeros(4, 64), torch.zeros(4).long()
    flat = px.auto_parallel(Scaled(), sample, F.cross_entropy, cluster="a100x4")
    assert flat.space["zero"] == (0,)
    assert "sharding, as parameter 'scale' has no dim to cut: give it shape (1,)" in flat.left_out
    outside = px.auto_parallel(Scaled(1), sample, F.cross_entropy, cluster="a100x4")
    assert {at.zero for at in outside.search.configs if at.stages == 1} == {0, 1, 2, 3}
    assert {at.zero for at in outside.search.configs if at.stages > 1} == {0}
    assert "sharding of stages, as parameter 'scale' is in no unit alone" in str(outside)


class OwnLinear(nn.Linear):
    """A linear layer that may compute anything."""


OwnLinear.__name__ = "Linear"


def test_only_layers_that_can_have_a_style_are_cut():
    def layers(first: nn.Module) -> nn.Module:
        return nn.Sequential(first, nn.ReLU(), nn.Linear(4096, 8))

    sample = torch.zeros(4, 4096), torch.zeros(4).long()
    normed = nn.utils.spectral_norm(nn.Linear(4096, 4096))
    for first in (OwnLinear(4096, 4096), normed):
        answer = px.auto_parallel(layers(first), sample, F.cross_entropy, cluster="a100x2", limits=["tp=2"])
        assert set(answer.search.best.sharded_layers) == {"2"}
    tokens = torch.zeros(4, 4, dtype=torch.long), torch.zeros(4, 4, 512)
    kept = nn.Sequential(nn.Embedding(4096, 4096, max_norm=1.0), nn.Linear(4096, 512))
    answer = px.auto_parallel(kept, tokens, F.mse_loss, cluster="a100x2", limits=["tp=2"])
    assert set(answer.search.best.sharded_layers) == {"1"}


def test_what_the_planner_may_cut_is_what_px_shard_takes():
    model = nn.Sequential(nn.Linear(8, 8), OwnLinear(8, 8), nn.Embedding(8, 8), nn.Embedding(8, 8, max_norm=1.0))
    styles = {"Linear": "column", "Embedding": "vocab"}
    for path, module in model.named_children():
        strategy = px.DistributedStrategy()
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
        plan = plan_from_strategy(strategy, shape_of(model), 2)
        bias = f"{path}.bias" if isinstance(module, nn.Linear) else None
        cut = Styled(module=path, style=styles[type(module).__name__], weight=f"{path}.weight", bias=bias)
        plan = with_cut_layers(plan, [cut], "model")
        if path in find_shardable_layers(model):
            check_styles(plan, model)
        else:
            with pytest.raises(PlanError):
                check_styles(plan, model)


def test_sparse_gradients_are_refused_before_a_search():
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(PlanError, match=r"module '0' makes sparse gradients.*Build it with sparse=False"):
        px.auto_parallel(model, torch.zeros(4, dtype=torch.long), lambda out: out.sum(), cluster="a100x2")


def test_a_search_that_time_stops_keeps_a_bound(monkeypatch):
    """Whatever was not solved by then may be as fast as its own bound says."""
    best, solve_one, late = planned("hybrid", SLOW), planner.solve, []

    def slow(choices, *, time_limit, below):
        if late and time_limit is not None:
            raise TimeoutError
        late.append(choices)
        return solve_one(choices, time_limit=None, below=below)

    monkeypatch.setattr(planner, "solve", slow)
    answer = px.auto_parallel(Hybrid(), IMAGES, F.cross_entropy, cluster=SLOW, optimizer="sgd", time_limit=60)
    assert len(late) == 1
    assert answer.bound <= best.seconds * (1 + 1e-9)
    assert answer.gap >= 0
    monkeypatch.undo()
    stopped = px.auto_parallel(Hybrid(), IMAGES, F.cross_entropy, cluster=SLOW, optimizer="sgd", time_limit=0)
    assert 0 < stopped.bound <= best.seconds * (1 + 1e-9) <= stopped.seconds * (1 + 2e-9)


def test_rows_that_do_not_divide_are_counted_where_most_of_them_are():
    at = {at.data: at for at in planner.list_configs(4, has_blocks=False, batch_size=6) if at.model == at.stages == 1}[
        4
    ]
    assert at.batch_parts == 3  # two of six rows on the ranks that have most
    uneven = [at for at in planner.list_configs(4, has_blocks=False, max_stages=4, batch_size=5) if at.stages == 2]
    assert {at.micro_batches for at in uneven if at.data == 2} == {1}
    single = planner.list_configs(8, has_blocks=False, max_stages=4, batch_size=1)
    assert {at.data for at in single if at.stages > 1} == {1}


def test_what_is_frozen_has_no_backward_pass():
    def works(*frozen: int) -> list[tuple[bool, float]]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        for place in frozen:
            model[place].requires_grad_(False)
        answer = px.auto_parallel(model, (torch.zeros(4, 64), torch.zeros(4, 64)), F.mse_loss, cluster="a100x1")
        return [(one.is_first, answer.work.times(one, ShardFraction()).backward) for one in answer.work.all]

    trained, front, middle = works(), works(0, 2), works(2)
    assert [first for first, _ in trained] == [True, False, False, False, False, False]
    assert [first for first, _ in front] == [True, True, True, True, True, False]
    assert [seconds == 0 for _, seconds in front] == [True, True, True, True, False, False]
    assert trained[2][1] / 2 <= middle[2][1] < 0.6 * trained[2][1]  # of products, the gradient of its inputs alone
    assert all(middle[place] == trained[place] for place in (0, 1, 3, 4, 5))


def test_sharding_holds_what_it_gathers():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False).requires_grad_(False))
    sample = torch.zeros(8, 64), torch.zeros(8, 64)
    answer = px.auto_parallel(model, sample, F.mse_loss, cluster="a100x4", optimizer="momentum")
    size = 64 * 64 * 4.0

    def bytes_of(zero: int, stages: int) -> list[tuple[float, float]]:
        """Return bytes held by each layer and of what is whole while it runs, without activations."""
        found = (at for at in answer.search.configs if at.zero == zero and at.model == at.virtual == 1)
        at = next(at for at in found if at.stages == stages and at.micro_batches == 1)
        options = [node.options[0] for node in build_problem(answer.work, at, answer.catalog.of(at)).problem.nodes]
        kept = 1 if stages == 1 else 0  # outputs that the model returns
        return [
            (
                (one.persistent_bytes - work.sample_bytes / at.data - kept * work.call.returned_bytes / at.data) / size,
                (one.workspace_bytes - work.call.temporary_bytes / at.batch_parts) / size,
            )
            for one, work in zip(options[:2], answer.work.all, strict=False)
        ]

    assert bytes_of(0, 1) == [(3, 1), (1, 0)]  # a gradient lies beside its bucket until that is full
    assert bytes_of(1, 1) == bytes_of(2, 1) == [(1.75, 1), (1.25, 0)]  # slices of all, and parameters gathered
    assert bytes_of(3, 1) == [(0.75, 2), (0.25, 1)]
    assert bytes_of(3, 2) == bytes_of(1, 2) == [(3, 0), (1.5, 0)]  # both are whole for all of a step


def test_what_cuts_the_loss_is_said_not_to_be_searched_and_a_way_of_another_kind_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
    sample = torch.zeros(4, 8), torch.zeros(4).long()
    answer = px.auto_parallel(model, sample, F.cross_entropy, cluster="a100x2")
    assert "not searched: a loss over logits sharded by class (`vocab` of a head)" in str(answer)
    with pytest.raises(PlanError, match=r"'2' is a Linear, and 'vocab' is a style of Embedding.*whole logits"):
        px.auto_parallel(model, sample, F.cross_entropy, cluster="a100x2", limits=["2=vocab"])
    with pytest.raises(PlanError, match=r"'1=column': '1' is a ReLU, and 'column' is a style of Linear. Use another.$"):
        px.auto_parallel(model, sample, F.cross_entropy, cluster="a100x2", limits=["1=column"])


def test_a_setting_that_excludes_what_was_planned_is_an_error_that_names_both():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    base = px.DistributedStrategy(dgc=True)
    answer = px.auto_parallel(model, torch.zeros(8, 64), cluster="a100x2", limits=("zero=1",), strategy=base)
    with pytest.raises(PlanError, match=r"strategy\.dgc and sharding, of the Plan data=2 model=1 zero=1"):
        answer.plan  # noqa: B018
    assert px.auto_parallel(model, torch.zeros(8, 64), cluster="a100x2", limits=("zero=0",), strategy=base).plan
