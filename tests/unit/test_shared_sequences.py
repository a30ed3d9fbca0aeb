"""Ranks share the sequences of blocks, style `context`, where the planner finds that faster or nothing else fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.auto import model_search
from phalanx.auto.capture.step import capture
from phalanx.auto.cost.layer_work import CallWork
from phalanx.auto.cost.operators import ShardFraction
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.report.traffic import count_traffic
from phalanx.auto.sequence_check import check_runs_in_parts
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.tensor.shard_api import with_shard_requests
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan.rules.rules import plan_from_strategy
from unit.test_auto_parallel import every_plan

WIDTH, HEADS, WORDS, LONG = 64, 2, 32, 2048
FEW = "a100x4"


class Block(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how, self.norm = how, nn.LayerNorm(WIDTH)
        self.qkv, self.o, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = torch.ones(128, 128, dtype=torch.bool) if how == "mask of a table" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "positions":
            x = x + torch.arange(x.shape[1]).unsqueeze(1)
        if self.how == "means":
            x = x - x.mean(1, keepdim=True)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        p, count = 0.1 if self.how == "drops" else 0.0, x.shape[1]
        if self.how == "by hand":
            y = (q @ k.mT).softmax(-1) @ v
        elif self.how in ("mask", "counted mask", "mask of a table"):
            seen = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
            if self.how == "counted mask":
                seen = torch.arange(count, device=x.device).unsqueeze(1) >= torch.arange(count, device=x.device)
            y = F.scaled_dot_product_attention(q, k, v, self.table[:count, :count] if "table" in self.how else seen)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        tokens = LONG if self.how == "fixed" else x.shape[1]
        x = x + self.o(y.transpose(1, 2).reshape(len(x), tokens, WIDTH))
        return x + F.gelu(self.mlp(x))


class Net(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x=x) if block.how == "keyword" else block(x)
            x = x.roll(1, 1) if block.how == "between" else x
        return self.head(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(rows: int, tokens: int = LONG) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return ids, ids


@cache
def planned(rows: int, *limits: str, memory: float | None = None, tokens: int = LONG) -> PlanResult:
    torch.manual_seed(0)
    return px.auto_parallel(Net(), batch(rows, tokens), loss, cluster=FEW, limits=limits, memory=memory)


@pytest.mark.parametrize(("rows", "limits"), [(1, ("tp=1", "pp=1")), (4, ("tp=1", "pp=1")), (4, ("cp>=2",))])
def test_the_search_finds_what_trying_every_plan_finds(rows: int, limits: tuple[str, ...]) -> None:
    answer = planned(rows, *limits)
    assert {config.attention for config in answer.search.configs if config.context > 1} == {"all_gather", "ring"}
    tried = every_plan(answer)
    assert len(tried) > 5
    assert answer.seconds == pytest.approx(min(seconds for seconds, peak in tried if peak <= answer.room), rel=1e-7)
    assert answer.bound <= answer.seconds
    assert answer.gap == 0
    tight = planned(rows, *limits, memory=(min(peak for _, peak in tried) + answer.memory) / 2)
    fitting = [seconds for seconds, peak in every_plan(tight) if peak <= tight.room]
    assert tight.seconds == pytest.approx(min(fitting), rel=1e-7)


def test_sequences_are_shared_where_there_are_fewer_samples_than_ranks_and_not_where_there_are_many() -> None:
    one, many = planned(1, "tp=1", "pp=1", tokens=16384), planned(64, "tp=1", "pp=1", tokens=64)
    assert one.search.best.config.context == 4
    assert many.search.best.config.context == 1
    assert {1, 2, 4} == {config.context for config in many.search.configs}
    assert many.space["context"] == (1, 2, 4)


def test_a_ring_is_chosen_where_all_keys_and_values_do_not_fit() -> None:
    gather, ring = (planned(1, f"attention={way}", "recompute=none", "cp=4") for way in ("all_gather", "ring"))
    assert gather.seconds < ring.seconds
    keys = 2 * 2 * LONG * WIDTH * 4  # of two blocks, keys and values
    assert gather.memory - ring.memory > keys
    tight = planned(1, "recompute=none", "cp=4", memory=(gather.memory + ring.memory) / 2)
    assert tight.search.best.config.attention == "ring"
    assert tight.seconds == pytest.approx(ring.seconds)
    with pytest.raises(PlanError, match=r"every one needs .* \(data=1 model=1 context=4 attention=ring"):
        planned(1, "recompute=none", "cp=4", memory=ring.memory - 1)


def test_what_a_ring_computes_again_and_keeps_is_that_of_its_products() -> None:
    ring, gather = (planned(1, f"attention={way}", "cp=4", "recompute=none") for way in ("ring", "all_gather"))
    work, config = ring.work, ring.search.best.config
    attends = next(one for one in work.all if one.sequence is not None and one.sequence.attention)
    plain, fused, part = work.machine.ring_operators, work.machine.operators, ShardFraction(samples=1 / 4)
    assert plain is not None  # of a GPU by its data sheet
    full, selective = (replace(config, recompute=kind) for kind in ("full", "selective"))
    # Four steps of 512 tokens and two heads of 32 features; of a causal mask half is skipped.
    rows = HEADS * 512 / 2
    scores_s = 4 * plain.operator_s("elementwise", 4 * rows * 512)
    merge_s = 3 * 2 * fused.operator_s("elementwise", LONG / 4 * WIDTH * 4)
    all_s = 4 * (2 * plain.matmul_s(rows, 512, 32) + scores_s) + merge_s
    others_s = work.recompute_s(attends, part, replace(gather.search.best.config, recompute="full"))
    others_s -= fused.attention_s(HEADS / 4, LONG, 32)
    assert work.recompute_s(attends, part, full) == pytest.approx(others_s + all_s)
    scores_again_s = work.recompute_s(attends, part, selective) - (4 * scores_s + merge_s)
    assert 0 <= scores_again_s < work.recompute_s(attends, part, full) - all_s + 1e-12  # what else is no product
    # Scores of all keys and what each step makes of its values, in float32: one step whole, three half.
    kept = work.product_bytes(attends, part, selective)
    assert kept == pytest.approx(4 * HEADS * 512 * (512 + 32) * (1 + 3 / 2) + _products_beside_attention(attends) / 4)
    assert planned(1, "attention=ring", "cp=4", "recompute=full").seconds > ring.seconds + 2 * all_s


def _products_beside_attention(work: CallWork) -> float:
    return sum(op.written_bytes for op in work.operators if op.flops and "attention" not in op.name)


def test_ranks_that_share_a_sequence_send_what_the_way_says() -> None:
    keys = LONG * WIDTH * 4
    border = LONG * WIDTH * 4
    ring = planned(1, "attention=ring", "cp=4", "recompute=none")
    sent = count_traffic(ring.search.best, ring.work)
    # Of two blocks: three shifts forward; back three of keys and three of gradients, and one that takes these home.
    assert sent["send", 2 * keys / 4] == 2 * (3 + 6 + 1)
    assert sent["all_gather", border] == 2
    gather = planned(1, "attention=all_gather", "cp=4", "recompute=none")
    sent = count_traffic(gather.search.best, gather.work)
    assert sent["all_gather", keys] == 2 * 2 + 2
    assert sent["all_to_all", keys] == 2 * 2


@pytest.mark.parametrize("limits", [("cp=2",), ("cp=4", "attention=ring"), ("cp=2", "zero=3", "recompute=full")])
def test_the_plan_is_one_that_a_person_could_write_and_is_simulated_as_it_was_planned(limits: tuple[str, ...]) -> None:
    answer, model = planned(4, *limits), Net()
    for place, plan in enumerate(answer.top_k):
        check_styles(plan, model)
        simulated = px.simulate_plan(plan, model, batch(4), loss, cluster=FEW, optimizer="adam")
        assert simulated.simulation.step_time_s == pytest.approx(answer.search.top_k[place].step_time_s, rel=1e-2)
        assert max(simulated.simulation.peaks) == pytest.approx(answer.search.top_k[place].memory_bytes, rel=1e-2)
    config, (rule,) = answer.search.best.config, (rule for rule in answer.plan.modules if rule.style == "context")
    assert (rule.match, rule.attention) == ("blocks", config.attention)


def test_a_strategy_says_the_same_as_the_planner() -> None:
    answer, model = planned(4, "cp=2", "attention=ring", "zero=0", "recompute=none"), Net()
    px.shard(model, {"blocks": "context"})
    configs = {"degree": 2, "attention": "ring"}
    strategy = px.DistributedStrategy(context_parallel=True, context_parallel_configs=configs)
    plan = with_shard_requests(plan_from_strategy(strategy, shape_of(model), 4), model, "ring")
    assert plan.mesh == answer.plan.mesh
    assert plan.modules == answer.plan.modules
    assert plan.params == answer.plan.params


OBSTACLES = {
    "means": "operator aten.mean.dim of 'blocks.0' mixes tokens",
    "drops": "its blocks call no torch.nn.functional.scaled_dot_product_attention without dropout",
    "positions": "operator aten.add.Tensor of 'blocks.0' mixes tokens",
    "by hand": "its blocks call no torch.nn.functional.scaled_dot_product_attention",
    "between": "the model computes something between its blocks",
    "mask": "gives attention a mask of shape (32, 32). It takes (..., 64 queries, 64 keys)",
    "counted mask": "counts its 32 tokens from 0 (arange)",
    "mask of a table": "counts its 32 tokens from 0 (__getitem__)",
    "keyword": "takes as its first input the activations, whose dim -2 is cut; found NoneType",
}
"""What the captured operators tell, and what style `context` refuses where it is tried on shapes."""


@pytest.mark.parametrize("how", OBSTACLES)
def test_the_answer_names_why_ranks_share_no_sequence(how: str) -> None:
    def answer(*limits: str) -> PlanResult:
        return px.auto_parallel(Net(how), batch(4, 64), loss, cluster=FEW, limits=("tp=1", "pp=1", *limits))

    assert any(OBSTACLES[how] in why for why in answer().left_out)
    with pytest.raises(PlanError, match="No parallel configuration"):
        answer("cp=2")


def test_masks_that_are_learned_leave_rings_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = F.scaled_dot_product_attention
    learned = torch.zeros(64, 64, requires_grad=True)

    class Biased(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x).unsqueeze(1)
            return attend(x, x, x, learned.to(x.device)).squeeze(1)

    model, sample, blocks = Net(), batch(4, 64), planned(4, tokens=64).layers.sequence
    model.blocks = nn.ModuleList(Biased() for _ in range(2))
    assert blocks is not None
    assert check_runs_in_parts(model, sample, loss, blocks, 2) is None
    why = check_runs_in_parts(model, sample, loss, blocks, 2, way="ring")
    assert why is not None
    assert "a mask that is learned, whose gradients a ring does not make" in why

    def fails(*_: object, way: str, **__: object) -> str | None:
        return why if way == "ring" else None

    monkeypatch.setattr(model_search, "check_runs_in_parts", fails)
    answer = px.auto_parallel(Net(), batch(4, 64), loss, cluster=FEW, limits=("tp=1", "pp=1"), top_k=50)
    assert {config.attention for config in answer.search.configs if config.context > 1} == {"all_gather"}
    assert any(one.startswith("attention=ring: context parallel, as") for one in answer.left_out)


def test_as_many_samples_as_tokens_are_seen_for_what_a_rank_has() -> None:
    class Masked(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x, seen = self.words(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
            for block in self.blocks:
                x = block(x, seen)
            return self.head(x)

    class Attends(Block):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            heads = self.norm(x).unsqueeze(1)
            return F.scaled_dot_product_attention(heads, heads, heads, seen).squeeze(1)

    model, blocks = Masked(), planned(4, tokens=64).layers.sequence
    model.blocks = nn.ModuleList(Attends() for _ in range(2))
    assert blocks is not None
    assert check_runs_in_parts(model, batch(4, 64), loss, blocks, 2, rows={2}) is None
    why = check_runs_in_parts(model, batch(128, 64), loss, blocks, 2, rows={64})
    assert why is not None
    assert "as many rows as tokens" in why


def test_code_that_fixes_its_tokens_is_left_out_when_it_was_tried() -> None:
    model, sample = Net("fixed"), batch(4)
    answer = px.auto_parallel(model, sample, loss, cluster=FEW, limits=("tp=1", "pp=1"), top_k=20)
    assert all(config.context == 1 for config in answer.search.configs)
    assert any("invalid for input of size" in why for why in answer.left_out)
    with pytest.raises(PlanError, match=r"not searched: context parallel, as .*invalid for input of size"):
        px.auto_parallel(model, sample, loss, cluster=FEW, limits=("cp=2",))


def test_a_model_runs_in_parts_where_its_tokens_divide() -> None:
    model, sample = Net(), batch(2, 12)
    blocks = planned(4, tokens=12).layers.sequence
    assert blocks is not None
    assert blocks.degrees(4) == (2, 4)
    assert blocks.degrees(8) == (2, 4)
    assert all(check_runs_in_parts(model, sample, loss, blocks, ranks) is None for ranks in (2, 3, 4))
    assert capture(model, sample, loss).blocks


def test_what_is_not_searched_is_named() -> None:
    left_out = planned(4).left_out
    for words in ("context parallel together with tensor parallel", "offload of", "gradient accumulation", "`vocab`"):
        assert any(words in why for why in left_out), words
    with pytest.raises(ConfigError, match="attention= and one of all_gather, ring"):
        planned(4, "attention=flash")
