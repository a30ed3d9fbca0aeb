"""Lines of click logs into arrays: the native parser and its Python twin give the same, and broken lines are named."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.data.ctr.slots import ParsedText, SlotSchema, describe_broken, hash_texts, parse_slots
from phalanx.data.ctr.slots_python import hash_texts_python
from phalanx.errors import ConfigError
from phalanx.versions import HAS_NATIVE

TABLE = SlotSchema(dense=("age", "price"), sparse=("user", "item"))
TOKENS = SlotSchema(dense=("age", "price"), sparse=("user", "item"), format="tokens")
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")
readers = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)], ids=["python", "native"])

odd = b"0 -1.5 3e2 .5 7. 1e-40 1e-400 0e999 3.4028236e38 1e39 1e999 nan inf +1 1_0 0x1p3 - ."
numbers = st.sampled_from([*odd.split(), b"", b" 1"]) | st.floats(width=32, allow_nan=False, allow_infinity=False).map(
    lambda x: repr(x).encode()
)
texts = st.binary(max_size=20).map(lambda b: b.translate(None, b"\t\n\r :"))
column_lines = st.builds(
    lambda a, b: b"\t".join([*a, *b]), st.lists(numbers, min_size=2, max_size=4), st.lists(texts, max_size=3)
)
tokens = st.builds(
    lambda name, colon, value: name + colon + value,
    st.sampled_from([b"age", b"price", b"user", b"item", b"itm", b""]),
    st.sampled_from([b":", b":", b":", b""]),
    numbers | texts,
)
token_lines = st.builds(
    lambda label, rest, gap: gap.join([label, *rest]),
    numbers,
    st.lists(tokens, max_size=6),
    st.sampled_from([b" ", b"\t", b"  "]),
)


def assert_equal(a: ParsedText, b: ParsedText) -> None:
    assert (a.broken, a.first_broken) == (b.broken, b.first_broken)
    for name in ("label", "dense", "ids", "offsets"):
        left, right = getattr(a.rows, name), getattr(b.rows, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


@needs_native
@given(lines=st.lists(column_lines | st.binary(max_size=9), max_size=6), end=st.sampled_from([b"", b"\n", b"\r\n"]))
@example(lines=[b"1\t2\t3\ta\tb", b"", b"0\t\t\t\t"], end=b"\n")
def test_native_and_python_agree_on_columns(lines: list[bytes], end: bytes) -> None:
    text = b"\n".join(lines) + end
    for schema in (TABLE, SlotSchema(label=None, dense=("a",), sparse=("u", "v"), hash_space=7)):
        assert_equal(parse_slots(text, schema, native=True), parse_slots(text, schema, native=False))


@needs_native
@given(lines=st.lists(token_lines | st.binary(max_size=9), max_size=6), end=st.sampled_from([b"", b"\n", b"\r\n"]))
def test_native_and_python_agree_on_tokens(lines: list[bytes], end: bytes) -> None:
    text = b"\n".join(lines) + end
    assert_equal(parse_slots(text, TOKENS, native=True), parse_slots(text, TOKENS, native=False))


@needs_native
@given(lines=st.lists(token_lines, max_size=4), text=st.lists(column_lines, max_size=4))
def test_native_and_python_agree_on_slots_that_share_ids(lines: list[bytes], text: list[bytes]) -> None:
    for format, each in (("tokens", lines), ("columns", text)):
        schema = SlotSchema(
            dense=("age", "price"), sparse=("user", "item"), share={"item": "user"}, format=format, hash_space=99
        )
        joined = b"\n".join(each)
        assert_equal(parse_slots(joined, schema, native=True), parse_slots(joined, schema, native=False))


@needs_native
@given(
    slot=st.text(max_size=12),
    words=st.lists(st.text(max_size=30) | st.binary(max_size=30)),
    space=st.none() | st.integers(1, 2**63 - 1),
)
def test_native_and_python_hash_alike(slot: str, words: list[str | bytes], space: int | None) -> None:
    assert hash_texts(slot, words, space).tolist() == hash_texts_python(slot, words, space or 0).tolist()


@readers
def test_columns_become_arrays(native: bool) -> None:
    rows = parse_slots(b"1\t0.5\t-2\tann\t\n0\t\t3\tbob\tx\n", TABLE, native=native).rows
    assert rows.label.tolist() == [1, 0]
    assert rows.dense.tolist() == [[0.5, -2], [0, 3]]
    assert rows.ids.tolist() == np.stack([hash_texts("user", ["ann", "bob"]), hash_texts("item", ["", "x"])]).T.tolist()
    assert rows.offsets is None


@readers
def test_tokens_come_in_any_order_and_number(native: bool) -> None:
    text = b"1 item:a age:0.5 user:ann item:b\n0 price:2\n"
    rows = parse_slots(text, TOKENS, native=native).rows
    assert rows.dense.tolist() == [[0.5, 0], [0, 2]]
    assert rows.offsets is not None
    assert rows.offsets.tolist() == [0, 1, 3, 3, 3]
    assert rows.ids.tolist() == [*hash_texts("user", ["ann"]), *hash_texts("item", ["a", "b"])]


def test_the_same_text_is_another_id_in_another_slot() -> None:
    assert len({hash_texts(slot, ["68fd1e64"])[0] for slot in ("C1", "C2", "C3")}) == 3


@readers
@pytest.mark.parametrize("format", ["tokens", "columns"])
def test_a_slot_has_the_ids_of_the_slot_it_shares_with(native: bool, format: str) -> None:
    schema = SlotSchema(sparse=["item", "history", "user"], share={"history": "item"}, format=format)
    line = b"1 user:x history:x item:x" if format == "tokens" else b"1\tx\tx\tx"
    ids = parse_slots(line, schema, native=native).rows.ids.reshape(-1).tolist()
    assert ids == [*hash_texts("item", ["x", "x"]), *hash_texts("user", ["x"])]
    of_users = SlotSchema(sparse=["history"], share={"history": "item"}, format=format)
    line = b"1 history:x" if format == "tokens" else b"1\tx"
    assert parse_slots(line, of_users, native=native).rows.ids.reshape(-1)[0] == ids[0], "of a file without items"


@readers
@given(lengths=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=5))
def test_a_batch_of_tokens_splits_into_jagged_slots(native: bool, lengths: list[list[int]]) -> None:
    schema = SlotSchema(sparse=["a", "b", "c"], format="tokens")
    bags = [
        {slot: [f"{slot}{row}{n}" for n in range(k)] for slot, k in zip("abc", ks, strict=True)}
        for row, ks in enumerate(lengths)
    ]
    lines = [" ".join(["1", *(f"{slot}:{text}" for slot, texts in bag.items() for text in texts)]) for bag in bags]
    _, ids, offsets, _ = parse_slots("\n".join(lines).encode(), schema, native=native).rows.tensors()
    for slot, jagged in schema.split(ids, offsets).items():
        begins = jagged.offsets().tolist()
        assert begins == np.cumsum([0, *(len(bag[slot]) for bag in bags)]).tolist()
        assert jagged.values().tolist() == hash_texts(slot, [text for bag in bags for text in bag[slot]]).tolist()


def test_a_batch_of_columns_splits_into_its_columns() -> None:
    ids = torch.arange(6).view(3, 2)
    split = SlotSchema(sparse=["a", "b"]).split(ids)
    assert {name: column.tolist() for name, column in split.items()} == {"a": [0, 2, 4], "b": [1, 3, 5]}


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (torch.zeros(3, 3), None, r"ids of shape \(3, 3\) without offsets are no batch of 2 slots"),
        (torch.zeros(4), None, "Give the offsets of a batch of format 'tokens' too"),
        (torch.zeros(4), torch.tensor([0, 4]), r"2 offsets and ids of shape \(4,\) are no batch of 2 slots"),
        (torch.zeros(4), torch.tensor([0, 1, 3]), "as the dataset returned them"),
    ],
)
def test_what_is_no_batch_of_the_schema_is_an_error(ids, offsets, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotSchema(sparse=["a", "b"], format="tokens").split(ids, offsets)


def test_a_schema_that_shares_ids_can_be_pickled_and_compared() -> None:
    schema = SlotSchema(sparse=["a", "b"], share={"b": "a"})
    assert pickle.loads(pickle.dumps(schema)) == schema != SlotSchema(sparse=["a", "b"])


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"histori": "item"}, "names 'histori', which is none of the sparse slots. Did you mean 'history'"),
        ({"history": "item", "item": "history"}, "slot 'history' cannot have the ids of 'item', which shares itself"),
        ({"history": "age"}, "which shares itself or is no slot"),
        ({"history": ""}, "cannot have the ids of ''"),
    ],
)
def test_slots_that_cannot_share_ids_are_named(share, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotSchema(dense=["age"], sparse=["item", "history"], share=share)


def test_ids_spread_over_a_hash_space() -> None:
    ids = hash_texts("C1", [str(i) for i in range(50_000)], 1000)
    assert ids.min() >= 0
    counts = np.bincount(ids, minlength=1000)
    assert counts.size == 1000
    assert 20 < counts.min() < counts.max() < 90


@readers
@pytest.mark.parametrize(
    ("schema", "line", "message"),
    [
        (TABLE, b"1\t2\t3\ta", r"found 4 fields, expected 5 \(label, age, price, ...\)"),
        (TABLE, b"1\t2\tx3\ta\tb", r"field 3 \(price\): found 'x3', expected a finite decimal number"),
        (TABLE, b"\t2\t3\ta\tb", r"field 1 \(label\): found ''"),
        (TABLE, b"1\tnan\t3\ta\tb", r"field 2 \(age\): found 'nan'"),
        (TOKENS, b"1 user:a age", "field 3: found 'age', expected name:value"),
        (TOKENS, b"1 usr:a", r"field 2: found 'usr:a', but the schema has no 'usr'. Did you mean 'user'\?"),
        (TOKENS, b"1 age:1 age:2", "field 3: found 'age:2', but 'age' came before; a dense field comes once"),
        (TOKENS, b"user:a", "field 1: found 'user:a', expected a finite decimal number"),
        (TOKENS, b"", "found 0 fields"),
    ],
)
def test_a_broken_line_says_what_is_wrong(schema: SlotSchema, line: bytes, message: str, native: bool) -> None:
    good = b"0\t1\t1\ta\tb\n" if schema is TABLE else b"0 user:a\n"
    parsed = parse_slots(good + line + b"\n" + good, schema, native=native)
    assert (len(parsed.rows), parsed.broken) == (2, 1)
    assert parsed.first_broken is not None
    assert parsed.first_broken.line == 1
    assert re.search(message, describe_broken(parsed.first_broken, schema))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dense": ("a",), "sparse": ("a",)}, "field named 'a' in .*one name of its own"),
        ({"dense": ("a b",)}, "without spaces and colons"),
        ({"hash_space": 0}, "hash_space=0. Give 1 to"),
        ({"format": "csv"}, "format 'csv'. Give 'columns' or 'tokens'"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotSchema(**wrong)  # type: ignore[arg-type]
