"""The site of the documentation is built whole, names every public name, and its first script runs as it says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from launching import launch_warm

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
NAMESPACES = ("", ".checkpoint", ".cluster", ".comm", ".data", ".fleet", ".plan", ".ps")
SCRIPTS = re.findall(r"```python title=[^\n]*\n(.*?)```", (ROOT / "docs" / "get-started.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a broken link or an unknown name ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = set()
    for namespace in NAMESPACES:
        module = importlib.import_module(f"phalanx{namespace}")
        public |= {f"phalanx{namespace}.{name}" for name in module.__all__}
    modules = {f"phalanx.{name}" for name in importlib.import_module("phalanx")._MODULES} | {"phalanx.__version__"}
    assert sorted(public - modules - documented) == []


def test_the_site_has_every_page_and_every_command(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {page for page in pages if page.name != "README"} <= built
    commands = (site / "reference" / "cli.html").read_text()
    for command in ("phalanx run", "phalanx job submit", "phalanx why", "phalanx plan"):
        assert f'<h2 id="{command.replace(" ", "-")}"' in commands


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]+(?:src|href)="(https?://[^"]+)"')
    for page in site.rglob("*.html"):
        assert fetched.findall(page.read_text()) == [], page


def test_the_first_script_prints_the_same_losses_on_two_processes(tmp_path: Path) -> None:
    _, parallel = SCRIPTS
    (tmp_path / "train.py").write_text(parallel)
    outputs = []
    for ranks in (1, 2):
        done = launch_warm(tmp_path, "-n", str(ranks), "train.py")
        outputs.append(re.findall(r"epoch \d: loss \d\.\d{4}", done.out))
    assert len(outputs[0]) == 3
    assert outputs[0] == outputs[1]
