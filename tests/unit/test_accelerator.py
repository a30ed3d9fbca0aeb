"""One module knows kinds of devices; what it says on a host without any, and for devices that are not CUDA's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx import accelerator
from vocabulary import SOURCE, files, tree_of

KIND = re.compile(r"\b(cuda|xpu)\b")
KIND_ANYWHERE = re.compile("cuda|xpu")
MESSAGES = {"cluster/env/variables.py", "comm/process_group.py", "launch/job/start_messages.py"}
"""Files that speak of backends and builds to people."""


def names_of_kinds(path: Path) -> Iterator[str]:
    """Yield what a file says of a kind of device in code: `torch.cuda`, `tensor.is_cuda`, a string with its name."""
    if not KIND_ANYWHERE.search(path.read_text()):
        return
    tree = tree_of(path)
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"cuda", "xpu", "is_cuda", "is_xpu"}:
            yield f"{path.name}:{node.lineno} .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            is_sentence = len(node.value.split()) > 2
            if KIND.search(node.value) and not is_sentence:
                yield f"{path.name}:{node.lineno} {node.value!r}"


def test_no_other_module_names_a_kind_of_device() -> None:
    paths = [path for path in files() if path != SOURCE / "accelerator.py"]
    others = [path for path in paths if str(path.relative_to(SOURCE)) not in MESSAGES]
    assert [name for path in others for name in names_of_kinds(path)] == []
    spoken = [name for path in paths if path not in others for name in names_of_kinds(path)]
    assert [name for name in spoken if " ." in name] == []


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text('"""On cuda."""\nif x.is_cuda or torch.cuda.is_available():\n    move(x, "cuda:0")\n')
    assert len(list(names_of_kinds(path))) == 3


def test_a_host_without_devices_has_none() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert accelerator.find_kind() is None
    assert accelerator.count_devices() == 0
    assert accelerator.current_index() == -1
    assert accelerator.device_in_use() is None
    assert accelerator.describe_device() is None
    assert accelerator.list_names() == []
    assert accelerator.default_backend("shm") == "shm"
    assert not accelerator.can_pin()
    assert not accelerator.has_nccl()


@pytest.mark.parametrize(
    ("kind", "backend"), [("cuda", "cpu:shm,cuda:nccl"), ("xpu", "cpu:shm,xpu:xccl"), ("unknown", "shm")]
)
def test_the_registry_of_backends_says_what_carries_tensors(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    monkeypatch.setattr(accelerator, "find_kind", lambda: kind)
    assert accelerator.default_backend("shm") == backend


def test_the_cpu_keeps_its_random_numbers_in_a_block_and_is_not_seeded_as_a_device() -> None:
    before = torch.get_rng_state()
    with accelerator.fork_random_numbers(torch.device("cpu")):
        torch.rand(3)
    accelerator.seed_device(torch.device("cpu"), 7)
    assert torch.equal(torch.get_rng_state(), before)
