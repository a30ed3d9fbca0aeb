from __future__ import annotations

import pytest
import torch

from examples.resnet.model import ResNet


def test_resnet50_with_102_classes_has_the_published_parameters() -> None:
    parameters = list(ResNet(class_dim=102, layers=50).parameters())
    assert len(parameters) == 161
    assert sum(p.numel() for p in parameters) == 23_717_030


def test_resnet18_has_the_published_parameters() -> None:
    assert sum(p.numel() for p in ResNet(class_dim=1000, layers=18).parameters()) == 11_689_512


@pytest.mark.parametrize("layers", [18, 50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("side", "small_images"), [(64, False), (8, True)])
def test_images_give_one_score_a_class(layers: int, norm: str, side: int, small_images: bool) -> None:
    model = ResNet(7, layers, width=8, small_images=small_images, norm=norm)
    model(torch.randn(2, 3, side, side)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_other_depths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ResNet has \[4, 18, 34, 50, 101, 152\] layers, not 20"):
        ResNet(10, layers=20)
