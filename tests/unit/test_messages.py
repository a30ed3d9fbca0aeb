"""Messages in two languages: sentences in the code, and the catalogue."""

from __future__ import annotations

import ast
import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from phalanx import i18n
from phalanx.auto.predict.run_file import read_runs
from phalanx.auto.search.request import read_limit
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import form

CATALOGUE = Path(i18n.__file__).with_name("zh.json")
CHINESE: dict[str, str] = json.loads(CATALOGUE.read_text(encoding="utf-8"))

SCHEMA = TrainingJob.model_json_schema()


def sentences() -> dict[str, str]:
    """Return the sentences that the package translates, with a place where each stands."""
    places = {help_text: "a field of TrainingJob" for help_text in descriptions(form.fields(SCHEMA, {}, {}))}
    for path in sorted(Path(i18n.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for sentence in sentences_of(node):
                assert isinstance(sentence, ast.Constant), f"{path}:{sentence.lineno}: tr() of {ast.unparse(sentence)}"
                places[str(sentence.value)] = f"{path}:{sentence.lineno}"
    return places


def descriptions(fields: Iterable[form.Field]) -> Iterator[str]:
    """Return what fields of the job form mean."""
    for field in fields:
        yield field.help
        yield from descriptions(field.fields)


def sentences_of(node: ast.AST) -> list[ast.expr]:
    """Return what a call of `tr`, a dict of labels or a tuple of sentences translates; `tr(LABELS[k])` is left out."""
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Sentences":
        assert isinstance(node.value, ast.Tuple)
        return node.value.elts
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Labels":
        assert isinstance(node.value, ast.Dict)
        return node.value.values
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tr", "i18n.tr"):
        branches = branches_of(node.args[0])
        return [branch for branch in branches if not isinstance(branch, ast.Subscript)]
    return []


def branches_of(node: ast.expr) -> list[ast.expr]:
    """Return what an expression may be, of either branch."""
    return [*branches_of(node.body), *branches_of(node.orelse)] if isinstance(node, ast.IfExp) else [node]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE", "PHALANX_LANG": "zh"}, "zh"),
        ({"LANG": "zh_CN", "PHALANX_LANG": "en"}, "en"),
    ],
)
def test_the_language_is_the_users(env: dict[str, str], expected: str) -> None:
    assert i18n.language(env) == expected


def test_every_sentence_has_a_translation_and_every_translation_a_sentence() -> None:
    places = sentences()
    assert {sentence: place for sentence, place in places.items() if sentence not in CHINESE} == {}
    assert sorted(set(CHINESE) - set(places)) == []


@pytest.mark.parametrize("sentence", CHINESE)
def test_both_languages_have_the_same_fields(sentence: str) -> None:
    english, chinese = (
        {name for _, name, _, _ in string.Formatter().parse(t) if name} for t in (sentence, CHINESE[sentence])
    )
    assert english == chinese


def test_the_catalogue_is_sorted() -> None:
    assert (
        CATALOGUE.read_text(encoding="utf-8")
        == json.dumps(CHINESE, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    )


def test_a_sentence_without_a_translation_stays_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    assert i18n.tr("{count} of {{these}}", count=3) == "3 of {these}"


def test_a_message_is_in_the_language_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert i18n.tr("raised {error}", error="ValueError: x") == "raised ValueError: x"
    monkeypatch.setenv("PHALANX_LANG", "zh")
    assert i18n.tr("raised {error}", error="ValueError: x") == "抛出 ValueError: x"


def test_the_planners_errors_are_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(
        ConfigError, match=r"没有 'nods=2' 这一项；可用：nodes=, gbps=, speed=, usd=。您是否想写 'nodes'？"
    ):
        read_cluster("h100x8,nods=2")
    with pytest.raises(ConfigError, match=r"r\.jsonl 第 2 行：model\.layers：应大于 0，实际为 -1。"):
        read_runs(["", '{"name": "a", "model": {"layers": -1}}'], "r.jsonl")
    with pytest.raises(ConfigError, match=r"r\.jsonl 第 1 行：不是 JSON"):
        read_runs(["{"], "r.jsonl")
    with pytest.raises(ConfigError, match=r"限制 'zero=9' 无效。请写 zero= 和 0, 1, 2, 3 之一"):
        read_limit("zero=9")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", r"t\.json：第 1 行第 2 列不是 JSON"),
        ("{}", r"t\.json：该表 不是已知的格式"),
        ('{"version": "1.0"}', r"t\.json：该表 没有 'server_list'，只有 version。请补上。"),
        (
            '{"version": "1.0", "server_list": [{}], "server_count": "2"}',
            r"server_count 为 2，但表中列出了 1 个服务器。",
        ),
        (
            '{"version": "1.0", "server_list": [{"server_id": "h"}], "server_count": "1"}',
            r"t\.json：server_list\[0\]\.server_id 应为服务器的 IPv4 地址，实际为 'h'。",
        ),
    ],
)
def test_mistakes_in_rank_tables_are_told_in_the_users_language(
    monkeypatch: pytest.MonkeyPatch, table: str, message: str
) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(ConfigError, match=message):
        rank_table.parse(table, "t.json")
