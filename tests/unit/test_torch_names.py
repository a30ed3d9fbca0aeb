"""The list of torch's private names is that of the code, and the installed torch has them all."""

from __future__ import annotations

from pathlib import Path

from phalanx import torch_names
from phalanx.versions import TORCH_BELOW, TORCH_MINIMUM
from torch_internals import private_names

OF_OTHERS = {
    "_asdict", "_exit", "_getframe", "_run_exitfuncs", "_shutdown",  # Python
    "_defaults",  # torchmetrics
    "_gathered_gradients", "_gathers_once", "_peer_state",  # ours, set by another module than the one that reads them
}  # fmt: skip


def test_every_private_name_in_the_code_is_listed() -> None:
    used = {name for name in private_names() if not name.startswith(".")}
    assert used == torch_names.PRIVATE_NAMES


def test_every_private_attribute_in_the_code_is_listed() -> None:
    used = {name[1:] for name in private_names() if name.startswith(".")} - OF_OTHERS
    assert used == torch_names.PRIVATE_ATTRIBUTES.keys()


def test_the_installed_torch_has_them() -> None:
    assert torch_names.missing_names() == []


def test_a_name_that_is_gone_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(torch_names, "PRIVATE_NAMES", frozenset({"torch._C._gone", "torch._gone.too"}))
    monkeypatch.setattr(torch_names, "PRIVATE_ATTRIBUTES", {"_gone": "torch.nn.Module"})
    assert len(torch_names.missing_names()) == 3


def test_the_ends_of_the_supported_range_were_checked() -> None:
    releases = [tuple(map(int, text.split(".")[:2])) for text in torch_names.CHECKED_ON]
    assert min(releases) == TORCH_MINIMUM
    assert max(releases) == (TORCH_BELOW[0], TORCH_BELOW[1] - 1)


def test_uses_are_found_through_imports_aliases_and_strings(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "import torch, sys\nimport torch.distributed as dist\nfrom torch.utils import _pytree as tree\n"
        "torch._C._a()\ndist._b.c\ntree.d\nx._e\nself._mine = 1\ny._mine\nsys.modules.get('torch._f')\n"
    )
    assert set(private_names(tmp_path)) == {
        "torch._C._a", "torch.distributed._b.c", "torch.utils._pytree", "torch.utils._pytree.d", "._e", "torch._f",
    }  # fmt: skip
