"""What the page on readers shows, runs; the words it names exist."""

import re
from pathlib import Path

import pytest

import phalanx
from phalanx import fleet, ps
from phalanx.data import InMemoryDataset, QueueDataset, vision
from phalanx.data.ctr import slots, synthetic
from phalanx.data.readers import cifar

GUIDE = (Path(__file__).parents[2] / "docs" / "data-readers.md").read_text()
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", FENCED.sub("", GUIDE), re.MULTILINE)


@pytest.fixture
def data(tmp_path, monkeypatch):
    (tmp_path / "cifar").mkdir()
    for name in cifar.TRAIN_FILES:
        (tmp_path / "cifar" / name).write_bytes(bytes(2 * cifar.RECORD_BYTES))
    (tmp_path / "logs").mkdir()
    line = "\t".join(["1", *map(str, range(13)), *(f"u{slot}" for slot in range(26))]) + "\n"
    for part in ("a", "b"):
        (tmp_path / "logs" / part).write_text(line * 600)
    monkeypatch.chdir(tmp_path)


def test_the_blocks_run_one_after_the_other(data):
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(re.sub(r"^    ", "", block, flags=re.MULTILINE), "data-readers", "exec"), names)
    assert len(BLOCKS) == 3
    assert names["images"].shape == (2, 3, 32, 32)
    assert names["image"].shape == (3, 32, 32)
    assert isinstance(names["dataset"], InMemoryDataset)
    assert names["ids"].shape == (1200 - 2 * 512, 26)


def test_the_line_of_tokens_shown_is_one():
    line = re.search(r"# lines such as: (.*)", GUIDE)[1]
    schema = slots.SlotSchema(dense=["age"], sparse=["user", "item"], format="tokens")
    parsed = slots.parse_slots(line.encode() + b"\n", schema)
    assert parsed.broken == 0
    assert parsed.rows.dense.tolist() == [[pytest.approx(0.3)]]


def test_every_reader_and_transform_is_on_the_page():
    for name in vision.__all__:
        assert name == "Chain" or re.search(rf"\b{name}\b", GUIDE), name
    for name in re.findall(r"`(\w+Dataset)\b", GUIDE):
        assert hasattr(phalanx.data, name) or name == "WideDeepDataset", name


def test_every_word_of_ours_exists():
    verbs = ("set_filelist", "set_batch_size", "load_into_memory", "local_shuffle", "global_shuffle", "release_memory")
    for name in verbs:
        assert f"`{name}`" in GUIDE
        assert hasattr(InMemoryDataset, name)
    for name in set(re.findall(r"`dataset\.(\w+)\(\)", GUIDE)):
        assert hasattr(QueueDataset, name)
    assert ps.hash_ids
    assert synthetic.SyntheticClicks.bayes_auc
    for name in re.findall(r"`fleet\.metrics\.(\w+), ([\w, ]+)`", GUIDE)[0]:
        assert all(hasattr(fleet.metrics, verb) for verb in name.split(", "))


def test_an_item_and_a_history_of_items_share_a_table():
    (block,) = FENCED.findall(GUIDE)
    names = {}
    exec(compile(block, "guide", "exec"), names)
    assert names["scores"].shape == (2,)
    assert names["scores"][1] == 0, "a user without a history"
    names["scores"].sum().backward()
