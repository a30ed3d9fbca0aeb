"""What the guide to parameter servers shows, runs."""

import re
from pathlib import Path

import pytest

from phalanx import fleet, ps
from phalanx.ps import attach
from phalanx.strategy import ASyncConfigs

GUIDE = (Path(__file__).parents[2] / "docs" / "parameter-server.md").read_text()


@pytest.fixture(autouse=True)
def fresh_tables():
    yield
    if attach._current is not None:
        attach._current.close()
        attach._current = None


def test_the_five_steps_train_in_one_process():
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(block, "guide", "exec"), names)
    assert names["loss"].item() < 1.0
    assert attach.current().mode.store.report()["ids"].rows > 500
    assert attach.current().mode.step == 10


def test_every_word_of_ours_in_the_guide_exists():
    for name in set(re.findall(r"px\.ps\.(\w+)", GUIDE)):
        assert getattr(ps, name)
    for name in set(re.findall(r"fleet\.(\w+)\(", GUIDE)):
        assert getattr(fleet, name)
    for configs in re.findall(r"a_sync_configs = \{(.*?)\}", GUIDE):
        assert set(re.findall(r'"(\w+)":', configs)) <= set(ASyncConfigs.__annotations__)
