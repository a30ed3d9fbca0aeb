"""The script of the page on incremental training resumes on the second day from the rows of the first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launching import launch_servers_warm

pytestmark = pytest.mark.dist

PAGE = (Path(__file__).parents[2] / "docs" / "incremental.md").read_text()


def test_the_second_day_starts_from_the_rows_of_the_first(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python title=[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "daily.py").write_text(script)
    losses = []
    for day in ("1", "2"):
        command = f"phalanx run --server-num 1 --worker-num 2 daily.py {day}"
        assert command in PAGE
        done = launch_servers_warm(tmp_path, 1, 2, "daily.py", day)
        assert done.code == 0, done.out + done.err
        losses.append(float(re.findall(rf"day {day}: loss (\S+)", done.out)[-1]))
    assert losses[0] < 0.6
    assert losses[1] < 0.6 * losses[0], "half of the ids are known from the first day"
