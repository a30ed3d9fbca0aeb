"""What the page on data pipelines shows, runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "data-pipelines.md").read_text()
BLOCKS = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", GUIDE, re.MULTILINE)


def test_the_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cifar-10").mkdir()
    for part in range(1, 6):
        records = np.zeros((14, 3073), np.uint8)
        records[:, 0] = part
        (tmp_path / "cifar-10" / f"data_batch_{part}.bin").write_bytes(records.tobytes())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(re.sub(r"^    ", "", block, flags=re.MULTILINE), "data-pipelines", "exec"), names)
    assert len(BLOCKS) == 4
    assert capsys.readouterr().out == "2\n2 2\n"
    assert tuple(names["image"].shape) == (32, 3, 224, 224)  # type: ignore[attr-defined]
