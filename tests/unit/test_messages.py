"""The table of messages in two languages."""

from __future__ import annotations

import string

import pytest

from phalanx.auto.predict.run_file import read_runs
from phalanx.auto.search.request import read_limit
from phalanx.cluster.messages import messages
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError


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
    assert messages.language(env) == expected


@pytest.mark.parametrize("key", messages.TABLE)
def test_both_languages_say_the_same_fields(key: str) -> None:
    english, chinese = ({name for _, name, _, _ in string.Formatter().parse(t) if name} for t in messages.TABLE[key])
    assert english == chinese


def test_a_message_is_in_the_language_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages.text("raised", error="ValueError: x") == "raised ValueError: x"
    monkeypatch.setenv("PHALANX_LANG", "zh")
    assert messages.text("raised", error="ValueError: x") == "抛出 ValueError: x"


def test_the_planners_errors_are_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(ConfigError, match=r"没有 'nods=2' 这一项；可用：nodes=, gbps=, usd=。您是否想写 'nodes'？"):
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
