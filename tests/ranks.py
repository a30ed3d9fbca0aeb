"""Run a function on several real ranks from a test: `results = run_ranks(fn, 2)`.

Ranks are forked from a server that has torch imported, each with the whole environment a launcher gives
its children (docs/design/modules.md) and a store held by the test process, so nothing needs a fixed port.
The parent waits on pipes and exit codes up to a deadline: a rank that dies, hangs or raises ends the test
with every rank's traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "phalanx.comm", "phalanx.comm.context", "phalanx.ps.server.main"]
"""What the server that all test processes are forked from has imported."""

GRACE_S = 8.0
"""Seconds the other ranks get to end by themselves after one failed, when no failure is expected."""


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    error_type: str = ""
    """The exception's class; `Killed` when the rank died without a word, `Timeout` when it was ended."""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    output: str = ""
    """All the rank wrote to standard output and standard error, log lines included."""

    @property
    def failed(self) -> bool:
        return bool(self.error_type)


class RankFailedError(AssertionError):
    """At least one rank failed; the message holds each rank's traceback and output."""


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection
    outcome: Outcome
    log: Path
    is_done: bool = field(default=False)


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect_failure: bool = False,
    env: Mapping[str, str | None] | None = None,
    env_of_rank: Callable[[int], Mapping[str, str | None]] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `n` ranks and return the results in rank order.

    `fn` is a module-level function of an importable test module; it calls `phalanx.init()` itself or not.
    Whatever group it leaves is ended for it. Warnings are errors inside the ranks, as they are in the tests.

    Args:
        fn: What each rank runs.
        n: Number of ranks.
        args: Picklable arguments, the same on every rank.
        timeout_s: Seconds until ranks that still run are killed.
        expect_failure: Return one `Outcome` per rank instead of raising when a rank fails.
        env: Variables added to every rank's environment; a None value removes one.
        env_of_rank: The same for one rank, applied last.

    Raises:
        RankFailedError: If a rank raised, died or was still running at the deadline.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(n):
                variables = rank_environment(rank, n, store.port, Path(folder))
                variables |= dict(env or {}) | dict(env_of_rank(rank) if env_of_rank else {})
                ranks.append(_start(fn, args, rank, variables, Path(folder), timeout_s))
            _collect(ranks, time.monotonic() + timeout_s, expect_failure)
        finally:
            _end(ranks)
    outcomes = [r.outcome for r in ranks]
    if expect_failure:
        return outcomes
    if any(o.failed for o in outcomes):
        raise RankFailedError(_report(outcomes))
    return [o.value for o in outcomes]


def rank_environment(rank: int, n: int, port: int, folder: Path) -> dict[str, str | None]:
    """Return every variable a launcher gives rank `rank` of `n` on this host, store at `port`."""
    endpoints = ",".join(f"127.0.0.1:{20000 + r}" for r in range(n))
    shared = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "PADDLE_TRAINER_ID": rank,
        "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "GROUP_WORLD_SIZE": 1, "PADDLE_TRAINERS_NUM": n,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "PHALANX_RANK": rank, "PHALANX_LOCAL_RANK": rank, "PHALANX_NODE_RANK": 0,
        "PHALANX_WORLD_SIZE": n, "PHALANX_LOCAL_WORLD_SIZE": n, "PHALANX_NODE_COUNT": 1,
        "PHALANX_MASTER_ADDR": "127.0.0.1", "PHALANX_MASTER_PORT": port,
        "PHALANX_ROLE": "WORKER", "TRAINING_ROLE": "TRAINER",
        "PHALANX_WORKER_ENDPOINTS": endpoints, "PADDLE_TRAINER_ENDPOINTS": endpoints,
        "PHALANX_ENDPOINT": f"127.0.0.1:{20000 + rank}",
        "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{20000 + rank}",
        "PHALANX_ATTEMPT": 0, "TORCHELASTIC_RESTART_COUNT": 0,
        "PHALANX_JOB_ID": "test", "TORCHELASTIC_RUN_ID": "test",
        "PHALANX_LOG_DIR": folder, "PHALANX_LOG_FILE": folder / f"workerlog.{rank}",
        "PHALANX_RENDEZVOUS_TIMEOUT_S": 30,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {name: str(value) for name, value in shared.items()}


def _start(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    env: Mapping[str, str | None],
    folder: Path,
    timeout_s: float,
) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    log = folder / f"workerlog.{rank}"
    process = context.Process(
        target=_rank_main,
        args=(fn, args, dict(env), str(log), theirs, timeout_s),
        name=f"rank {rank}",
        daemon=False,
    )
    with bare_main():
        process.start()
    theirs.close()
    return _Rank(process, ours, Outcome(rank), log)


@contextlib.contextmanager
def bare_main() -> Iterator[None]:
    """Keep multiprocessing from importing the test runner's `__main__` again in every rank."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if main.__name__ != "__main__" or "pytest" not in str(file):
        yield
        return
    main.__spec__ = None
    del main.__file__
    try:
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    env: dict[str, str | None],
    log: str,
    pipe: Connection,
    timeout_s: float,
) -> None:
    _redirect(log)
    os.environ.update({k: v for k, v in env.items() if v is not None})
    for name in (k for k, v in env.items() if v is None):
        os.environ.pop(name, None)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(timeout_s - 1.0, 0.5), exit=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch's compiler warns about torch's own code.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    try:
        reply: dict[str, Any] = {"value": fn(*args)}
        message = pickle.dumps(reply)
        _leave()
    except BaseException as error:  # noqa: BLE001 -- whatever ended the rank is the test's to see
        traceback.print_exc()
        reply = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        message = pickle.dumps(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # By value: multiprocessing would hand tensors over through files that this rank takes with it.
    pipe.send_bytes(message)
    pipe.close()
    # Leaving through the interpreter's shutdown would race with gloo's threads.
    os._exit(1 if "type" in reply else 0)


def _redirect(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _leave() -> None:
    import torch.distributed as dist

    context = sys.modules.get("phalanx.comm.context")
    if context is not None:
        context.shutdown()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _collect(ranks: list[_Rank], deadline: float, expect_failure: bool) -> None:
    while waiting := {r.pipe: r for r in ranks if not r.is_done}:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            for rank in waiting.values():
                rank.outcome.error_type, rank.outcome.message = "Timeout", "still running at the deadline"
                rank.is_done = True
            return
        for pipe in ready:
            _receive(waiting[pipe])  # type: ignore[index]
        if not expect_failure and any(r.outcome.failed for r in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _receive(rank: _Rank) -> None:
    rank.is_done = True
    try:
        reply = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.outcome.error_type, rank.outcome.message = "Killed", "died without a word"
        return
    if "type" in reply:
        rank.outcome.error_type = reply["type"]
        rank.outcome.message, rank.outcome.traceback = reply["message"], reply["traceback"]
    else:
        rank.outcome.value = reply["value"]


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.outcome.error_type == "Timeout" or not rank.is_done:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(5.0)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.outcome.exit_code = rank.process.exitcode
        rank.outcome.output = rank.log.read_text(errors="replace") if rank.log.exists() else ""
        rank.pipe.close()
        rank.process.close()


def _report(outcomes: list[Outcome]) -> str:
    parts = [f"{sum(o.failed for o in outcomes)} of {len(outcomes)} ranks failed"]
    for o in outcomes:
        state = f"{o.error_type}: {o.message}" if o.failed else "ok"
        parts.append(f"--- rank {o.rank} (exit code {o.exit_code}): {state}\n{o.output[-6000:]}")
    return "\n".join(parts)
