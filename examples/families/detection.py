"""Detection: find handwritten digits in a larger picture, each with its box and class, in one pass.

python examples/families/detection.py
phalanx run -n 2 examples/families/detection.py

The digits are scikit-learn's real images, 8 x 8 pixels; pictures are made of them: one to three at random places,
enlarged by 1 to 1.5. A picture is divided into cells; the cell with a digit's centre predicts its box and class.
"""

import argparse
import itertools
import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.data import DigitsDataset

SIDE, CELL, DIGIT = 48, 8, 8
CELLS = SIDE // CELL
CLASSES = 10


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=2000, help="training pictures")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--global-batch", type=int, default=32, help="pictures per step over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="few pictures, a narrow network")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.pictures, args.epochs, args.width = 160, 4, 8
    return args


def make_pictures(count: int, seed: int, train: bool) -> tuple[Tensor, Tensor]:
    """Return pictures (count, 1, SIDE, SIDE) and the target of each cell, (count, CELLS, CELLS, 6).

    The six are: whether the cell has a digit's centre, its box (centre in the cell from 0 to 1, logarithm of its height
    and width in cells), its class.
    """
    digits = DigitsDataset(train)
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    pictures = digits.images.min().expand(count, 1, SIDE, SIDE).clone()
    target = torch.zeros(count, CELLS, CELLS, 6)
    for picture, cells in zip(pictures, target, strict=True):
        taken = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        for _ in range(1 + draw(3)):
            index, height, width = draw(len(digits)), DIGIT + draw(5), DIGIT + draw(5)
            top, left = draw(SIDE - height + 1), draw(SIDE - width + 1)
            place = slice(top, top + height), slice(left, left + width)
            if taken[place].any():
                continue
            taken[place] = True
            picture[0][place] = F.interpolate(digits.images[index][None], (height, width), mode="bilinear")[0, 0]
            middle = torch.tensor([top + height / 2, left + width / 2]) / CELL
            row, column = middle.int().tolist()
            size = torch.tensor([height, width]).div(CELL).log()
            cells[row, column] = torch.cat([torch.ones(1), middle % 1, size, digits.labels[index].view(1)])
    return pictures, target


def detector(width: int) -> nn.Module:
    """Return a network from pictures to the targets of `make_pictures`, with ten scores for the class."""
    layers: list[nn.Module] = []
    channels = [1, width, 2 * width, 4 * width]
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(4 * width, 5 + CLASSES, 1)]
    return nn.Sequential(*layers)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over pictures, each with the same weight, so that means of ranks can be averaged."""
    output = output.permute(0, 2, 3, 1)
    is_here = target[..., 0]
    here = F.binary_cross_entropy_with_logits(output[..., 0], is_here, reduction="none").sum((1, 2))
    box = F.smooth_l1_loss(output[..., 1:5], target[..., 1:5], reduction="none").sum(-1)
    digit = F.cross_entropy(output[..., 5:].permute(0, 3, 1, 2), target[..., 5].long(), reduction="none")
    return (here + ((4 * box + digit) * is_here).sum((1, 2))).mean()


def right_share(output: Tensor, target: Tensor) -> Tensor:
    """Return the F1 score of each picture: 2 x correct / (predicted + actual).

    A prediction is correct if cell and class match and its box overlaps the digit's box by half.
    """
    output = output.permute(0, 2, 3, 1)
    predicted, actual = output[..., 0] > 0, target[..., 0] > 0
    correct = predicted & actual & (output[..., 5:].argmax(-1) == target[..., 5]) & (overlap(output, target) >= 0.5)
    return 2 * correct.sum((1, 2)) / (predicted.sum((1, 2)) + actual.sum((1, 2)))


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """Return the intersection of two boxes of each cell over their union."""
    sizes = [boxes[..., 3:5].exp() for boxes in (output, target)]
    low, high = (
        [boxes[..., 1:3] + sign * size / 2 for boxes, size in zip((output, target), sizes, strict=True)]
        for sign in (-1, 1)
    )
    shared = (torch.minimum(*high) - torch.maximum(*low)).clamp(min=0).prod(-1)
    return shared / (sizes[0].prod(-1) + sizes[1].prod(-1) - shared)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    pictures, test = make_pictures(args.pictures, args.seed, True), make_pictures(200, args.seed + 1, False)
    net = detector(args.width)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    model = px.Model(net, loss_of, optimizer, metrics={"right": right_share})
    before = model.eval(test)["loss"]
    run = model.train(args.epochs, pictures, px.LossMonitor(), global_batch=args.global_batch, seed=args.seed)
    scores = model.eval(test)
    result = {
        "loss_before": round(before, 6),
        "loss": round(scores["loss"], 6),
        "test_right": round(scores["right"], 4),
        "samples_per_s": round(run.samples / max(run.train_s, 1e-9), 1),
        "world_size": run.world_size,
        "steps": run.step,
    }
    if run.rank == 0:
        print("RESULT " + json.dumps(result))
    return result


if __name__ == "__main__":
    main()
