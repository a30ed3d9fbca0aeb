"""An unfit torch is named in words."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import phalanx
from phalanx.cluster.role.role import Role
from phalanx.comm import process_group
from phalanx.errors import ConfigError
from phalanx.versions import require_torch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("found", ["2.12.1+cpu", "1.13.0", "2.14.0", "nonsense"])
def test_an_untested_torch_is_refused_with_what_is_needed(found):
    with pytest.raises(ConfigError, match=r"needs torch >=2\.13,<2\.14 .*found .*pip install"):
        require_torch(found)


@pytest.mark.parametrize("found", ["2.13.0", "2.13.0+cpu", "2.13.0a0+git1234"])
def test_a_tested_torch_is_accepted(found):
    require_torch(found)


def test_no_torch_at_all_is_said(monkeypatch):
    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError("torch")

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="found none"):
        require_torch()


@pytest.mark.parametrize(("native", "notices"), [(True, 0), (False, 1)])
def test_rank_0_says_once_that_the_native_core_is_missing(native, notices, monkeypatch, caplog):
    monkeypatch.setattr(process_group, "HAS_NATIVE", native)
    process_group.start(Role())
    assert caplog.text.count("without its native core") == notices


def test_the_extra_all_names_every_other_one():
    extras = PROJECT["optional-dependencies"]
    assert extras["all"] == [f"phalanx[{','.join(sorted(extras.keys() - {'all'}))}]"]


def test_the_version_is_the_newest_of_the_changelog_which_has_few_highlights():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, highlights = re.findall(r"^## (\d[\d.]*)\n\n((?:- .+\n(?:  .+\n)*)+)", changelog, re.MULTILINE)[0]
    assert phalanx.__version__ == version
    assert len(re.findall("^- ", highlights, re.MULTILINE)) <= 15
    assert PROJECT["dynamic"] == ["version"]
