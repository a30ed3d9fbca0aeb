"""Two models with an optimizer each train as in one process: adversaries, teacher and student."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx as px
from phalanx import fleet
from ranks import run_ranks

pytestmark = pytest.mark.dist

BATCHES, ROWS, LIMIT, DECAY = 6, 4, 0.05, 0.5
ORDERS = {
    "models, then optimizers": ("first", "second", "of_first", "of_second"),
    "optimizers, then models": ("of_first", "of_second", "first", "second"),
    "one pair after the other": ("second", "of_second", "first", "of_first"),
    "mixed": ("of_second", "first", "second", "of_first"),
}


def nets(outputs: tuple[int, int]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out)).double() for out in outputs]


def off(values: Any, expected: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(values, expected, strict=True))


class Plain:
    """An optimizer of one process that accumulates, clips and averages by hand, two batches an update."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.count = model, optimizer, 0
        self.shadow = [param.detach().clone() for param in model.parameters()]

    def step(self) -> None:
        self.count += 1
        if self.count % 2:
            return
        for param in self.model.parameters():
            param.grad /= 2
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.optimizer.step()
        torch._foreach_lerp_(self.shadow, list(self.model.parameters()), 1 - DECAY)

    def zero_grad(self) -> None:
        if self.count % 2 == 0:
            self.optimizer.zero_grad()


def update(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adversaries(x: Tensor, generator: nn.Module, critic: nn.Module, of_generator: Any, of_critic: Any) -> None:
    noise = x.flip(1) * 2
    update(of_critic, F.softplus(-critic(x)).mean() + F.softplus(critic(generator(noise).detach())).mean())
    critic.requires_grad_(False)
    update(of_generator, F.softplus(-critic(generator(noise))).mean())
    critic.requires_grad_(True)


def distillation(x: Tensor, teacher: nn.Module, student: nn.Module, of_teacher: Any, of_student: Any) -> None:
    """Both learn from one loss, the student from the teacher alone."""
    taught = teacher(x)
    loss = F.mse_loss(taught, x.sum(1, keepdim=True)) + F.mse_loss(student(x), taught.detach())
    loss.backward()
    for optimizer in (of_student, of_teacher):
        optimizer.step()
        optimizer.zero_grad()


KINDS = {"adversaries": (adversaries, (3, 1)), "distillation": (distillation, (1, 1))}


def trained(kind: str, order: tuple[str, ...]) -> dict[str, float | str]:
    loop, outputs = KINDS[kind]
    strategy = px.DistributedStrategy(clip=True, ema=True, gradient_merge=True)
    strategy.clip_configs = {"norm": LIMIT}
    strategy.ema_configs = {"decay": DECAY, "warmup": False}
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    first, second = nets(outputs)
    plain = copy.deepcopy([first, second])
    optimizers = [torch.optim.SGD(first.parameters(), 0.3, momentum=0.9), torch.optim.Adam(second.parameters(), 0.01)]
    calls = {
        "first": lambda: fleet.distributed_model(first),
        "second": lambda: fleet.distributed_model(second),
        "of_first": lambda: fleet.distributed_optimizer(optimizers[0]),
        "of_second": lambda: fleet.distributed_optimizer(optimizers[1]),
    }
    for name in order:
        calls[name]()
    here = px.current()
    data = torch.randn(
        BATCHES, here.world_size, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    for batch in data:
        loop(batch[here.rank], first, second, *optimizers)
    references = [
        Plain(plain[0], torch.optim.SGD(plain[0].parameters(), 0.3, momentum=0.9)),
        Plain(plain[1], torch.optim.Adam(plain[1].parameters(), 0.01)),
    ]
    for batch in data:
        loop(batch.flatten(0, 1), *plain, *references)
    differences: dict[str, float | str] = {}
    for name, model, reference in zip(("first", "second"), (first, second), references, strict=True):
        differences[name] = off(model.parameters(), reference.model.parameters())
        differences[f"average of {name}"] = off(px.ema_of(model).state_dict()["shadow"].values(), reference.shadow)
        differences[f"order of {name}"] = ", ".join(px.explain(model).step)
    return differences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_two_models_train_as_in_one_process_in_any_order_of_calls(kind: str, order: str) -> None:
    for differences in run_ranks(trained, 2, kind, ORDERS[order]):
        assert {name: x for name, x in differences.items() if isinstance(x, float) and x > 1e-12} == {}
        assert differences["order of first"] == differences["order of second"]
