"""Messages in the language of the user: the code has the English sentence, `zh.json` the Chinese one of each.

In: an English sentence with named fields, and PHALANX_LANG or the locale. Out: it, or its Chinese translation. `tr`
marks a sentence; `tests/unit/test_messages.py` asks for its translation. Messages that were stored in English are
translated by `translation`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from phalanx.errors import nearest

LANGUAGES = ("en", "zh")
"""Languages that messages are written in."""

Labels: TypeAlias = Mapping[str, str]
"""English sentences by key, translated where they are shown: `tr(LABELS[key])`. A dict with this annotation is searched
for sentences, as calls of `tr` are (`tests/unit/test_messages.py`)."""


def tr(sentence: str, /, **fields: object) -> str:
    """Return a sentence in the user's language with its fields filled in.

    Args:
        sentence: In English, with fields as of `str.format`; as written if it has no translation.
        **fields: Values of the fields.
    """
    return translate(sentence, language(), **fields)


def translate(sentence: str, target: str, /, **fields: object) -> str:
    """Return a sentence in a language with its fields filled in.

    Args:
        sentence: As for `tr`.
        target: One of LANGUAGES.
        **fields: Values of the fields.
    """
    return wording(sentence, target).format(**fields)


def wording(sentence: str, target: str) -> str:
    """Return a sentence in a language, with its fields as they are."""
    return _chinese().get(sentence, sentence) if target == "zh" else sentence


def language(env: Mapping[str, str] | None = None) -> str:
    """Return "zh" or "en": what PHALANX_LANG says, else the language of the user's locale.

    Args:
        env: Variables to read; the process's own when omitted.
    """
    env = os.environ if env is None else env
    for name in ("PHALANX_LANG", "LC_ALL", "LANG"):
        if value := env.get(name, "").strip():
            return "zh" if value.startswith("zh") else "en"
    return "en"


def suggest(name: str, known_names: Iterable[str]) -> str:
    """Return a question for the known name nearest to `name`, in the user's language, or an empty string."""
    match = nearest(name, known_names)
    return "" if match is None else tr(" Did you mean '{flag}'?", flag=match)


@cache
def _chinese() -> dict[str, str]:
    """Return the Chinese of every English sentence."""
    catalogue: dict[str, str] = json.loads(Path(__file__).with_name("zh.json").read_text(encoding="utf-8"))
    return catalogue
