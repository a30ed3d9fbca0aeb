"""A Plan's picture in Chinese: nothing stays English but names of the model, of settings and of collectives."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
import torch
from rich.cells import cell_len
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.parallel.model_shape import shape_of
from phalanx.plan.report.explain import explain
from phalanx.plan.report.picture import picture
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Plan, Table
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.techniques import TECHNIQUES, Technique
from phalanx.ui.plan_words import translate_picture, translate_words

IDS = Table(name="ids", module="emb", dim=8, optimizer="adagrad(lr=0.05)", entry="count(count=10)")
SHAPE = ModelShape(
    (
        ParamShape(name="fc1.weight", shape=(8, 8), dtype="float32", item_bytes=4),
        ParamShape(name="fc2.weight", shape=(8, 8), dtype="float32", item_bytes=4),
        ParamShape(name="fixed", shape=(8,), dtype="float32", item_bytes=4, trainable=False),
        ParamShape(name="own", shape=(8,), dtype="float32", item_bytes=4, is_distributed=True),
    )
)
TABLES = ModelShape(
    (ParamShape(name="emb.rows", shape=(0, 8), dtype="float32", item_bytes=4, table=IDS), *SHAPE.params)
)
COLUMNS = [Styled(module=name, style="column", weight=f"{name}.weight") for name in ("fc1", "fc2", "", "a", "b", "c")]


def _strategy(**settings: object) -> DistributedStrategy:
    return DistributedStrategy.model_validate(settings)


def _planned(*limits: str) -> tuple[Plan, ModelShape]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    sample = torch.zeros(32, 64), torch.zeros(32, dtype=torch.long)
    plan = px.auto_parallel(model, sample, F.cross_entropy, cluster="a100x2", limits=limits, optimizer="sgd").plan
    return plan, shape_of(model)


PLANS = {
    "one rank": lambda: (plan_from_strategy(_strategy(), SHAPE, 1), SHAPE),
    "one rank with techniques of several": lambda: (plan_from_strategy(_strategy(sharding=True), SHAPE, 1), SHAPE),
    "two ranks": lambda: (plan_from_strategy(_strategy(fuse_all_reduce_ops=False), SHAPE, 2), SHAPE),
    "sharded": lambda: (plan_from_strategy(_strategy(sharding=True), SHAPE, 2), SHAPE),
    "logical replicas": lambda: (plan_from_strategy(_strategy(logical_replicas=4), SHAPE, 2), SHAPE),
    "layers cut": lambda: (with_cut_layers(plan_from_strategy(_strategy(), SHAPE, 2), COLUMNS[:3], "data"), SHAPE),
    "many layers cut": lambda: (with_cut_layers(plan_from_strategy(_strategy(), SHAPE, 2), COLUMNS, "data"), SHAPE),
    "tables here": lambda: (plan_from_strategy(_strategy(), TABLES, 1), TABLES),
    "tables on servers": lambda: (plan_from_strategy(_strategy(), TABLES, 2, 2), TABLES),
    "geo": lambda: (plan_from_strategy(_strategy(a_sync=True, a_sync_configs={"k_steps": 4}), TABLES, 2, 2), TABLES),
    "tensor parallel": lambda: _planned("tp=2"),
    "stages": lambda: _planned("pp=2"),
    "zero": lambda: _planned("zero=1"),
}

_TERMS = set(re.findall(r"\w+", "all reduce scatter mean px shard requires grad column MiB ms"))
"""Names of collectives, units and styles."""

_NAMES = set(re.findall(r"\w+", "data model stage fc ids dense sync async geo"))
"""Names of axes, layers, tables and modes."""


def _texts(drawn: str) -> Iterator[tuple[str, str]]:
    """Each text of a picture: what is shown, and the whole where that was cut."""
    for text in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"):
        title = text.find("{http://www.w3.org/2000/svg}title")
        shown = text.text or "" if title is None else title.tail or ""
        yield shown, shown if title is None else title.text or ""


@pytest.mark.parametrize("name", PLANS)
def test_what_stays_english_in_a_plans_picture_is_names(name: str) -> None:
    plan, shape = PLANS[name]()
    explanation = explain(plan, shape)
    names = {part for row in explanation.rows for part in re.findall(r"[a-zA-Z]+", row.match)}
    names |= {part for reason in plan.because for part in re.findall(r"[a-zA-Z]+", reason.setting.split(": ")[-1])}
    names -= {"world", "size", "server", "servers", "over", "without", "parameters", "no"}
    words = [whole for _, whole in _texts(translate_picture(picture(explanation)))]
    assert len(words) > 6
    for word in words:
        assert set(re.findall(r"[a-zA-Z]{2,}", word)) - names - _TERMS - _NAMES == set(), word
        assert re.search(r"[\u4e00-\u9fff]", word) or re.fullmatch(
            r"[\w.*\[\]{}?]+ \(\d+\)|[\d.e+-]+|reduce-scatter", word
        ), word


def test_what_was_cut_is_translated_whole_and_cut_again() -> None:
    layers = [Styled(module=f"a_layer_of_a_long_name.{n}", style="column", weight="fc1.weight") for n in range(9)]
    explanation = explain(with_cut_layers(plan_from_strategy(_strategy(), SHAPE, 2), layers, "data"), SHAPE)
    english, chinese = ([*_texts(drawn)] for drawn in (picture(explanation), translate_picture(picture(explanation))))
    (shown, whole), (shown_zh, whole_zh) = english[-1], chinese[-1]
    assert len(shown) == 160
    assert shown[:-1] == whole[:159]
    assert whole_zh.endswith("a_layer_of_a_long_name.3 (column) 等 9 层切分到各进程；各层收集所有进程的样本")
    assert (shown_zh[-1], shown_zh[:-1]) == ("…", whole_zh[: len(shown_zh) - 1])
    assert 158 <= cell_len(shown_zh) <= 160
    assert ("由所在层沿 data=2 切分",) * 2 in chinese


@pytest.mark.parametrize("technique", [t for t in TECHNIQUES.values() if t.effect])
def test_what_a_technique_does_has_its_chinese(technique: Technique) -> None:
    for words in (f"x=True: {technique.effect}", f"x=True: {technique.effect} (one rank: nothing to do)"):
        chinese = translate_words(words)
        assert re.search(r"[\u4e00-\u9fff]", chinese)
        assert technique.effect not in chinese


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("2 servers, table item", "2 个参数服务器，表 item"),
        ("shard over data, shard over model", "沿 data 分片，沿 model 分片"),
        ("push (async, 4 steps)", "推送（async，4 步）"),
        ("stage 1 on rank 0 of its axis: a, b", "阶段 1（所在轴的进程 0）：a, b"),
        ("layers.0 (3)", "layers.0 (3)"),
        (
            "a_sync: workers push to the servers in mode geo (4 steps)",
            "a_sync：工作进程以 geo 模式推送到参数服务器（4 步）",
        ),
        (
            "px.shard over model=2: the model (column) are sharded over ranks; their ranks read the same samples",
            "px.shard（model=2）：整个模型 (column) 切分到各进程；其进程读取相同的样本",
        ),
        (
            "planner: data=2 model=1: predicted 82 ms a step of 64 rows, 12.5 MiB a rank",
            "规划器：data=2 model=1：预计每步（64 个样本）82 ms，每个进程 12.5 MiB",
        ),
        (
            "balance=samples: faster ranks get more of each global batch, about 4 x H100: 24 each, 4 x A100: 8 each",
            "balance=samples：较快的进程分得更多样本，约为 4 x H100 各 24，4 x A100 各 8",
        ),
    ],
)
def test_words_of_a_plan_in_chinese(english: str, chinese: str) -> None:
    assert translate_words(english) == chinese
