"""Recomputing gives the same gradients and keeps less memory between forward and backward."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.errors import PlanError
from phalanx.parallel.memory.activation_checkpointing import apply_recompute
from phalanx.plan.value import ModuleRule


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        self.passes = self.passes + 1  # a new tensor, unlike batch-norm statistics
        return x + gain * self.drop(self.shrink(torch.tanh(nn.functional.gelu(self.grow(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, gain=0.5)
        return self.head(x)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def trained(net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(24, 16, requires_grad=True)
    net(x).square().mean().backward()
    return {"input": x.grad} | {n: p.grad for n, p in net.named_parameters()}, dict(net.named_buffers())


def made(*rules: ModuleRule) -> Net:
    torch.manual_seed(0)
    net = Net()
    apply_recompute(rules, net)
    return net


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradients_and_buffers_are_those_of_the_plain_model(how: str) -> None:
    gradients, buffers = trained(made(ModuleRule(match="layers.*", recompute=how)))
    expected_gradients, expected_buffers = trained(made())
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(buffers, expected_buffers, rtol=0, atol=0)


def test_peak_of_activations_falls_and_selective_lies_between() -> None:
    peaks = {}
    for how in ("none", "selective", "full"):
        net = made(ModuleRule(match="layers", recompute=how))
        with LiveBytes() as live:
            x = torch.randn(256, 16)
            out = net(x)
            peaks[how] = live.now
            out.square().mean().backward()
    assert peaks["full"] < 0.4 * peaks["none"]
    assert peaks["full"] < peaks["selective"] < 0.8 * peaks["none"]


def test_a_list_stands_for_its_members_and_the_outermost_decides() -> None:
    net = Net()
    rules = [ModuleRule(match="layers*", recompute="full"), ModuleRule(match="layers.1", recompute="none")]
    assert apply_recompute(rules, net) == ("layers.0", "layers.2")
    assert apply_recompute([ModuleRule(match="layers.1.grow", recompute="selective")], Net()) == ("layers.1.grow",)
    rules = [ModuleRule(match="*", recompute="full"), ModuleRule(match="layers.*", unit=True)]
    assert apply_recompute(rules, Net()) == ("head",)


def test_keys_stay_and_a_copy_recomputes_its_own_forward() -> None:
    net = made(ModuleRule(match="layers", recompute="full"))
    assert list(net.state_dict()) == list(Net().state_dict())
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    expected, _ = trained(made())
    torch.testing.assert_close(trained(twin)[0], expected)


def test_evaluation_makes_no_graph() -> None:
    net = made(ModuleRule(match="layers", recompute="full")).eval()
    with torch.no_grad():
        assert not net(torch.randn(4, 16)).requires_grad


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"'layer\.0', and the model has no such module\. Did you mean 'layers\.0'\?"):
        made(ModuleRule(match="layer.0", recompute="full"))


def test_offload_needs_recompute_and_says_when_it_cannot_act(caplog, phalanx_propagates) -> None:
    with pytest.raises(PlanError, match=r"modules\[head\]\.offload .* not recomputed"):
        made(ModuleRule(match="head", offload=True))
    net = made(ModuleRule(match="layers", recompute="full", offload=True))
    assert "offload of recomputed modules has no effect" in caplog.text
    torch.testing.assert_close(trained(net)[0], trained(made())[0])
