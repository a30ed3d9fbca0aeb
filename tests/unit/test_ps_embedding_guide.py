"""What the guide to parameter servers shows, runs."""

import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import phalanx as px
from phalanx import fleet, ps
from phalanx.ps.client import table_client
from phalanx.strategy.configs import ASyncConfigs

GUIDE = (Path(__file__).parents[2] / "docs" / "parameter-server.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_five_steps_train_in_one_process():
    names = {"__name__": "__main__"}
    exec(compile(BLOCKS[0], "guide", "exec"), names)
    assert names["loss"].item() < 1.0
    assert table_client.current().mode.store.report()["ids"].rows > 500
    assert table_client.current().mode.step == 10


def test_bags_weights_and_jagged_ids_are_looked_up_at_once():
    names = {}
    exec(compile(BLOCKS[1], "guide", "exec"), names)
    item, history, tags = names["pooled"]
    assert (item.is_nested, item.shape[0], item.shape[2]) == (True, 2, 16)
    assert (history.shape, tags.shape) == ((2, 16), (2, 8))


def test_the_plan_puts_an_embedding_into_a_table():
    model = nn.Sequential(OrderedDict(words=nn.Embedding(10, 8), head=nn.Linear(8, 1)))
    before = model.words.weight.detach().clone()
    names = {"px": px, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names["data"] = (torch.arange(10).repeat(64), torch.zeros(640))
    exec(compile(BLOCKS[2], "guide", "exec"), names)
    assert table_client.holds(model.words.weight)
    assert len(names["loader"]) == 10
    assert torch.equal(model.state_dict()["words.weight"], before)


def test_every_word_of_ours_in_the_guide_exists():
    for name in set(re.findall(r"px\.ps\.(\w+)", GUIDE)):
        assert getattr(ps, name)
    for name in set(re.findall(r"fleet\.(\w+)\(", GUIDE)):
        assert getattr(fleet, name)
    for configs in re.findall(r"a_sync_configs = \{(.*?)\}", GUIDE):
        assert set(re.findall(r'"(\w+)":', configs)) <= set(ASyncConfigs.__annotations__)
