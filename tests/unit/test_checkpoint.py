"""Checkpoints of one process."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.checkpoint.tensors.safetensors_file import TensorFile, write_tensors
from phalanx.errors import BackendError, ConfigError, DataError
from phalanx.parallel.session import StepPhase
from phalanx.parallel.stateful import keep_state
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.learning_rate import LearningRateFactor, apply_factor

torch.manual_seed(3)
DATA = (torch.randn(48, 4), torch.randint(0, 3, (48,)))


def make(seed: int = 0, classes: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, batches: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item() + random.random() + np.random.rand())
    return losses


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_bit_by_bit_inside_an_epoch(tmp_path: Path, background: bool) -> None:
    model, optimizer, scheduler = make()
    loader = px.data.ShardedLoader(DATA, global_batch=8)
    batches = iter(loader)
    train(model, optimizer, scheduler, batches, 3)
    path = px.save(tmp_path, model, optimizer, loader, scheduler=scheduler, extra={"best": 0.5}, background=background)
    expected = train(model, optimizer, scheduler, batches, 3)
    px.checkpoint.wait()

    other, other_optimizer, other_scheduler = make(seed=1)
    other_loader = px.data.ShardedLoader(DATA, global_batch=8)
    found = px.load(tmp_path, other, other_optimizer, other_loader, scheduler=other_scheduler)
    assert (found.path, found.step, found.extra) == (path, 1, {"best": 0.5})
    assert train(other, other_optimizer, other_scheduler, iter(other_loader), 3) == expected
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert same(other_scheduler.state_dict(), scheduler.state_dict())


def test_files_are_safetensors_and_json_with_plain_names(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    wrapped = nn.DataParallel(model)
    path = px.save(tmp_path, wrapped, optimizer, step=7)
    assert path == tmp_path / "step-7"
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    (file,) = path.glob("*.safetensors")
    saved = safetensors.torch.load_file(file)
    assert same({n.removeprefix("model/"): t for n, t in saved.items() if n.startswith("model/")}, model.state_dict())
    assert not any("module" in json.loads(part.read_text()) for part in path.glob("*.json"))
    compiled_layer = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    manifest = next(px.save(tmp_path, compiled_layer).glob("manifest*")).read_text()
    assert '"model/0.weight"' in manifest
    assert "_orig_mod" not in manifest


def test_state_of_any_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16).t())
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("none", torch.empty(0, 4))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("count", torch.tensor(2**60))
            self.note = "a"

        def get_extra_state(self) -> Any:
            return {"note": self.note, "history": [torch.arange(3)]}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"] + str(state["history"][0].tolist())

    model = Odd()
    optimizer = torch.optim.Adam(model.parameters())
    (model.low.float().sum() * model.scale).backward()
    optimizer.step()
    # A float32 moment of a bfloat16 parameter, as optimizers with master weights have.
    optimizer.state[model.low]["exp_avg"] = torch.full((5, 3), 1 + 2**-20)
    px.save(tmp_path, model, optimizer)
    other = Odd()
    other_optimizer = torch.optim.Adam(other.parameters())
    px.load(tmp_path, other, other_optimizer)
    for name, tensor in model.state_dict().items():
        assert name == "_extra_state" or same(tensor, other.state_dict()[name])
    assert other.note == "a[0, 1, 2]"
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_tied_weight_is_saved_once_and_read_under_either_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool = True) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            if tie:
                self.head.weight = self.embed.weight

    model, untied = Tied(), Tied(tie=False)
    path = px.save(tmp_path, model)
    assert json.loads(next(path.glob("manifest*")).read_text())["tensors"].keys() & {
        "model/head.weight", "model/embed.weight"
    } == {"model/embed.weight"}  # fmt: skip
    px.load(tmp_path, untied)
    assert same(untied.state_dict(), model.state_dict())
    px.export_state_dict(model, tmp_path / "tied")
    assert same(safetensors.torch.load_file(tmp_path / "tied"), dict(model.state_dict()))
    px.load(tmp_path / "tied", Tied())


def test_the_average_that_a_strategy_keeps_is_saved_with_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    def averaged() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer, _ = make()
        px.distribute(model, optimizer, strategy=px.DistributedStrategy(ema=True))
        return model, optimizer

    plain, plain_optimizer, _ = make()
    px.save(tmp_path / "plain", plain, plain_optimizer)
    model, optimizer = averaged()
    model(DATA[0]).sum().backward()
    optimizer.step()
    px.save(tmp_path / "averaged", model, optimizer)
    other, other_optimizer = averaged()
    px.load(tmp_path / "averaged", other, other_optimizer)
    assert same(px.ema_of(other).state_dict(), px.ema_of(model).state_dict())
    assert "is reset" not in caplog.text
    px.load(tmp_path / "plain", other, other_optimizer)
    assert "has no running average of the weights, which is reset" in caplog.text
    px.load(tmp_path / "averaged", plain)


def test_a_model_alone_takes_the_weights_and_leaves_random_numbers_alone(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    px.save(tmp_path, model, optimizer)
    other = make(seed=1)[0]
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    px.load(tmp_path, other)
    assert torch.equal(torch.rand(1), expected)
    assert same(other.state_dict(), model.state_dict())


def test_names_that_differ_are_listed(tmp_path: Path) -> None:
    model, optimizer, scheduler = make()
    px.save(tmp_path, model, optimizer)
    renamed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3, bias=False))
    with pytest.raises(ConfigError, match=r"parameters and buffers differ\. Only in the checkpoint: '3.bias'"):
        px.load(tmp_path, renamed)
    with pytest.raises(ConfigError, match=r"'3.weight' has shape \[3, 8\] there and \[7, 8\] in this model"):
        px.load(tmp_path, make(classes=7)[0])
    with pytest.raises(ConfigError, match=r"Missing in the checkpoint: '0.scale', '1.scale'"):
        px.load(tmp_path, nn.Sequential(*(nn.ParameterDict({"scale": torch.zeros(1)}) for _ in range(2))))
    with pytest.raises(ConfigError, match="holds no scheduler: it was saved without"):
        px.load(tmp_path, model, optimizer, scheduler=scheduler)
    some = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(ConfigError, match=r"parameters of the optimizer differ\. Only in the checkpoint: '0.weight'"):
        px.load(tmp_path, model, some)
    with pytest.raises(ConfigError, match="the optimizer holds 6 parameters that the model does not"):
        px.save(tmp_path, nn.Linear(1, 1), optimizer)


def test_parameter_groups_are_found_by_name(tmp_path: Path) -> None:
    model = make()[0]
    params = dict(model.named_parameters())
    groups = [{"params": [params["0.weight"]], "lr": 0.5}, {"params": [params["3.bias"]], "lr": 0.25}]
    px.save(tmp_path, model, torch.optim.SGD(groups))
    turned = torch.optim.SGD([{"params": g["params"], "lr": 0.0} for g in reversed(groups)])
    px.load(tmp_path, model, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.25, 0.5]
    merged = torch.optim.SGD([params["0.weight"], params["3.bias"]])
    with pytest.raises(ConfigError, match="group 0 of the optimizer holds parameters of 2 groups"):
        px.load(tmp_path, model, merged)


class Residual:
    """Keeps a tensor and a counter between steps."""

    def __init__(self, value: float) -> None:
        self.tensor, self.steps = torch.full((2,), value), int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.steps = state["tensor"], state["steps"]


def test_state_that_techniques_keep_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other, without = make()[0], make()[0], make()[0]
    keep_state(model, "residual", Residual(4), elsewhere="share")
    found = Residual(0)
    keep_state(other, "residual", found, elsewhere="share")
    px.save(tmp_path, model)
    px.load(tmp_path, other)
    assert (found.tensor.tolist(), found.steps) == ([4.0, 4.0], 4)
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.load(tmp_path, without)
    assert "has state 'model/residual', which nothing here uses" in caplog.text


def test_a_warm_up_goes_on_where_it_was(tmp_path: Path) -> None:
    rates = []

    def warming() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        apply_factor(optimizer, LearningRateFactor(scale=3.0, warmup_steps=4))
        add_action(optimizer, StepPhase.CLIP_GRADIENTS, lambda it: rates.append(it.param_groups[0]["lr"]))
        return model, optimizer

    model, optimizer = warming()
    optimizer.step()
    optimizer.step()
    px.save(tmp_path, model, optimizer)
    other, other_optimizer = warming()
    px.load(tmp_path, other, other_optimizer)
    other_optimizer.step()
    assert rates == [1.5, 2.0, 2.5]


def test_rows_of_tables_are_saved_and_come_back(tmp_path: Path) -> None:
    model = nn.Sequential(px.ps.SparseEmbedding(2, init=px.ps.Constant(0.5)), nn.Flatten(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    px.distribute(model, optimizer)
    ids = torch.tensor([[3, 7]])

    def step() -> list[float]:
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model(ids).tolist()

    step()
    px.save(tmp_path, model, optimizer)
    rows = model[0](ids).detach().clone()
    then = step()
    px.load(tmp_path, model, optimizer)
    assert torch.equal(model[0](ids), rows)
    assert step() == then


def test_the_newest_good_one_is_taken_and_the_skipped_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    model = nn.Linear(1, 1)
    paths = []
    for step in (10, 30, 20):
        nn.init.constant_(model.weight, step)
        paths.append(px.save(tmp_path, model, step=step))
    assert px.load(tmp_path, model).step == 20  # the newest, not the highest
    assert px.load(tmp_path / "step-30", model).step == 30
    file = next(paths[2].glob("rank-0*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (paths[1] / "complete.json").unlink()
    assert px.load(tmp_path, model).step == 10
    assert model.weight.item() == 10
    assert f"{file} is broken between bytes 0 and {len(data)}: they do not have the checksum" in caplog.text
    assert f"{paths[1]} has no complete.json: its save did not end" in caplog.text
    with pytest.raises(DataError, match=r"no checkpoint in .*step-20 is complete\. .*is broken between"):
        px.load(paths[2], model)
    next(paths[0].glob("manifest*")).write_text("{}")
    with pytest.raises(DataError, match=r"no checkpoint in .* is complete.*manifest-.*its digest is not.*did not end"):
        px.load(tmp_path, model)


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which holds none"):
        px.load(tmp_path, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="which does not exist"):
        px.load(tmp_path / "no", nn.Linear(1, 1))


def test_saving_a_step_again_replaces_it_and_keep_removes_the_oldest(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for step in (1, 2, 3, 3):
        px.save(tmp_path, model, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert len(list((tmp_path / "step-3").iterdir())) == 3
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "rank-0-00000000.safetensors").touch()
    assert px.save(tmp_path, model).name == "step-4"
    assert not (tmp_path / "step-9").exists()


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    px.save(tmp_path, model, step=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for step in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(BackendError, match="No space left on device"):
                px.save(tmp_path, model, step=step)
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
        assert len(list((tmp_path / "step-1").iterdir())) == 3
    px.load(tmp_path, model)


def test_a_background_save_that_fails_is_heard_of_at_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.checkpoint.saving.write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O")))
        px.save(tmp_path, model, background=True)
        with pytest.raises(BackendError, match="the file system did not take: I/O"):
            px.checkpoint.wait()
        px.save(tmp_path, model, background=True)
        with pytest.raises(BackendError, match="I/O"):
            px.save(tmp_path, model)
    px.save(tmp_path, model)


def test_weights_with_prefixes_of_wrappers_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make()[0]
    theirs = {f"module.{n.replace('0.', '0._orig_mod.', 1)}": t.clone() for n, t in model.state_dict().items()}
    other = make(seed=1)[0]
    with caplog.at_level(logging.INFO, "phalanx"):
        px.load(theirs, other)
    assert same(other.state_dict(), model.state_dict())
    assert "took '_orig_mod.' and 'module.' off the names in the state dict" in caplog.text
    torch.save(theirs, tmp_path / "theirs.pt")
    with pytest.raises(ConfigError, match="is a pickle, which runs code"):
        px.load(tmp_path / "theirs.pt", other)
    with pytest.raises(ConfigError, match=r"'model' is a dict. Pass the part"):
        px.load({"model": theirs}, other)
    with pytest.raises(ConfigError, match="a file of weights has no state for optimizer"):
        px.load(theirs, other, torch.optim.SGD(other.parameters()))
    px.export_state_dict(other, tmp_path / "m.pdparams")
    assert same(safetensors.torch.load_file(tmp_path / "m.pdparams"), dict(other.state_dict()))
    (tmp_path / "text").write_text("hello, world")
    with pytest.raises(DataError, match="is no safetensors file"):
        px.load(tmp_path / "text", other)


def test_wrong_objects_are_named(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    with pytest.raises(ConfigError, match="takes one torch optimizer after the model, found ShardedLoader"):
        px.save(tmp_path, model, px.data.ShardedLoader(DATA, global_batch=8))
    with pytest.raises(ConfigError, match="loader is a list, which has no state_dict"):
        px.save(tmp_path, model, optimizer, [])
    with pytest.raises(ConfigError, match=r"Asked to save values.extra.what, which is a set"):
        px.save(tmp_path, model, extra={"what": {1}})
    with pytest.raises(ConfigError, match=r"asked for keep=0\. Give a whole number, 1 or more"):
        px.save(tmp_path, model, keep=0)


def test_an_exported_program_gives_the_same_output(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    px.distribute(model, optimizer)
    model.eval()
    x = torch.randn(5, 4)
    px.export_program(model, (x,), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (x, x[:1], torch.randn(9, 4)):
        assert torch.equal(program(rows), model(rows))
    with pytest.raises(ConfigError, match="pip install onnx onnxscript"):
        px.export_onnx(model, (x,), tmp_path / "model.onnx")


class FiveRows(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.reshape(5, 2, 2).sum(1) * scale


def test_a_program_whose_model_fixes_the_rows_is_exported_and_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.export_program(FiveRows(), (torch.ones(5, 4), torch.ones(2)), tmp_path / "model.pt2")
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.ones(5, 4), torch.ones(2)).shape == (5, 2)
    assert "the program takes batches of 5 samples only: " in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.export_program(nn.Linear(4, 2), (torch.ones(1, 4),), tmp_path / "one.pt2")
    assert not caplog.text or "torch takes 1 for a constant" in caplog.text


def test_an_optimizer_goes_into_one_file_and_back(tmp_path: Path) -> None:
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, iter(px.data.ShardedLoader(DATA, global_batch=8)), 3)
    px.export_state_dict(optimizer, tmp_path / "m.pdopt")
    other, empty, _ = make(seed=1)
    empty.param_groups[0]["lr"] = 5.0
    assert px.load(tmp_path / "m.pdopt", empty).path == tmp_path / "m.pdopt"
    theirs, ours = empty.state_dict(), optimizer.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    assert ours["state"]
    for number, entries in ours["state"].items():
        assert same(theirs["state"][number], entries)
    read = safetensors.torch.load_file(tmp_path / "m.pdopt")
    assert {name.partition("/")[0] for name in read} == set("012345")

    with pytest.raises(ConfigError, match=r"has the state of an optimizer. Load it into that: px.load\(path, opt"):
        px.load(tmp_path / "m.pdopt", other)
    with pytest.raises(ConfigError, match=r"m.pdopt has the state of AdamW and is loaded into RMSprop"):
        px.load(tmp_path / "m.pdopt", torch.optim.RMSprop(other.parameters()))
    with pytest.raises(ConfigError, match="'0' has shape"):
        px.load(tmp_path / "m.pdopt", torch.optim.AdamW(list(other.parameters())[::-1]))
    px.export_state_dict(model, tmp_path / "m.pdparams")
    with pytest.raises(ConfigError, match=r"m.pdparams has no state of an optimizer"):
        px.load(tmp_path / "m.pdparams", empty)
    with pytest.raises(ConfigError, match=r"takes an optimizer alone from the file .* found .*m.pdopt and scheduler"):
        px.load(tmp_path / "m.pdopt", empty, scheduler=object())
    with pytest.raises(ConfigError, match="To load a checkpoint pass the model too"):
        px.load(tmp_path, empty)


def test_files_of_optimizers_are_answered(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    with pytest.raises(ConfigError, match=r"the state of a torch optimizer, found dict. Give the object itself"):
        px.export_state_dict(optimizer.state_dict(), tmp_path / "m.pdopt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"px.save writes a folder of checkpoints, .* a file: '.*m.pdopt'"):
        px.save(tmp_path / "m.pdopt", model, optimizer)


def test_tensor_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor(True), "b": torch.randn(3, 2), "c": torch.arange(5), "d": torch.empty(0)}
    write_tensors(tmp_path / "ours", tensors)
    assert same(safetensors.torch.load_file(tmp_path / "ours"), tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    file = TensorFile(tmp_path / "theirs")
    assert same({name: file.tensor(slot) for name, slot in file.slots().items()}, tensors)
    with pytest.raises(ConfigError, match=r".x. is of torch.complex128, which cannot be saved"):
        write_tensors(tmp_path / "wide", {"x": torch.zeros(1, dtype=torch.complex128)})


def test_a_checkpointer_saves_resumes_and_leaves_when_asked(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    loader = px.data.ShardedLoader(DATA, global_batch=8)
    first = px.Checkpointer(tmp_path, model, optimizer, loader, every=2, keep=2)
    assert first.resume() is None
    batches = iter(loader)
    for _ in range(5):
        next(batches)
        first.step()
    first._stop.ask()
    first.extra["note"] = "x"
    next(batches)
    with pytest.raises(SystemExit) as stop:
        first.step()
    assert stop.value.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6"]
    second = px.Checkpointer(tmp_path, model, optimizer, loader, every=2)
    found = second.resume()
    assert found is not None
    assert (second.steps, second.extra, loader.epoch) == (6, {"note": "x"}, 0)
    second.close()
