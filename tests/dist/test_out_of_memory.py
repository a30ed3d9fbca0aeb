"""Under the launcher a loop of the user's own is told what fills the memory when it runs out."""

import json
from pathlib import Path

import pytest

from launching import launch_warm

pytestmark = pytest.mark.dist

SCRIPT = """
import torch, phalanx as px
model, optimizer, _ = px.distribute(net := torch.nn.Linear(8, 4), torch.optim.Adam(net.parameters()))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
torch.empty(1 << 50)
"""


def test_the_error_file_and_the_screen_have_the_note(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = launch_warm(tmp_path, "-n", "1", "train.py")
    assert job.code != 0
    (found,) = [json.loads(path.read_text()) for path in (tmp_path / "log").glob("**/*.json") if "error" in path.name]
    for shown in (found["traceback"], job.out + job.err):
        assert "can't allocate memory" in shown
        assert "Out of memory: what rank 0 holds, and what would save most." in shown
        assert "- half the rows in a batch, with gradient_merge over 2 batches: saves what px.explain" in shown
