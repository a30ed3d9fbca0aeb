"""Train a ResNet on images; the same script for one process and for many, eager and compiled.

python examples/resnet/train.py
phalanx run -n 2 examples/resnet/train.py --graph
phalanx run -n 2 examples/resnet/train.py --strategy examples/resnet/strategies/sharding.yaml
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from images import SOURCES, Images, open_images
from model import ResNet

import phalanx as px


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=SOURCES, default="digits", help="which images to train on")
    parser.add_argument("--data-dir", default=None, help="folder with the files, for every source except digits")
    parser.add_argument("--layers", type=int, default=18, choices=(4, 18, 34, 50, 101, 152))
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument(
        "--norm", choices=("batch", "group"), default="batch", help="group: same result for any world size"
    )
    parser.add_argument("--class-dim", type=int, default=None, help="classes of the model; default: those of the data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="stop after this many optimizer steps")
    parser.add_argument("--global-batch", type=int, default=64, help="samples per optimizer step over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--l2-decay", type=float, default=1e-4)
    parser.add_argument("--warmup-steps", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--graph", action="store_true", help="compile the forward pass, the loss and the update")
    parser.add_argument("--strategy", default=None, help="strategy file, such as one of strategies/*.yaml")
    parser.add_argument(
        "--checkpoint", default=None, help="checkpoint directory; resumes from it if it contains a checkpoint"
    )
    parser.add_argument("--save-every", type=int, default=100, help="optimizer steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="a narrow model for a few steps")
    args = parser.parse_args()
    if args.smoke:
        args.width, args.epochs, args.steps = 8, 1, args.steps or 6
    return args


def strategy_of(args: argparse.Namespace) -> px.DistributedStrategy:
    strategy = px.DistributedStrategy.load(args.strategy) if args.strategy else px.DistributedStrategy()
    strategy.warmup_steps = args.warmup_steps
    if args.graph:
        strategy.graph = True
    return strategy


def build(args: argparse.Namespace, images: Images):
    """Return the distributed model, optimizer and loader."""
    strategy = strategy_of(args)
    model = ResNet(
        class_dim=images.class_dim, layers=args.layers, width=args.width, small_images=images.size <= 64, norm=args.norm
    )
    if strategy.lamb:  # LAMB needs Adam; every other technique works with SGD
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.l2_decay)
    return px.distribute(
        model, optimizer, images.train, global_batch=args.global_batch, strategy=strategy, seed=args.seed, shuffle=True
    )


def batches(args: argparse.Namespace, loader, steps: int):
    """Yield epoch, batch index, images and labels of the batches that remain after some steps."""
    for epoch in range(loader.epoch, args.epochs):
        for batch_id, (image, label) in enumerate(loader):
            yield epoch, batch_id, image, label
            steps += 1
            if steps == args.steps:
                return


def train(args: argparse.Namespace, model, optimizer, loader, step):
    """Train, from the checkpoint if any; return the last loss, the steps so far and the samples of this run."""
    checkpointer, found = None, None
    if args.checkpoint:
        checkpointer = px.Checkpointer(args.checkpoint, model, optimizer, loader, every=args.save_every)
        found = checkpointer.resume()
    context = px.current()
    loss, steps, rows = float("nan"), found.step if found else 0, 0
    model.train()
    for epoch, batch_id, image, label in batches(args, loader, steps):
        out = step(image, label)
        loss = px.global_mean(out.loss)
        rows += context.batch.global_rows
        steps += 1
        if batch_id % 5 == 0:
            acc1, acc5 = px.accuracy(out.output, label, k=1), px.accuracy(out.output, label, k=5)
            if context.rank == 0:
                print(f"[Epoch {epoch}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}")
        if checkpointer:
            checkpointer.step()
    if checkpointer:
        checkpointer.close()
    return float(loss), steps, rows


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    context = px.init()
    is_first = context.rank == 0
    if is_first:
        print("Start collective training example:")
        print(", ".join(f"{name}={value}" for name, value in vars(args).items()))
        print(f"Run on {context.device}.")

    images = open_images(args.data, args.data_dir, args.class_dim)
    if is_first:
        print("Execute startup program.")  # weights are initialised and broadcast from rank 0
    model, optimizer, loader = build(args, images)
    step = px.train_step(model, F.cross_entropy, optimizer, fetch={"output": lambda output, _: output})
    if is_first:
        print("Start training:")
    started = time.perf_counter()
    loss, steps, rows = train(args, model, optimizer, loader, step)
    seconds = time.perf_counter() - started

    scores = px.evaluate(model, images.test, {"acc1": px.correct_at(1), "acc5": px.correct_at(5)}, batch_size=128)
    if is_first:
        print(step.summary())
        result = {
            "loss": round(loss, 6),
            "test_acc1": round(scores["acc1"], 4),
            "test_acc5": round(scores["acc5"], 4),
            "samples_per_s": round(rows / seconds, 1),
            "world_size": context.world_size,
            "steps": steps,
            "compile_s": round(step.compile_s, 2),
        }
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
