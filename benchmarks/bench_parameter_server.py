"""Examples/s of wide & deep on 1 server and 2 workers against PaddlePaddle's, and against workers that share nothing.

26 slots through one table of dim 16, 13 dense values, an MLP of 3 x 400, SGD, batch 512, 1 M ids drawn uniformly,
one thread a process. Every engine trains the same batches from memory; the first steps are not timed, and the figure
is all workers' examples over the time from the first worker's start to the last worker's end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from benchmarks.peers import PADDLE, PeerMissingError, python_of
from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "benchmarks" / "parameter_server"
WORKERS = 2
TIMEOUT_S = 300.0


def trained(commands: Sequence[Sequence[str]], settings: Mapping[str, str], steps: int) -> float:
    """Run commands side by side until all have ended, and return the examples/s of their workers."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BENCH_FOLDER": name}
        common |= {"BENCH_STEPS": str(steps), "BENCH_WORKERS": str(WORKERS)}
        running = []
        for index, command in enumerate(commands):
            said = stack.enter_context(open(folder / f"said-{index}", "w+"))
            environment = os.environ | common | settings | {"BENCH_WORKER": str(index)}
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
            )
            stack.callback(_end, process)
            running.append((process, said))
        for process, said in running:
            _wait(process, said)
        return examples_per_s([json.loads(path.read_text()) for path in sorted(folder.glob("span-*.json"))])


def examples_per_s(spans: Sequence[Mapping[str, float]]) -> float:
    """Return the examples/s of workers that trained side by side.

    Raises:
        RuntimeError: If a worker left no span.
    """
    if len(spans) != WORKERS:
        raise RuntimeError(f"{WORKERS} workers were to say when they trained, {len(spans)} did")
    seconds = max(span["ended"] for span in spans) - min(span["started"] for span in spans)
    return sum(span["examples"] for span in spans) / seconds


def _wait(process: subprocess.Popen[bytes], said: IO[str]) -> None:
    if process.wait(TIMEOUT_S):
        said.seek(0)
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{said.read()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: a launcher that failed may have left its servers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def ours(mode: str, steps: int) -> float:
    """Train on our servers."""
    launch = [sys.executable, "-m", "phalanx.launch", "--server_num", "1", "--worker_num", str(WORKERS)]
    return trained([[*launch, str(SCRIPTS / "phalanx_worker.py")]], {"BENCH_MODE": mode}, steps)


def paddle(steps: int) -> float:
    """Train on PaddlePaddle's; `--worker_num` chooses the launcher that ends when the workers have."""
    launch = [str(python_of("paddle", PADDLE)), "-m", "paddle.distributed.launch", "--server_num=1"]
    return trained([[*launch, f"--worker_num={WORKERS}", str(SCRIPTS / "paddle_worker.py")]], {}, steps)


def local(steps: int) -> float:
    """Train in processes that know nothing of each other, with a table of torch's in each."""
    return trained([[sys.executable, str(SCRIPTS / "local_worker.py")]] * WORKERS, {}, steps)


PEERS: dict[str, tuple[str, Callable[[int], float]]] = {
    "paddle": ("PaddlePaddle 2.6.2", paddle),
    "local": ("2 processes, nn.Embedding(sparse=True)", local),
}
CASES = {
    "async paddle": ("async 1s2w paddle", "async", "paddle"),
    "async local": ("async 1s2w local nn.Embedding", "async", "local"),
    "hybrid local": ("hybrid 1s2w local nn.Embedding", "hybrid", "local"),
}
"""Name of the row, our mode, the peer."""


def compare(case: str, *, steps: int, pairs: int) -> Row:
    """Measure one case."""
    name, mode, peer = CASES[case]
    peer_name, train_peer = PEERS[peer]
    return measure_pairs(
        name,
        lambda: ours(mode, steps),
        lambda: train_peer(steps),
        pairs=pairs,
        unit="examples/s",
        better="higher",
        peer_name=peer_name,
    )


def main() -> None:
    """Run the cases asked for; one whose peer cannot be had is skipped with the reason."""
    asked = arguments(list(CASES))
    rows = []
    for case in asked.cases:
        try:
            rows.append(compare(case, steps=10 if asked.quick else 400, pairs=1 if asked.quick else 5))
        except PeerMissingError as error:
            print(f"skipped {case}: {error}", file=sys.stderr)
    show("bench_parameter_server", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
