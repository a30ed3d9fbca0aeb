"""The AlexNet example: convolutions data parallel, fully connected layers cut; one result at any number of ranks."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from launching import launch_warm
from ranks import run_ranks
from tensor_models import whole

pytestmark = pytest.mark.dist

FOLDER = Path(__file__).parents[2] / "examples" / "alexnet_hybrid"
LINE = re.compile(r"^step:(\d+)\tloss:(\d+\.\d{6})$", re.MULTILINE)


def alexnet(dropout: float) -> nn.Module:
    spec = importlib.util.spec_from_file_location("alexnet_model", FOLDER / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.AlexNet(dropout=dropout)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 224, 224, generator=generator), torch.tensor([3, 1, 4])


def one_step() -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Two ranks with two images and one."""
    rank = px.init().rank
    model = px.shard(alexnet(0.5), {"classifier.*": "column"})
    model, _, loader = px.distribute(
        model, None, torch.utils.data.TensorDataset(*images()), global_batch=3, shuffle=False
    )
    held = sum(param.numel() * param.element_size() for param in model.parameters())
    assert held == sum(row.rank_bytes for row in px.explain(model).rows)
    torch.manual_seed(100 + rank)
    inputs, target = next(iter(loader))
    F.cross_entropy(model(inputs), target).backward()
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    gradients = {name: whole(model, name, param.grad) for name, param in model.named_parameters()}
    return ({} if rank else gradients), shapes


def test_a_step_with_dropout_equals_replicas_with_their_streams():
    (found, shapes), (_, other) = run_ranks(one_step, 2)
    model, (inputs, target) = alexnet(0.5), images()
    for rank, share in enumerate((slice(0, 2), slice(2, 3))):
        torch.manual_seed(100 + rank)
        loss = F.cross_entropy(model(inputs[share]), target[share])
        (loss * len(inputs[share]) / 3).backward()
    for name, param in model.named_parameters():
        assert ((found[name] - param.grad).norm() / param.grad.norm()).item() <= 1e-5, name
    for name, shape in (("1", [2048, 2304]), ("4", [2048, 4096]), ("6", [500, 4096])):
        assert shapes[f"classifier.{name}.weight"] == other[f"classifier.{name}.weight"] == shape


def test_no_unit_is_dropped_in_evaluation():
    model = alexnet(0.5).eval()
    inputs, _ = images()
    assert torch.equal(model(inputs[:1]), model(inputs[:1]))
    assert sum(p.numel() for p in model.features.parameters()) == 2_469_696


def train(folder: Path, ranks: int, *arguments: str) -> tuple[dict[str, float], dict[int, float], str]:
    done = launch_warm(folder, "-n", str(ranks), str(FOLDER / "train.py"), *arguments, timeout_s=100)
    assert done.code == 0, done.out + done.err
    log = done.log("workerlog.0")
    losses = {int(step): float(loss) for step, loss in LINE.findall(log)}
    return json.loads(log.splitlines()[-1].removeprefix("RESULT ")), losses, log


def test_two_ranks_train_as_one_process_with_sgd(tmp_path):
    arguments = ("--optimizer", "sgd", "--dropout", "0", "--steps", "5")
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
    two, losses, log = train(tmp_path / "two", 2, *arguments)
    one, expected, _ = train(tmp_path / "one", 1, *arguments, "--device-batch", "2")
    assert list(losses) == list(range(5))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert (two["world_size"], one["world_size"]) == (2, 1)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["samples_per_s"] > 0
    assert re.search(r"convolution .* 7\.5% .* 94\.0%", log)
    assert re.search(r"fully connected .* 92\.5% .* 6\.0%", log)
    assert re.search(r"classifier\.1\.weight .* 37\.7 .* 18\.9 .* cut over data=2", log)


def test_twenty_steps_of_adam_with_dropout_end_in_time(tmp_path):
    result, losses, _ = train(tmp_path, 2)
    assert list(losses) == list(range(20))
    assert result["steps"] == 20
    assert result["loss"] == losses[19]
