"""One table lists every environment variable, and everything shown of it comes from there."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

import phalanx as px
from phalanx.cluster.env.settings import TABLE, markdown, shown_value, warn_unsupported
from phalanx.diagnose.commands import env

ROOT = Path(__file__).parents[2]
NAMES = {s.name for s in TABLE}
FAMILY_NAME = re.compile(
    r"\b(?:PHALANX|PADDLE|TORCHELASTIC|SLURM|TORCHINDUCTOR|OMPI|PMI|PMIX|PET|FLAGS|OMP|GLOO|NCCL)_[A-Za-z_]*[A-Za-z]\b"
    r"|\b(?:MALLOC|GLIBC)_[A-Z]\w*"
)
READ = re.compile(r"""(?:environ(?:\.get|\.pop|\.setdefault)?|getenv)\s*[\[(]\s*f?["']([A-Za-z_]+)["']""")


def test_every_variable_the_source_speaks_of_is_in_the_table():
    unknown = set()
    for path in (ROOT / "src" / "phalanx").rglob("*.py"):
        text = path.read_text()
        found = set(FAMILY_NAME.findall(text)) | set(READ.findall(text))
        unknown |= {f"{name} in {path.relative_to(ROOT)}" for name in found - NAMES}
    assert not unknown


def test_every_variable_of_the_table_is_spoken_of_by_the_source():
    text = "\n".join(p.read_text() for p in (ROOT / "src" / "phalanx").rglob("*.py") if p.name != "variables.py")
    used = {s.name for s in TABLE if s.access != "ignored"}
    built = {s.name for s in TABLE if s.name.removeprefix("PHALANX_") in text}  # f"{prefix}MASTER_ADDR"
    assert not {name for name in used - built if name not in text}


def test_names_are_unique_and_rows_complete():
    assert len(NAMES) == len(TABLE)
    assert all(s.meaning_en and s.meaning_zh for s in TABLE)


def test_the_page_equals_the_table():
    assert (ROOT / "docs" / "settings.md").read_text() == markdown(), "run: make docs"


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("FLAGS_sync_nccl_allreduce", "leave it out"),
        ("FLAGS_fuse_parameter_memory_size", "strategy.fuse_grad_size_in_MB"),
        ("FLAGS_fuse_parameter_groups_size", "fused by bytes, use strategy.fuse_grad_size_in_MB"),
        ("FLAGS_check_nan_inf", "phalanx run --check-nan-inf"),
    ],
)
def test_a_dead_flag_warns_with_its_replacement(name, replacement):
    with pytest.warns(UserWarning, match=f"{name}=32: Does nothing.*{re.escape(replacement)}"):
        warn_unsupported({name: "32"})


def test_without_dead_flags_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unsupported({"FLAGS_selected_gpus": "0", "FLAGS_check_nan_inf": "0"})


def test_every_way_to_begin_warns_of_dead_flags(monkeypatch):
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    with pytest.warns(UserWarning, match="FLAGS_check_nan_inf=1: Does nothing here"):
        px.init()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("X_API_KEY", "abc", "******"),
        ("MY_SECRET", "abc", "******"),
        ("DB_PASSWORD", "abc", "******"),
        ("HF_TOKEN", "", ""),
        ("HF_APIKEY", "abc", "******"),
        ("MYSQL_PWD", "abc", "******"),
        ("PWD", "/work", "/work"),
        ("OLDPWD", "/work", "/work"),
        ("PHALANX_STORE", "http://user:pw@host/x", "http://******@host/x"),
        ("RANK", "1", "1"),
    ],
)
def test_secrets_are_masked(name, value, shown):
    assert shown_value(name, value) == shown


def test_the_command_lists_all_and_shows_values(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    listed = json.loads(CliRunner().invoke(env, ["--list", "--json"]).output)
    assert {row["name"] for row in listed} == NAMES
    assert next(row["value"] for row in listed if row["name"] == "RANK") == "7"
    plain = CliRunner().invoke(env, ["--list", "--lang", "zh"]).output
    assert all(s.name in plain for s in TABLE)
    assert "进程总数" in plain


def test_the_command_shows_only_what_is_set_unless_asked(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert "None of the" in CliRunner().invoke(env, []).output
    monkeypatch.setenv("RANK", "7")
    shown = CliRunner().invoke(env, []).output
    assert "RANK" in shown
    assert "WORLD_SIZE" not in shown


def test_the_command_writes_the_page():
    assert CliRunner().invoke(env, ["--markdown"]).output == markdown()
