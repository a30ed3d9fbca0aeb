"""Train a ResNet-50 on CIFAR-10 with px.Model; --parallel_mode selects one process, a parallel layout or the planner.

python examples/cifar_auto_parallel/train.py --data cifar-10-batches-bin --parallel_mode STAND_ALONE
phalanx run -n 8 examples/cifar_auto_parallel/train.py --data cifar-10-batches-bin --parallel_mode DATA_PARALLEL
phalanx run -n 2 examples/cifar_auto_parallel/train.py --parallel_mode HYBRID_PARALLEL
phalanx run -n 2 examples/cifar_auto_parallel/train.py --parallel_mode AUTO_PARALLEL
pytest -s -v examples/cifar_auto_parallel/train.py

Without CIFAR-10's binary files it trains on scikit-learn's handwritten digits, enlarged to CIFAR's size. `--norm group`
makes the losses equal in every mode, because BatchNorm uses per-rank statistics.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import phalanx as px
from phalanx.data import Cifar10Dataset, DigitsDataset, Pipeline, vision
from phalanx.data.readers import digits

sys.path.append(str(Path(__file__).parents[1] / "resnet"))
from model import ResNet

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = [mode.name for mode in px.ParallelMode]
    parser.add_argument("--parallel_mode", choices=modes, default=None, help="default: from the number of ranks")
    parser.add_argument("--data", default="digits", help="folder with CIFAR-10's .bin files, or digits")
    parser.add_argument("--image-size", type=int, default=None, help="default: 224 for CIFAR-10, 32 for digits")
    parser.add_argument("--layers", type=int, default=50, choices=(18, 34, 50, 101, 152))
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="stop after this many steps")
    parser.add_argument("--global-batch", type=int, default=256, help="samples per step over all ranks: 8 x 32")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument(
        "--print-every", type=int, default=None, help="steps between two printed losses; default: an epoch"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="a narrow network for a few steps")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.width, args.epochs, args.steps, args.global_batch, args.print_every = 8, 1, args.steps or 4, 32, 1
    return args


def read_images(folder: str, train: bool) -> Cifar10Dataset | Pipeline:
    """Return images as bytes, height x width x colour, and labels."""
    if folder != "digits":
        return Cifar10Dataset(folder, train)
    data = DigitsDataset(train, image_size=32, channels=3)
    pixels = (data.images * digits.STD + digits.MEAN) * (255 / 16)
    return Pipeline((pixels.round().byte().permute(0, 2, 3, 1), data.labels), columns=("image", "label"))


def create_dataset(args: argparse.Namespace, train: bool = True) -> Pipeline:
    size = args.image_size or (32 if args.data == "digits" else 224)
    changes = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip()] if train else []
    dataset = read_images(args.data, train).map(vision.TypeCast("int32"), "label")
    dataset = dataset.map(
        [
            *changes,
            vision.Resize((size, size)),
            vision.Rescale(1 / 255, 0.0),
            vision.Normalize(MEAN, STD),
            vision.HWC2CHW(),
        ],
        "image",
    )
    if train:
        dataset = dataset.shuffle(buffer_size=50_000)
    return dataset.batch(global_batch=args.global_batch, drop_remainder=train)


class StopAfter(px.Callback):
    """Ends training after a number of steps."""

    needs_every_step = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, run) -> None:
        if run.step >= self.steps:
            run.stop(f"{self.steps} steps were asked for")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    is_first = px.init().rank == 0
    dataset = create_dataset(args)
    if is_first:
        print(f"===============ds_num {dataset.get_dataset_size()}")

    net = ResNet(10, args.layers, width=args.width, small_images=args.data == "digits", norm=args.norm)
    px.shard(net, {"classifier": "column"})  # HYBRID_PARALLEL shards it; the other modes replicate it
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    model = px.Model(
        net,
        px.SoftmaxCrossEntropyExpand(sparse=True),
        optimizer,
        metrics=["acc1"],
        parallel_mode=args.parallel_mode,
    )
    callbacks = [px.LossMonitor(args.print_every), *([StopAfter(args.steps)] if args.steps else [])]
    run = model.train(args.epochs, dataset, callbacks, dataset_sink_mode=args.steps is None, seed=args.seed)
    loss = run.global_loss()
    scores = model.eval(create_dataset(args, train=False))
    result = {
        "loss": round(loss, 6),
        "test_loss": round(scores["loss"], 6),
        "test_acc1": round(scores["acc1"], 4),
        "samples_per_s": round(run.samples / max(run.train_s, 1e-9), 1),
        "world_size": run.world_size,
        "steps": run.step,
    }
    if is_first:
        print("end training")
        print("RESULT " + json.dumps(result))
    return result


def test_train_cifar() -> None:
    """The script under pytest: a narrow, less deep network on digits, in the mode that fits the number of ranks."""
    result = main(["--layers", "18", "--width", "8", "--global-batch", "32", "--epochs", "1", "--lr", "0.05"])
    assert result["loss"] < 2.3, "a guess among ten costs 2.3"


if __name__ == "__main__":
    main()
