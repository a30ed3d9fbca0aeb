"""AlexNet (Krizhevsky, arXiv:1404.5997), plain PyTorch: few parameters compute much, many compute little."""

import torch
from torch import Tensor, nn

IMAGE = (3, 224, 224)


class AlexNet(nn.Module):
    """Images (rows, 3, 224, 224) to scores (rows, class_num)."""

    def __init__(self, class_num: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2), nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2), nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3), nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3), nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3), nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(2304, 4096), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(),
            nn.Linear(4096, class_num),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return scores
