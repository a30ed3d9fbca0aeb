"""Train a wide & deep model; the same script for one process, and for workers that share tables on parameter servers.

python examples/wide_and_deep/train.py
phalanx run --server-num 1 --worker-num 2 examples/wide_and_deep/train.py --mode sync
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from flights import open_flights
from model import WideDeepModel

from phalanx import fleet, ps
from phalanx.data import QueueDataset, ShardedLoader, criteo_schema
from phalanx.data.ctr.synthetic import SyntheticClicks

MODES = {
    "sync": {"a_sync": False},
    "async": {"a_sync": True},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True, "max_merge_var_num": 4}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 20, "local_optimizer": True}},
    "hybrid": {"a_sync": True, "a_sync_configs": {"dense": "all_reduce"}},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="flights", help="flights, synthetic, or a folder of files in Criteo's format")
    parser.add_argument("--split", choices=("time", "random"), default="time", help="how to choose the test flights")
    parser.add_argument("--mode", choices=MODES, default="async", help="how workers and servers work together")
    parser.add_argument("--rows", type=int, default=200_000, help="samples of the synthetic data")
    parser.add_argument(
        "--hash-space", type=int, default=None, help="number of ids for a folder's files; default: 64 bits"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="stop each epoch after this many steps")
    parser.add_argument("--global-batch", type=int, default=512, help="samples per step over all workers")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the dense parameters (Adam)")
    parser.add_argument("--sparse-lr", type=float, default=0.02, help="learning rate of the embedding rows (Adagrad)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="few steps")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.steps = 1, args.steps or 20
    return args


def open_data(args: argparse.Namespace) -> tuple[ShardedLoader, ShardedLoader | None, dict]:
    """Return the loaders of the training and test set, and the model sizes that fit them."""
    if args.data == "flights":
        flights = open_flights(args.split)
        train = ShardedLoader(flights.train, global_batch=args.global_batch, seed=args.seed)
        test = ShardedLoader(flights.test, batch_size=4096, training=False)
        return train, test, {"slots": flights.train[1].shape[1], "dense": 8, "dim": 8, "hidden": (64, 32)}
    if args.data == "synthetic":
        clicks = SyntheticClicks(args.rows, seed=args.seed)
    else:
        clicks = QueueDataset(Path(args.data), criteo_schema(args.hash_space))
    sizes = {"slots": 26, "dense": 13, "dim": 10, "hidden": (400, 400, 400)}
    return ShardedLoader(clicks, global_batch=args.global_batch), None, sizes


def build(args: argparse.Namespace, sizes: dict) -> tuple[WideDeepModel, torch.optim.Optimizer]:
    model = WideDeepModel(**sizes, rule=ps.Adagrad(args.sparse_lr))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def train(args: argparse.Namespace, model: WideDeepModel, optimizer, loader: ShardedLoader) -> dict:
    """Train; the first epoch evaluates each batch before training on it, so that a stream needs no test set."""
    started, rows, seen = time.perf_counter(), 0, fleet.metrics.Auc()
    for epoch in range(args.epochs):
        losses, report_bad_records = 0.0, 0
        for step, (dense, ids, label) in enumerate(loader, 1):
            logit = model(dense if args.data == "flights" else dense.clamp(min=0).log1p(), ids)
            loss = F.binary_cross_entropy_with_logits(logit, label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loader.share.rows:
                losses, report_bad_records = losses + loss.item() * len(label), report_bad_records + len(label)
                if epoch == 0:
                    seen.update(logit.sigmoid(), label)
            if step == args.steps:
                break
        rows += report_bad_records
        print(f"TRAIN ---> pass: {epoch} loss: {losses / max(report_bad_records, 1):.6f}")
    seconds = time.perf_counter() - started
    losses, report_bad_records = fleet.metrics.sum([losses, report_bad_records]).tolist()
    return {
        "loss": round(losses / report_bad_records, 6),
        "samples_per_s": round(float(fleet.metrics.sum(rows / seconds)), 1),
        "auc": round(seen.compute(), 5),
    }


@torch.no_grad()
def evaluate(model: WideDeepModel, loader: ShardedLoader) -> float:
    """Return the AUC over the test samples of all workers."""
    model.eval()
    auc = fleet.metrics.Auc()
    for dense, ids, label in loader:
        if loader.share.rows:
            auc.update(model(dense, ids).sigmoid(), label)
    return auc.compute()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    fleet.init(is_collective=False, strategy=fleet.DistributedStrategy(**MODES[args.mode]))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    loader, test, sizes = open_data(args)
    model, optimizer = build(args, sizes)
    fleet.init_worker()
    result = train(args, model, optimizer, loader)
    if test is not None:
        fleet.barrier_worker()
        result["auc"] = round(evaluate(model, test), 5)
    fleet.stop_worker()
    if fleet.is_first_worker():
        result |= {"world_size": fleet.worker_num(), "servers": fleet.server_num(), "mode": args.mode}
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
