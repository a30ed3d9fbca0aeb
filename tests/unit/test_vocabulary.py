"""The code speaks the language of its field."""

from __future__ import annotations

import pytest

import vocabulary


@pytest.mark.parametrize("path", vocabulary.files(), ids=lambda path: str(path.relative_to(vocabulary.SOURCE)))
def test_names_say_what_a_thing_is(path):
    vague = [f"{line}: variable {name}" for line, name in vocabulary.vague_variables(path)]
    participles = [f"{line}: function {name}" for line, name in vocabulary.participle_functions(path)]
    assert not vague + participles


def test_the_first_line_of_a_module_names_what_is_in_it():
    modules = [path for path in vocabulary.files() if path.name != "__init__.py"]
    missing = {str(path.relative_to(vocabulary.SOURCE)): vocabulary.missing_subjects(path) for path in modules}
    assert not {path: names for path, names in missing.items() if names}


def test_a_public_class_name_means_one_thing():
    assert not vocabulary.shared_class_names()
