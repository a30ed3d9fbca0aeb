"""A graph network: predict the side of each member of Zachary's karate club from who met whom and the sides of some.

python examples/families/graph.py
phalanx run -n 2 examples/families/graph.py

The network of 34 members was observed by W. W. Zachary (1977) and comes with networkx, which torch needs anyway. Two
layers of graph convolution (Kipf and Welling, arXiv:1609.02907) train on half of the members; a sample is a member.
"""

import argparse
import json
from collections.abc import Sequence

import networkx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--global-batch", type=int, default=17, help="members per step over all ranks")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="a few epochs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.epochs = 20
    return args


def read_club() -> tuple[Tensor, Tensor]:
    """Return how often each two members met, shape (34, 34), and each member's side, shape (34,)."""
    club = networkx.karate_club_graph()
    met = torch.tensor(networkx.to_numpy_array(club, weight="weight"), dtype=torch.float32)
    return met, torch.tensor([int(club.nodes[member]["club"] == "Officer") for member in club])


class GraphNetwork(nn.Module):
    """Two graph convolutions over the full graph; scores of the requested members.

    Args:
        met: Weights of the edges, shape (members, members).
        width: Size of the hidden representation of a member.
        classes: Number of classes.
    """

    def __init__(self, met: Tensor, width: int, classes: int) -> None:
        super().__init__()
        linked = met + torch.eye(len(met))
        scale = linked.sum(1).rsqrt()
        self.register_buffer("spread", scale[:, None] * linked * scale)
        self.first = nn.Embedding(len(met), width)  # a linear layer over one-hot features
        self.second = nn.Linear(width, classes)

    def forward(self, members: Tensor) -> Tensor:
        hidden = F.relu(self.spread @ self.first.weight)
        return (self.spread @ self.second(hidden))[members]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    met, sides = read_club()
    order = torch.randperm(len(sides))
    known, asked = order[::2], order[1::2]

    net = GraphNetwork(met, args.width, classes=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, weight_decay=5e-4)
    model = px.Model(net, nn.CrossEntropyLoss(), optimizer, metrics=["acc1"])
    before = model.eval((known, sides[known]))["loss"]
    monitor = px.LossMonitor(10)
    run = model.train(args.epochs, (known, sides[known]), monitor, global_batch=args.global_batch, seed=args.seed)
    scores = model.eval((asked, sides[asked]))
    result = {
        "loss_before": round(before, 6),
        "loss": round(model.eval((known, sides[known]))["loss"], 6),
        "test_acc1": round(scores["acc1"], 4),
        "samples_per_s": round(run.samples / max(run.train_s, 1e-9), 1),
        "world_size": run.world_size,
        "steps": run.step,
    }
    if run.rank == 0:
        print("RESULT " + json.dumps(result))
    return result


if __name__ == "__main__":
    main()
