from __future__ import annotations

from typing import NamedTuple

import torch

from phalanx.comm import context
from phalanx.data.samples.batch import to_device


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_every_tensor_of_a_batch_goes_to_the_device_of_the_process() -> None:
    # The meta device stands for any that is not the CPU.
    context.init().device = torch.device("meta")
    x = torch.ones(2)
    batch = to_device([x, {"x": x, "id": 7}, (x, "a"), Pair(x, "b")])
    assert [batch[0].device.type, batch[1]["x"].device.type, batch[2][0].device.type] == ["meta"] * 3
    assert isinstance(batch[3], Pair)
    assert (batch[3].image.device.type, batch[3].name, batch[1]["id"], batch[2][1]) == ("meta", "b", 7, "a")


def test_on_the_cpu_the_batch_is_handed_on_as_it_is() -> None:
    batch = [torch.ones(2)]
    assert to_device(batch) is batch
    context.init()
    assert to_device(batch) is batch
