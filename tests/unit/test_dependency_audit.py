"""The audit of dependencies finds a licence, a release and a floor that should not be."""

from __future__ import annotations

import sys
from email.message import Message
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

AUDIT = Path(__file__).parents[2] / ".ci" / "audit"
ADVISORIES = {"yaml": {"safe": "5.4", "why": "CVE-1: code from a file"}}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = spec_from_loader("audit", SourceFileLoader("audit", str(AUDIT)))
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["audit"] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("licence", "version", "asked", "expected"),
    [
        ("MIT", "5.4", "yaml>=5.4", []),
        ("GPL-3.0-only", "6", "yaml>=6", ["is under 'GPL-3.0-only'"]),
        ("AGPL-3.0 OR MIT", "6", "yaml>=6", ["is under 'AGPL"]),
        ("none stated", "6", "yaml>=6", ["is under 'none stated'"]),
        ("BSD-3-Clause", "5.3.1", "yaml>=5.4", ["yaml 5.3.1 has CVE-1: code from a file. Install 5.4 or newer."]),
        ("BSD-3-Clause", "6", "yaml>=5", ["yaml>=5 allows releases with CVE-1"]),
        ("BSD-3-Clause", "6", "yaml", ["yaml has no floor"]),
    ],
)
def test_what_is_wrong_is_named(audit: ModuleType, licence: str, version: str, asked: str, expected: list[str]) -> None:
    dependency = audit.Dependency("yaml", Version(version), licence)
    found = list(audit.problems([dependency], [Requirement(asked)], ADVISORIES))
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


def test_packages_that_need_each_other_are_each_looked_at_once(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"a": ["b[fast]"], "b": ["a", "c; extra == 'fast'"], "c": []}

    class Installed:
        version = "1.0"

        def __init__(self, name: str) -> None:
            if name not in needs:
                raise audit.metadata.PackageNotFoundError(name)
            self.requires, self.metadata = needs[name], Message()

    monkeypatch.setattr(audit.metadata, "distribution", Installed)
    found = [next(found).name for found in [audit.installed([Requirement("a")])] for _ in range(3)]
    assert sorted(found) == ["a", "b", "c"]
    assert [dependency.name for dependency in audit.installed([Requirement("a")])] == found
