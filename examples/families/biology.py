"""Biology: whether a breast tumour is malignant, from thirty measurements of its cells' nuclei.

python examples/families/biology.py
phalanx run -n 2 examples/families/biology.py

The 569 cases (W. N. Street et al., 1993) come with scikit-learn. They are a table of numbers: no sequences and no
structures are read here. A few layers, exact area under the curve and F1 over all ranks, and early stopping.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import phalanx as px

Rows = tuple[Tensor, Tensor]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step over all ranks")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="a few epochs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.epochs = 3
    return args


def read_cases(seed: int) -> tuple[Rows, Rows, Rows]:
    """Return the training, validation and test cases; features have the mean 0 and the variance 1 in training.

    A malignant tumour is 1.
    """
    bunch = load_breast_cancer()
    features, malignant = torch.from_numpy(bunch.data).float(), torch.from_numpy(1 - bunch.target).float()
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    parts = [order[:369], order[369:469], order[469:]]
    mean, spread = features[parts[0]].mean(0), features[parts[0]].std(0)
    train, stop, test = (((features[part] - mean) / spread, malignant[part]) for part in parts)
    return train, stop, test


def loss_of(score: Tensor, malignant: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(score.squeeze(1), malignant)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    train, stop, test = read_cases(args.seed)
    net = nn.Sequential(nn.Linear(30, args.width), nn.LayerNorm(args.width), nn.ReLU(), nn.Linear(args.width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.05)
    model = px.Model(net, loss_of, optimizer, metrics=["auc", px.F1("binary", threshold=0.0)])
    before = model.eval(train)["loss"]
    run = model.train(
        args.epochs,
        train,
        [px.LossMonitor(60), px.EarlyStopping("loss", patience=5)],
        valid_dataset=stop,
        global_batch=args.global_batch,
        seed=args.seed,
    )
    scores = model.eval(test)
    result = {
        "loss_before": round(before, 6),
        "loss": round(model.eval(train)["loss"], 6),
        "test_auc": round(scores["auc"], 5),
        "test_f1": round(scores["F1"], 5),
        "samples_per_s": round(run.samples / max(run.train_s, 1e-9), 1),
        "world_size": run.world_size,
        "steps": run.step,
    }
    if run.rank == 0:
        print("RESULT " + json.dumps(result))
    return result


if __name__ == "__main__":
    main()
