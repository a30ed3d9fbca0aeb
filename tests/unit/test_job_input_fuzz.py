"""Whatever comes from outside is a job or one of our errors, and no accepted path leads out."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import SpecError
from phalanx.jobs.spec.addresses import git_address, inner_path, kept_path, mount_path
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.command import parse_command, python_command
from phalanx.jobs.spec.dlc import translate
from phalanx.jobs.spec.file import read, validate
from phalanx.jobs.spec.training_job import Resources, TrainingJob

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", ".", "..", "a/../..", "/", "-x", "s3://b/c", "git+https://h/x@y", "\0"]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*TrainingJob.model_fields, *Code.model_fields, *Dataset.model_fields, *Resources.model_fields]
SAID = st.dictionaries(
    st.sampled_from(FIELDS) | TEXT, VALUE | st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=3)
)
REQUEST = st.dictionaries(
    st.sampled_from(
        ["JobSpecs", "UserCommand", "DisplayName", "Envs", "CodeSource", "DataSources", "Priority", "Other"]
    ),
    VALUE | st.lists(st.dictionaries(st.sampled_from(["Type", "PodCount", "ResourceConfig", "Uri", "Image"]), VALUE)),
)


@settings(max_examples=200)
@given(SAID)
def test_any_fields_are_a_job_or_an_error_of_ours(said: dict[Any, Any]) -> None:
    for model in (TrainingJob, Code, Dataset):
        try:
            found = validate(model, said)
        except SpecError:
            continue
        assert model.model_validate_json(found.model_dump_json()) == found


@settings(max_examples=100)
@given(SAID | VALUE)
def test_any_file_is_a_job_or_an_error_of_ours(said: Any) -> None:
    for text in (json.dumps(said), yaml.safe_dump(said)):
        with suppress(SpecError):
            read(text)


@settings(max_examples=100)
@given(REQUEST)
def test_any_request_is_a_job_or_an_error_of_ours(body: dict[str, Any]) -> None:
    with suppress(SpecError):
        validate(TrainingJob, translate(body)[0])


@settings(max_examples=300)
@given(st.text(alphabet="a./-~\\ \0:@", max_size=12) | TEXT)
def test_no_accepted_path_leads_out_of_where_it_starts(text: str) -> None:
    top = Path("/top/of/it")
    for check in (inner_path, mount_path, kept_path):
        try:
            found = check(text)
        except ValueError:
            continue
        if not found.startswith("/"):
            assert Path.resolve(top / found).is_relative_to(top)
        assert ".." not in found.split("/")
    with suppress(ValueError):
        assert not git_address(text).startswith("-")


@settings(max_examples=200)
@given(st.text(alphabet="ab -m'\"\\|&;<>$\n\t", max_size=20).map("python ".__add__))
def test_a_command_is_cut_into_words_or_refused(said: str) -> None:
    with suppress(ValueError):
        python_command(parse_command(said))
