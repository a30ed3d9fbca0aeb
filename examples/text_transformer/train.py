"""Train a small byte-level GPT on Python's help texts; one flag selects the kind of parallelism.

python examples/text_transformer/train.py
phalanx run -n 2 examples/text_transformer/train.py --parallel tensor
phalanx run -n 2 examples/text_transformer/train.py --parallel pipeline
phalanx run -n 2 examples/text_transformer/train.py --parallel auto

Every tenth text is held out; its bits per byte are computed exactly, on any number of ranks. The losses are the same
for every kind of parallelism. After a minute or two on two cores it generates words.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx as px

sys.path.append(str(Path(__file__).parent))
from gpt import GPT

CUTS = {
    "tokens": "vocab",
    "blocks.*.[qkv]": "column",
    "blocks.*.o": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "column",
}
"""How `--parallel tensor` shards each layer."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("data", "tensor", "pipeline", "auto"), default="data")
    parser.add_argument("--context", type=int, default=64, help="bytes of one sample")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=None, help="train on the first samples only, for this many steps")
    parser.add_argument("--global-batch", type=int, default=16, help="samples per step over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--print-every", type=int, default=100, help="steps between two printed losses")
    parser.add_argument("--sample", type=int, default=200, help="bytes to generate at the end")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="a tiny model for a few steps")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.context, args.width, args.layers, args.epochs, args.sample = 32, 32, 2, 1, 16
        args.steps, args.global_batch, args.print_every = args.steps or 20, 32, 10
    return args


def read_texts(context: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the training and the held-out set, each as sequences of bytes and the bytes that follow them."""
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::10]
    trained_on = [text for place, text in enumerate(texts) if place % 10]
    return _rows(trained_on, context), _rows(held_out, context)


def _rows(texts: list[str], context: int) -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long()
    count = (len(data) - 1) // context
    return data[: count * context].view(count, context), data[1 : count * context + 1].view(count, context)


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def build(args: argparse.Namespace, ranks: int) -> px.Model:
    net = GPT(256, args.context, width=args.width, heads=args.heads, layers=args.layers)
    strategy = px.DistributedStrategy()
    if args.parallel == "tensor":
        px.shard(net, CUTS, axis="model", size=ranks)
    elif args.parallel == "pipeline":
        strategy.pipeline = True
        strategy.pipeline_configs = {"accumulate_steps": 2 * ranks}
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    mode = px.ParallelMode.AUTO_PARALLEL if args.parallel == "auto" else None
    return px.Model(net, loss_of, optimizer, strategy=strategy, parallel_mode=mode)


def write_on(model: px.Model, beginning: Tensor, count: int, seed: int) -> str:
    """Return the text that the model generates after a prompt. Collective: all ranks draw the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    row = beginning.clone()
    for _ in range(count):
        scores = model.predict(row[None, -len(beginning) :])[0, -1].cpu()
        row = torch.cat([row, torch.multinomial(F.softmax(scores / 0.7, -1), 1, generator=generator)])
    return bytes(row[len(beginning) :].tolist()).decode(errors="replace")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    here = px.init()
    train_on, held_out = read_texts(args.context)
    if args.steps is not None:
        train_on = tuple(part[: args.steps * args.global_batch] for part in train_on)

    model = build(args, here.world_size)
    before = model.eval(held_out)["loss"] / math.log(2)
    monitor = px.LossMonitor(args.print_every)
    run = model.train(args.epochs, train_on, monitor, global_batch=args.global_batch, seed=args.seed)
    loss, held_out_loss = run.global_loss(), model.eval(held_out)["loss"]
    sample = write_on(model, held_out[0][0], args.sample, args.seed)
    result = {
        "loss": round(loss, 6),
        "bits_per_byte_before": round(before, 5),
        "bits_per_byte": round(held_out_loss / math.log(2), 5),
        "perplexity": round(math.exp(held_out_loss), 4),
        "samples_per_s": round(run.samples / max(run.train_s, 1e-9), 1),
        "world_size": here.world_size,
        "steps": run.step,
    }
    if here.rank == 0:
        print(f"sample: {sample!r}")
        print("RESULT " + json.dumps(result))
    return result


def test_train_text() -> None:
    """The script under pytest, tiny."""
    result = main(["--smoke"])
    assert result["bits_per_byte"] < result["bits_per_byte_before"] - 1


if __name__ == "__main__":
    main()
