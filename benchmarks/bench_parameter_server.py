"""Models on 1 server and 2 workers: speed against PaddlePaddle, TorchRec and sharing nothing, quality, and saves.

paddle           examples/s, async, against PaddlePaddle 2.6.2
local            the same against 2 processes that train a local `nn.Embedding(sparse=True)` each and share nothing
hybrid           the same with dense parameters averaged by the workers instead of kept on the server
torchrec         examples/s of DLRM with bags of Zipf ids, async, against 2 CPU ranks of TorchRec 1.9.2, which train
                 synchronously
torchrec-even    the same with uniformly drawn ids
torchrec-hybrid  as `torchrec` with dense parameters averaged by the workers, as TorchRec's ranks do
torchrec-sync    as `torchrec`, in mode `sync`, as TorchRec's ranks train
auc              AUC of each mode on real flights, against one process
save             a snapshot of 10 M rows during training, against writing as many bytes; steps meanwhile, against calm
                 ones

The model of `paddle`, `local` and `hybrid` is wide & deep: 26 slots on one table of dim 16, 13 dense values, an MLP of
3 x 400, 1 M ids drawn uniformly; that of `torchrec` is in `parameter_server/bags.py`. SGD, batch 512, one thread a
process. Every engine trains the same batches from memory and hands each loss to the script; the figure is all workers'
examples over the time from the first one's start to the last one's end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.parameter_server.jobs import OURS, ROOT, SCRIPTS, WORKERS, results, run
from benchmarks.peers import PADDLE, TORCHREC, TORCHREC_ALONE, PeerMissingError, python_of
from benchmarks.report import Row, arguments, measure_pairs, show

LOCAL = "2 processes, nn.Embedding(sparse=True)"
EXAMPLE = ROOT / "examples" / "wide_and_deep" / "train.py"


def trained(commands: Sequence[Sequence[str]], steps: int, settings: Mapping[str, str] | None = None) -> float:
    """Run commands side by side and return the examples/s of their workers."""
    with tempfile.TemporaryDirectory() as name:
        run(commands, Path(name), {"BENCH_STEPS": str(steps), **(settings or {})})
        return examples_per_s(results(Path(name), "span", WORKERS))


def examples_per_s(spans: Sequence[Mapping[str, float]]) -> float:
    """Return the examples/s of workers that trained side by side."""
    seconds = max(span["ended"] for span in spans) - min(span["started"] for span in spans)
    return sum(span["examples"] for span in spans) / seconds


def ours(mode: str, steps: int, *, script: str = "phalanx_worker.py", ids: str = "even") -> float:
    """Train on our servers."""
    return trained([[*OURS, str(SCRIPTS / script)]], steps, {"BENCH_MODE": mode, "BENCH_IDS": ids})


def paddle(steps: int) -> float:
    """Train on PaddlePaddle's; `--worker_num` chooses the launcher that ends when the workers have."""
    launch = [str(python_of("paddle", PADDLE)), "-m", "paddle.distributed.launch", "--server_num=1"]
    return trained([[*launch, f"--worker_num={WORKERS}", str(SCRIPTS / "paddle_worker.py")]], steps)


def local(steps: int) -> float:
    """Train in processes that know nothing of each other."""
    return trained([[sys.executable, str(SCRIPTS / "local_worker.py")]] * WORKERS, steps)


def speed(name: str, mode: str, peer: Callable[[int], float], peer_name: str, *, quick: bool) -> list[Row]:
    """Measure examples/s against a peer."""
    steps = 10 if quick else 400
    return [
        measure_pairs(
            name,
            lambda: ours(mode, steps),
            lambda: peer(steps),
            pairs=1 if quick else 5,
            unit="examples/s",
            better="higher",
            peer_name=peer_name,
        )
    ]


def on_torchrec(steps: int, ids: str) -> float:
    """Train on ranks of TorchRec."""
    python = python_of("torchrec", TORCHREC, alone=TORCHREC_ALONE)
    return trained([[str(python), str(SCRIPTS / "torchrec_worker.py")]] * WORKERS, steps, {"BENCH_IDS": ids})


