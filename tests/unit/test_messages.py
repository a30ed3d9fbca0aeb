"""The table of messages in two languages."""

from __future__ import annotations

import string

import pytest

from phalanx.cluster import messages


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
