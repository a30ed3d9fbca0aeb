"""Switches of a strategy on two ranks: what the matrix leaves out, what is refused, what says that it has no effect."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PhalanxError
from phalanx.parallel.precision.master_weights import KEY
from phalanx.parallel.stateful import saved_state_of
from ranks import run_ranks

pytestmark = pytest.mark.dist


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(settings: dict[str, Any], optimizer_of: Any = torch.optim.SGD) -> dict[str, Any]:
    """Train three steps of a strategy; return what is left."""
    model = net()
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    model, optimizer, _ = px.distribute(model, optimizer, strategy=px.DistributedStrategy(**settings))
    step = px.train_step(model, F.cross_entropy, optimizer)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(px.current().rank))
    losses = [step(inputs, torch.arange(8) % 3).loss.item() for _ in range(3)]
    return {
        "losses": losses,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "kept": {name: dict(kept.source.state_dict()) for name, kept in saved_state_of(optimizer).items()},
        "copies": [state[KEY] for state in optimizer.state_dict()["state"].values() if KEY in state],
        "has amp_init": hasattr(optimizer, "amp_init"),
    }


def train_in_float16() -> list[dict[str, Any]]:
    px.init()
    scaling = {"init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1, "decr_ratio": 2.0**-30}
    found = []
    for settings in (
        {},
        {"amp": True, "amp_configs": {"dtype": "float16"}},
        {"amp": True, "amp_configs": {"dtype": "float16", **scaling}},
        {"amp": True, "amp_configs": {"use_pure_fp16": True}},
        {"amp": True, "amp_configs": {"use_pure_bf16": True}},
    ):
        found.append(train(settings))
        gc.collect()
    return found


def test_low_precisions_follow_float32_on_all_ranks() -> None:
    ranks = run_ranks(train_in_float16, 2)
    for plain, half, overflowing, pure_half, pure in ranks:
        for found, dtype in ((half, torch.float32), (pure_half, torch.float16), (pure, torch.bfloat16)):
            assert found["losses"] == pytest.approx(plain["losses"], rel=2e-2)
            assert found["has amp_init"]
            assert {weight.dtype for weight in found["weights"].values()} == {dtype}
            for name, weight in found["weights"].items():
                torch.testing.assert_close(weight.float(), plain["weights"][name], rtol=0, atol=2e-2)
        assert half["kept"]["loss_scale"]["skipped"] == 0
        assert overflowing["kept"]["loss_scale"] == {"value": 1024.0, "good": 2, "bad": 0, "skipped": 1}
        assert (len(half["copies"]), len(pure["copies"])) == (0, 4)
        assert "loss_scale" not in pure["kept"]
    for found in zip(*ranks, strict=True):
        torch.testing.assert_close(found[0]["weights"], found[1]["weights"], rtol=0, atol=0)


REFUSED = {
    "clip": ({"clip": True}, torch.optim.SGD),
    "cut": ({"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}}, torch.optim.SGD),
    "lars": ({"lars": True}, torch.optim.Adam),
    "lamb": ({"lamb": True}, torch.optim.SGD),
    "dgc": ({"dgc": True}, torch.optim.Adam),
    "ranks": ({"hybrid_configs": {"mp_degree": 3}}, torch.optim.SGD),
}
QUIET = {
    "hierarchical": {"use_hierarchical_allreduce": True},
    "batch norm": {"sync_batch_norm": True},
    "small": {"dgc": True},
    "offload": {"sharding": True, "sharding_configs": {"optimize_offload": True}},
    "idle": {"lars_configs": {"lars_coeff": 0.1}},
    "merge": {"gradient_merge": True},
}


def say() -> dict[str, str]:
    px.init()
    found, lines = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("phalanx").addHandler(handler)
    for name, (settings, optimizer_of) in REFUSED.items():
        with pytest.raises(PhalanxError) as error:
            train(settings, optimizer_of)
        found[name] = str(error.value)
        del error
        gc.collect()
    for name, settings in QUIET.items():
        lines.clear()
        train(settings)
        found[name] = "\n".join(line for line in lines if "does not" in line or "has no effect" in line)
        gc.collect()
    return found


def test_what_cannot_act_is_refused_or_says_so() -> None:
    first, second = run_ranks(say, 2)
    assert {name: first[name] for name in REFUSED} == {name: second[name] for name in REFUSED}
    assert 'strategy.clip needs to know to what. Set clip_configs = {"norm": 1.0}' in first["clip"]
    assert "2 ranks that hold one copy of the layers together (tensor_parallel, mp_degree), and no" in first["cut"]
    assert "strategy.lars trains torch.optim.SGD by another rule, and found torch.optim.adam.Adam" in first["lars"]
    assert "strategy.lamb trains torch.optim.Adam or torch.optim.AdamW by another rule" in first["lamb"]
    assert "strategy.dgc corrects the momentum of torch.optim.SGD without dampening, found Adam" in first["dgc"]
    assert "asks for mp=3 ranks, which do not make up the 2 that were launched" in first["ranks"]
    assert first["hierarchical"] == "use_hierarchical_allreduce has no effect: all 2 ranks are on one host."
    assert first["batch norm"] == "sync_batch_norm has no effect: the model has no batch normalisation."
    assert first["small"].startswith("dgc does not compress: every parameter has fewer than 16384 elements")
    assert first["offload"].startswith("optimize_offload of sharding has no effect: the model is in host memory")
    assert first["idle"].startswith("strategy.lars_configs has no effect: lars is off")
    assert first["merge"].startswith("strategy.gradient_merge has no effect: it merges 1 batch")
    assert second["idle"] == ""  # one rank says it


def test_an_average_that_nobody_keeps_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no average of the weights of this Linear is kept. Set strategy.ema = True"):
        px.ema_of(nn.Linear(2, 2))
