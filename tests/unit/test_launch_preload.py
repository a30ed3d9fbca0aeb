"""What the fork server imports for the ranks of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch import preload

TRAINS = "import torch\nimport phalanx as px\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preload, "is_cuda_build", lambda libraries: False)
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    "text",
    [TRAINS, "from phalanx import distribute\nmodel = distribute(model)\n", "import phalanx\nphalanx.train_step(loss)"],
)
def test_what_every_rank_of_a_training_script_imports_is_imported_once(script: Path, text: str) -> None:
    script.write_text(text)
    assert preload.needed_by(str(script), is_elastic=False) == preload.TRAINING


@pytest.mark.parametrize(
    "text",
    [
        "import phalanx as px\npx.init()\n",
        "import torch\ntorch.optim.SGD([], lr=1)\n",
        "import os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\n" + TRAINS,
    ],
)
def test_a_script_that_may_not_need_it_imports_for_itself(script: Path, text: str) -> None:
    script.write_text(text)
    assert preload.needed_by(str(script), is_elastic=False) == preload.TORCH


@pytest.mark.parametrize("content", [b"import phalanx\n# \xff\xfe optim\n", b"\xff\xfe", b"import (", b"\x00"])
def test_a_file_that_is_no_program_is_left_to_the_ranks(script: Path, content: bytes) -> None:
    script.write_bytes(content)
    assert preload.needed_by(str(script), is_elastic=False) == (
        preload.TRAINING if b"optim" in content else preload.TORCH
    )
    assert preload.needed_by(str(script), is_elastic=True) == preload.TRAINING


@pytest.mark.parametrize("text", ["import os, trainer\n", "from . import trainer\n", "import torch\n"])
def test_who_may_join_a_running_job_has_everything_imported(script: Path, text: str) -> None:
    script.write_text("import json\n" + text)
    assert preload.needed_by(str(script), is_elastic=True) == preload.TRAINING


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("text", ["import json, os.path\nfrom collections.abc import Sequence\n", "print(1)\n", ""])
def test_a_script_of_the_standard_library_needs_nothing(script: Path, text: str, is_elastic: bool) -> None:
    script.write_text(text)
    assert preload.needed_by(str(script), is_elastic=is_elastic) == ()


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(name)\n",
        "from runpy import run_path\n",
        "import sys\n__import__(sys.argv[1])\n",
        "import pickle, sys\npickle.load(sys.stdin.buffer)()\n",
        "import sys\nexec(sys.argv[1])\n",
    ],
)
def test_a_script_that_may_import_what_it_does_not_name_has_torch_imported(script: Path, text: str) -> None:
    script.write_text(text)
    assert preload.needed_by(str(script), is_elastic=False) == preload.TORCH


def test_a_module_is_not_looked_for(script: Path) -> None:
    assert preload.needed_by("-m package.train", is_elastic=False) == preload.TORCH
    assert preload.needed_by("-m package.train", is_elastic=True) == preload.TRAINING


def test_nothing_that_may_load_a_driver_is_imported_before_the_fork(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(TRAINS)
    monkeypatch.setattr(preload, "is_cuda_build", lambda libraries: True)
    assert preload.needed_by(str(script), is_elastic=False) == preload.TORCH
