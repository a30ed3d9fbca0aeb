"""What the guide says about the launcher is what the launcher does."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from phalanx.launch.cli import flags
from phalanx.launch.process.log_format import LineFormatter
from phalanx.launch.request.options import DEFAULT_PORT, Options

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
SECTIONS = GUIDE[GUIDE.index("## How many processes") : GUIDE.index("## What is checked before training")]


def test_every_flag_the_guide_names_exists() -> None:
    known = {name for parameter in flags.command.params for name in parameter.opts}
    describe_option = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SECTIONS)) - {"--json", "--ntasks-per-node"}
    assert describe_option <= known, describe_option - known
    assert len(describe_option) > 8


def test_the_defaults_are_those_of_the_code() -> None:
    assert f"at port {DEFAULT_PORT}" in SECTIONS
    defaults = Options(training_script="train.py")
    assert f"give up after {defaults.timeout_s:g} s" in SECTIONS
    assert f"`{defaults.log_dir}/workerlog.N`" in SECTIONS


@pytest.mark.parametrize("name", ["default", "bar", "json"])
def test_the_forms_of_log_lines_are_shown_as_they_are(name: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "/home/me/train.py", 47, "message", (), None)
    line = re.escape(LineFormatter(name).format(record))
    pattern = re.sub(
        r"\d{4}\\-\d\d\\-\d\d|\d\d:\d\d:\d\d|(?<=[,.])\d{3}", lambda m: r"[\d-]+" if "-" in m[0] else r"[\d:]+", line
    )
    assert re.search(pattern, SECTIONS)
