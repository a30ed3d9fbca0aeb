"""`hash_ids`: texts in memory get the ids that a reader gives them."""

import numpy as np
import pytest
import torch

from phalanx import ps
from phalanx.data.ctr import slots
from phalanx.data.ctr.slots import SlotSchema, parse_slots
from phalanx.errors import ConfigError

TEXTS = ["x", "", "日本", "a longer text than eight bytes"]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("space", [None, 50])
def test_ids_are_those_of_the_reader(native, space, monkeypatch):
    monkeypatch.setattr(slots, "HAS_NATIVE", native and slots.HAS_NATIVE)
    schema = SlotSchema(sparse=["item"], hash_space=space)
    lines = "".join(f"1\t{text}\n" for text in TEXTS).encode()
    expected = parse_slots(lines, schema, native=False).rows.ids[:, 0].tolist()
    forms = [
        TEXTS,
        tuple(TEXTS),
        [text.encode() for text in TEXTS],
        np.array(TEXTS),
        np.array(TEXTS, object),
        np.array([text.encode() for text in TEXTS]),
    ]
    for texts in forms:
        ids = ps.hash_ids(texts, "item", hash_space=space)
        assert (ids.dtype, ids.tolist()) == (torch.int64, expected)


def test_ids_have_the_shape_of_the_texts_and_differ_by_salt():
    ids = ps.hash_ids(np.array([["a", "b"], ["b", "c"]]), "item")
    assert ids.shape == (2, 2)
    assert ids[0, 1] == ids[1, 0]
    assert ps.hash_ids(["a"], "user")[0] != ids[0, 0]
    assert ps.hash_ids([], "item").shape == (0,)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("texts", "salt", "message"),
    [
        (["a", None], "item", "text 1 is None, no str or bytes"),
        (np.array([1]), "item", "text 0 is 1, no str or bytes"),
        (["a", "\ud800"], "item", "text 1, .* has half a surrogate pair"),
        ("abc", "item", "takes a sequence or NumPy array of texts and the salt, a str; found str and str"),
        (["a"], 3, "found list and int"),
        ({"a"}, "item", "found set and str"),
    ],
)
def test_what_is_no_text_is_named(texts, salt, message, native, monkeypatch):
    monkeypatch.setattr(slots, "HAS_NATIVE", native and slots.HAS_NATIVE)
    with pytest.raises(ConfigError, match=message):
        ps.hash_ids(texts, salt)


def test_a_hash_space_out_of_range_is_an_error():
    with pytest.raises(ConfigError, match="hash_space=0"):
        ps.hash_ids(["a"], "item", hash_space=0)
