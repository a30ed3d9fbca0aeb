"""`Translator`: the Chinese of messages that were written in English, as job stores and event files keep them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from phalanx.i18n import translate

Sentences: TypeAlias = tuple[str, ...]
"""English sentences that are recognised in messages. A tuple with this annotation is searched for sentences, as calls
of `tr` are (`tests/unit/test_messages.py`)."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What may stand in the place of a named field of a sentence.

    Args:
        pattern: A regular expression of it.
        translate: Returns its Chinese; as it stands when omitted.
    """

    pattern: str = ".+"
    translate: Callable[[str], str] = str


_ANY = Placeholder()


class Translator:
    """Finds the sentence that a message was written from, and fills its Chinese in.

    Args:
        sentences: With named fields; the first that matches counts.
        placeholders: What stands in fields, by name; anything, as it stands, where a name is left out.
    """

    def __init__(self, sentences: Sentences, placeholders: Mapping[str, Placeholder] = MappingProxyType({})) -> None:
        self._placeholders = placeholders
        self._patterns = {sentence: self._pattern(sentence) for sentence in sentences}

    def _pattern(self, sentence: str) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", sentence)
        patterns = [
            f"(?P<{part}>{self._placeholders.get(part, _ANY).pattern})" if index % 2 else re.escape(part)
            for index, part in enumerate(parts)
        ]
        return re.compile("".join(patterns), re.DOTALL)

    def __call__(self, message: str) -> str | None:
        """Return the Chinese of a message; None if it is of no sentence."""
        for sentence, pattern in self._patterns.items():
            if match := pattern.fullmatch(message):
                fields = {
                    name: self._placeholders.get(name, _ANY).translate(text) for name, text in match.groupdict().items()
                }
                return translate(sentence, "zh", **fields)
        return None
