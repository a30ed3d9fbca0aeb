"""The glossary defines each word once, and where the code has it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]


def test_there_are_enough_terms_and_not_too_many() -> None:
    assert 60 <= len(ROWS) <= 120


def test_each_term_is_defined_once_in_alphabetical_order() -> None:
    terms = [row[0].casefold() for row in ROWS]
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms)


def test_each_meaning_is_one_sentence() -> None:
    assert not [term for term, meaning, _, _ in ROWS if not meaning.endswith(".") or ". " in meaning]


def test_each_term_names_a_module_that_is_there() -> None:
    missing = [where for _, _, where, _ in ROWS if not (ROOT / "src" / "phalanx" / f"{where.strip('`')}.py").exists()]
    assert not missing
