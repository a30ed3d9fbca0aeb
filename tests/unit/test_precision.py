"""Lower precision: autocast in place, pure precision with float32 copies in the optimizer."""

import copy

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import PlanError
from phalanx.parallel.precision.autocast import accept_amp_init, apply_precision
from phalanx.parallel.precision.master_weights import KEY, keep_master_weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        out = self.head(torch.relu(self.norm(hidden)))
        self.seen = {"hidden": hidden.dtype, "out": out.dtype}
        return {"out": out, "classes": out.argmax(1)}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int = 0) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step))


def test_mixed_precision_keeps_parameters_gradients_and_outputs_in_float32() -> None:
    model = net()
    apply_precision(model, "bfloat16", keep=["head"])
    out = model(rows())
    out["out"].square().mean().backward()
    assert model.seen == {"hidden": torch.bfloat16, "out": torch.float32}
    assert out["out"].dtype == torch.float32
    assert out["classes"].dtype == torch.int64
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert list(model.state_dict()) == list(net().state_dict())


def test_mixed_precision_is_near_float32_and_a_copy_computes_its_own() -> None:
    model = net()
    apply_precision(model, "bfloat16")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    torch.testing.assert_close(twin(rows())["out"], net()(rows())["out"], rtol=0.05, atol=0.05)


def test_pure_precision_casts_parameters_but_not_batch_norm_nor_what_is_kept() -> None:
    model = net()
    params = list(model.parameters())
    apply_precision(model, "bfloat16", pure=True, keep=["head"])
    low = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert low == {"first.weight", "first.bias"}
    assert model.norm.running_mean.dtype == torch.float32
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), params, strict=True))
    model(rows())["out"].square().mean().backward()
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_float16_on_a_cpu_says_that_it_is_slow(caplog, phalanx_propagates) -> None:
    apply_precision(net(), "float16")
    assert "7 to 16 times slower than bfloat16" in caplog.text


def test_wrong_names_are_errors() -> None:
    with pytest.raises(PlanError, match=r"found 'bfloat'\. Did you mean 'bfloat16'\?"):
        apply_precision(net(), "bfloat")
    with pytest.raises(PlanError, match=r"keeps 'heads' in float32.*Did you mean 'head'\?"):
        apply_precision(net(), "bfloat16", keep=["heads"])


def pure_sgd(steps: int, lr: float = 1e-4) -> tuple[Net, torch.optim.SGD]:
    model = net()
    apply_precision(model, "bfloat16", pure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    keep_master_weights(optimizer)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(rows(step))["out"].square().mean().backward()
        optimizer.step()


def test_master_weights_follow_the_algorithm_exactly() -> None:
    model, optimizer = pure_sgd(5)
    plain = net()
    apply_precision(plain, "bfloat16", pure=True)
    masters = [p.detach().float() for p in plain.parameters()]
    momenta = [torch.zeros_like(m) for m in masters]
    for step in range(5):
        plain.zero_grad()
        plain(rows(step))["out"].square().mean().backward()
        for param, master, momentum in zip(plain.parameters(), masters, momenta, strict=True):
            momentum.mul_(0.9).add_(param.grad.float())
            master.sub_(1e-4 * momentum)
            param.data.copy_(master)
    saved = optimizer.state_dict()["state"]
    for index, (mine, theirs, master) in enumerate(zip(model.parameters(), plain.parameters(), masters, strict=True)):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs)
        if mine.dtype == torch.bfloat16:
            torch.testing.assert_close(saved[index][KEY], master)
            assert not torch.equal(saved[index][KEY], mine.float())
            assert saved[index]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_resumed_job_goes_on_bit_for_bit(kind: type[torch.optim.Optimizer]) -> None:
    def made() -> tuple[Net, torch.optim.Optimizer]:
        model = net()
        apply_precision(model, "bfloat16", pure=True)
        optimizer = kind(model.parameters(), lr=1e-3)
        keep_master_weights(optimizer)
        return model, optimizer

    whole, first, second = made(), made(), made()
    train(*whole, range(4))
    train(*first, range(2))
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    train(*second, range(2, 4))
    torch.testing.assert_close(second[0].state_dict(), whole[0].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second[1].state_dict(), whole[1].state_dict(), rtol=0, atol=0)


def test_weights_that_are_written_win_over_the_copies() -> None:
    model, optimizer = pure_sgd(2, lr=0.0)
    with torch.no_grad():
        model.first.weight[0] = 7.0
    before = optimizer.state_dict()["state"][0][KEY].clone()
    train(model, optimizer, range(1))
    after = optimizer.state_dict()["state"][0][KEY]
    assert after[0].eq(7.0).all()
    assert torch.equal(after[1:], before[1:])


def test_amp_init_of_older_scripts_is_accepted(caplog, phalanx_propagates) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    accept_amp_init(optimizer)
    with caplog.at_level("INFO"):
        optimizer.amp_init("cpu", scope=None)
    assert "amp_init is not needed" in caplog.text
