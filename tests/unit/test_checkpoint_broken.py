"""Checkpoints and files of weights that are broken, or made by somebody who means harm."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.checkpoint.tensors.safetensors_file import TensorFile
from phalanx.errors import ConfigError, DataError


def _forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Save, and change the manifest, with a marker that vouches for it."""
    path = px.save(folder, nn.Linear(2, 2), step=1)
    manifest, marker = next(path.glob("manifest*")), path / "complete.json"
    value = json.loads(manifest.read_text())
    change(value)
    manifest.write_text(json.dumps(value))
    said = json.loads(marker.read_text())
    marker.write_text(json.dumps({**said, "sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}))
    return path


def _piece(value: dict[str, Any]) -> list[Any]:
    piece: list[Any] = value["tensors"]["model/weight"][2][0]
    return piece


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda v: v.pop("files"), "KeyError('files')"),
        (lambda v: v.update(files=3), "'int' object is not iterable"),
        (lambda v: v["files"][0].update(name="../rank"), "'../rank' is no file of a checkpoint"),
        (lambda v: v.update(tables=".."), "'..' is no file of a checkpoint"),
        (lambda v: v["files"][0].update(crc32=[]), "has 0 blocks of 8388608"),
        (lambda v: v["files"][0].update(block_bytes=1 << 50), "has 1 blocks of 1125899906842624"),
        (lambda v: _piece(v).__setitem__(3, -5), "a piece of 'model/weight' lies outside"),
        (lambda v: _piece(v).__setitem__(3, 1 << 50), "a piece of 'model/weight' lies outside"),
        (lambda v: _piece(v).__setitem__(2, [-2, -2]), "a piece of 'model/weight' lies outside"),
        (lambda v: _piece(v).__setitem__(0, 7), "tuple index out of range"),
        (lambda v: v["tensors"]["model/weight"].__setitem__(1, [1 << 40, 2]), "parts of 'model/weight' are in no file"),
        (lambda v: v.update(values={"unique": [], "of_rank": []}), "1 ranks have 1 files and 0 values"),
    ],
)
def test_a_manifest_that_describes_no_checkpoint_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    _forge(tmp_path, change)
    with pytest.raises(DataError, match=rf"manifest-\w+\.json does not describe a checkpoint.*{re.escape(why)}"):
        px.load(tmp_path, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"manifest": "../../etc/hostname"}, "'../../etc/hostname' is no file of a checkpoint"),
        ({"sequence": "9"}, "sequence is of type str, not int"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"version": 2}, "has version 2; this version of phalanx reads 1"),
    ],
)
def test_a_marker_that_is_none_does_not_hide_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None, said: dict[str, Any], why: str
) -> None:
    model = nn.Linear(2, 2)
    px.save(tmp_path, model, step=1)
    marker = px.save(tmp_path, model, step=2) / "complete.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **said}))
    assert px.load(tmp_path, model).step == 1
    assert why in caplog.text
    px.save(tmp_path, model, step=3)
    assert marker.exists()  # what nobody understands is not removed
    marker.write_text("[" * 100_000)
    px.load(tmp_path, model)
    assert f"{marker} is broken" in caplog.text


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tmp_path: Path) -> None:
    """The first bytes of a safetensors file are the length of its header: 640 are `80 02`, as in a pickle."""
    for first in (b"\x80\x02", b"PK"):
        header = b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        length = int.from_bytes(first, "little")
        path = tmp_path / first.hex()
        path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + torch.tensor([2.0]).numpy().tobytes())
        model = nn.ParameterDict({"weight": torch.zeros(1)})
        px.load(path, model)
        assert model["weight"].item() == 2


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_of_any_protocol_is_refused(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "w").write_bytes(pickle.dumps({"weight": 1}, protocol))
    with pytest.raises(ConfigError, match="is a pickle, which runs code"):
        px.load(tmp_path / "w", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "'a' of shape [-1] cannot lie between bytes 0 and"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-8,-4]}}', "cannot lie between bytes -8 and -4"),
        ('{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', "'a' of shape [9] cannot lie between bytes 0 and 4"),
        ('{"a":{"dtype":"F32","shape":[1]}}', "'data_offsets'"),
        ("[" * 100_000, "recursion"),
        ("[]", "is no safetensors file"),
    ],
)
def test_a_header_that_lies_is_an_error(tmp_path: Path, header: str, why: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(DataError, match=re.escape(why)):
        TensorFile(path).slots()


def test_an_empty_file_and_an_endless_header_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty is empty\. Take another copy"):
        px.load(tmp_path / "empty", nn.Linear(1, 1))
    with (tmp_path / "long").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # takes no room on the disk
    with pytest.raises(DataError, match="its header would have 200000000 bytes"):
        px.load(tmp_path / "long", nn.Linear(1, 1))


def test_a_name_that_the_format_uses_is_refused(tmp_path: Path) -> None:
    model = nn.ParameterDict({"__metadata__": torch.zeros(1)})
    px.load(px.save(tmp_path, model), model)
    with pytest.raises(ConfigError, match="a tensor cannot be called '__metadata__'"):
        px.export_state_dict(model, tmp_path / "f")
