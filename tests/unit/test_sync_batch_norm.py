"""Layers that normalise over all ranks stand in for a model's own without losing anything of them."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.parallel.data.sync_batch_norm import SyncBatchNorm, synchronise


class NormAndRelu(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_parameters_buffers_hooks_and_mode_stay_and_a_shared_layer_is_shared() -> None:
    norm = nn.BatchNorm1d(3, eps=0.5, momentum=None)
    model = nn.Sequential(norm, nn.Linear(3, 3), norm).eval()
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda *found: seen.append(found[2]))
    tensors = [*model.parameters(), *model.buffers()]
    assert synchronise(model) == 1
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[2]
    assert (model[0].eps, model[0].momentum, model[0].training) == (0.5, None, False)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    model(torch.ones(2, 3))
    assert len(seen) == 2


def test_a_layer_that_computes_more_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cannot stand in for '1\.0': NormAndRelu has a forward pass of its own"):
        synchronise(nn.Sequential(nn.Linear(2, 2), nn.Sequential(NormAndRelu(2))))
