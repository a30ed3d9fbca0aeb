"""ResNet (He et al., arXiv:1512.03385; the stride of a bottleneck is in its 3x3 convolution), plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BLOCKS = {
    4: (0, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks of each stage, by number of layers; 50 and more are made of bottlenecks."""

Normalise = Callable[[int], nn.Module]
NORMS: dict[str, Normalise] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(8, channels), channels),
}


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1 - 3x3 - 1x1 as a bottleneck, around a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int, bottleneck: bool, norm: Normalise) -> None:
        super().__init__()
        outputs = channels * 4 if bottleneck else channels
        shapes = [(inputs, channels, 3, stride), (channels, outputs, 3, 1)]
        if bottleneck:
            shapes = [(inputs, channels, 1, 1), (channels, channels, 3, stride), (channels, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for before, after, kernel, step in shapes:
            layers += [nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False), norm(after), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for images of shape (N, `channels`, H, W).

    Args:
        class_dim: Number of classes.
        layers: 4, 18, 34, 50, 101 or 152; 4, one block that halves the image, is not of the paper.
        width: Channels of the first stage; 64 in the paper.
        channels: Channels of the images.
        small_images: Start with one 3x3 convolution instead of a 7x7 of stride 2 and a pool (up to 64 pixels).
        norm: `batch` or `group`.
    """

    def __init__(
        self,
        class_dim: int,
        layers: int = 50,
        *,
        width: int = 64,
        channels: int = 3,
        small_images: bool = False,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if layers not in BLOCKS:
            raise ValueError(f"ResNet has {sorted(BLOCKS)} layers, not {layers}.")
        bottleneck, normalise = layers >= 50, NORMS[norm]
        stem: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), normalise(width), nn.ReLU()]
        if not small_images:
            stem[0] = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
            stem.append(nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(BLOCKS[layers]):
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(Block(inputs, width << stage, stride, bottleneck, normalise))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, class_dim)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, class_dim)."""
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
