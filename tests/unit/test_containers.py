"""Dockerfile and compose.yaml: valid, of the versions that the package asks for, and with commands that exist."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from command_words import unknown_flags

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
MEMBERS = ("server", "worker-0", "worker-1")


def test_compose_fits_its_schema() -> None:
    schema = files("check_jsonschema.builtin_schemas.vendor").joinpath("compose-spec.json").read_text()
    jsonschema.validate(COMPOSE, json.loads(schema))


def test_servers_and_workers_get_one_command_line_that_names_each_of_them() -> None:
    services = COMPOSE["services"]
    lines = [services[name]["command"] for name in MEMBERS]
    assert lines[0] == lines[1] == lines[2]
    hosts = re.findall(r"([\w-]+):\d+", " ".join(lines[0]))
    assert hosts == list(MEMBERS)


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_every_command_is_one_of_phalanx_with_flags_that_it_has(service: str) -> None:
    program, *words = COMPOSE["services"][service]["command"]
    assert program == "phalanx"
    assert unknown_flags(words) == []
    scripts = [word for word in words if word.endswith(".py")]
    assert all((ROOT / script.removeprefix("/")).exists() for script in scripts)


def test_the_image_installs_the_torch_that_the_package_asks_for() -> None:
    torch = next(text for text in PROJECT["project"]["dependencies"] if text.startswith("torch"))
    assert f'"{torch}"' in DOCKERFILE
    assert "python:3.11-" in DOCKERFILE
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_the_build_gets_every_file_that_the_package_is_built_from() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split()}
    built_from = {"CMakeLists.txt", "csrc", "docs/man/phalanx.1", "pyproject.toml", "src"}
    assert built_from | {PROJECT["project"]["readme"], "LICENSE", "LICENSES"} <= sent