def torchrec(mode: str, ids: str, *, quick: bool) -> list[Row]:
    """Measure DLRM with bags of ids, Zipf (zipf) or uniformly drawn (even)."""
    steps = 3 if quick else 200
    return [
        measure_pairs(
            f"{mode} 1s2w torchrec {ids} ids",
            lambda: ours(mode, steps, script="phalanx_bags_worker.py", ids=ids),
            lambda: on_torchrec(steps, ids),
            pairs=1 if quick else 5,
            unit="examples/s",
            better="higher",
            peer_name="TorchRec 1.9.2",
        )
    ]


def auc_of(launch: Sequence[str], mode: str, *, quick: bool) -> float:
    """Train the example on real flights and return the AUC of the test months."""
    command = [*launch, str(EXAMPLE), "--mode", mode, *(["--smoke"] if quick else [])]
    with tempfile.TemporaryDirectory() as name:
        said = run([command], Path(name), {})[0]
    result = next(line for line in said.splitlines() if line.startswith("RESULT "))
    return float(json.loads(result.removeprefix("RESULT "))["auc"])


def auc(*, quick: bool) -> list[Row]:
    """Compare the AUC of each mode with that of one process."""
    alone = auc_of([sys.executable], "sync", quick=quick)
    return [
        measure_pairs(
            f"auc {mode} 1s2w one process",
            lambda mode=mode: auc_of(OURS, mode, quick=quick),
            lambda: alone,
            pairs=1,
            unit="AUC",
            better="higher",
            peer_name="one process",
        )
        for mode in ("sync", "async", "geo")
    ]


def saved(rows: int, steps: int) -> dict[str, float]:
    """Save a table during training; returns GB/s of both sides and p99 of both sets of steps in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"BENCH_ROWS": str(rows), "BENCH_STEPS": str(steps)}
        run([[*OURS, str(SCRIPTS / "save_worker.py")]], folder, settings)
        save, timed = results(folder, "save", 1)[0], results(folder, "steps", 1)[0]
        return {
            "ours": save["bytes"] / save["seconds"] / 1e9,
            "plain": plain_write(folder / "plain", save["bytes"] // save["saves"]),
            "during": percentile_ms(timed["during"], 99),
            "calm": percentile_ms(timed["calm"], 99),
        }


def plain_write(path: Path, size: int) -> float:
    """Write a file of this size and return its GB/s, the disk's own end included."""
    block = np.random.default_rng(0).bytes(1 << 24)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        file.flush()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - started) / 1e9


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """Return a percentile of times, in ms; of few times the one above it."""
    return float(np.percentile(seconds, percent, method="higher")) * 1e3


def save(*, quick: bool) -> list[Row]:
    """Measure a save and what training feels of it."""
    rows, pairs = (100_000, 1) if quick else (10_000_000, 3)
    found = [saved(rows, 20 if quick else 200) for _ in range(pairs)]

    def row(case: str, mine: str, other: str, unit: str, better: str, peer_name: str) -> Row:
        mine_next, other_next = iter([f[mine] for f in found]).__next__, iter([f[other] for f in found]).__next__
        return measure_pairs(case, mine_next, other_next, pairs=pairs, unit=unit, better=better, peer_name=peer_name)

    return [
        row("save 10 M rows plain file", "ours", "plain", "GB/s", "higher", "one file of as many bytes"),
        row("p99 step during save calm", "during", "calm", "ms", "lower", "p99 step without a save"),
    ]


CASES: dict[str, Callable[..., list[Row]]] = {
    "paddle": lambda quick: speed("async 1s2w paddle", "async", paddle, "PaddlePaddle 2.6.2", quick=quick),
    "local": lambda quick: speed("async 1s2w local nn.Embedding", "async", local, LOCAL, quick=quick),
    "hybrid": lambda quick: speed("hybrid 1s2w local nn.Embedding", "hybrid", local, LOCAL, quick=quick),
    "torchrec": lambda quick: torchrec("async", "zipf", quick=quick),
    "torchrec-even": lambda quick: torchrec("async", "even", quick=quick),
    "torchrec-hybrid": lambda quick: torchrec("hybrid", "zipf", quick=quick),
    "torchrec-sync": lambda quick: torchrec("sync", "zipf", quick=quick),
    "auc": auc,
    "save": save,
}


def main() -> None:
    """Run the cases asked for; one whose peer cannot be had is skipped with the reason."""
    asked = arguments(list(CASES))
    rows = []
    for case in asked.cases:
        try:
            rows += CASES[case](quick=asked.quick)
        except PeerMissingError as error:
            print(f"skipped {case}: {error}", file=sys.stderr)
    show("bench_parameter_server", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
