"""`px.launch(fn, n, *args)`: run a function on n ranks of this machine, from a notebook or a script.

The ranks are forked from this process: a function of `__main__`, of a cell of a notebook or inside another function is
there as it is, with all that it refers to, and nothing of it is pickled. What it returns is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from phalanx.errors import LaunchError, PeerLostError
from phalanx.launch.process.environment import JobFacts, build
from phalanx.launch.process.linux import die_with_parent
from phalanx.launch.request import machine
from phalanx.launch.request.topology import NodeOffer, Topology, build_topology

T = TypeVar("T")

_ADDRESS = "127.0.0.1"
_RENDEZVOUS_S = 60.0
_OTHERS_S = 3.0
"""Seconds after a rank failed in which another may say that it failed first: peers notice the loss at once."""

_END_S = 5.0
"""Seconds that a rank has to end by itself after SIGTERM."""


def launch(fn: Callable[..., T], n: int, *args: Any) -> T:
    """Call `fn(*args)` on `n` ranks of this machine, wait for them, and return what rank 0 returned.

    The ranks are copies of this process (fork), so `fn` may be defined anywhere: in a cell of a notebook, in
    `__main__`, inside a function. It calls `px.init()`, or `px.distribute`, as a script under `phalanx run` does. What
    it changes, the models among it, is changed in the copies alone: return what you want to have, or save it.

    Limits: Linux; nothing here may have used a card before, as CUDA does not survive a fork; each rank computes with
    one thread on the CPU, as OpenMP's do not either. `phalanx run` has none of these, and servers, several hosts,
    restarts and log files besides.

    Args:
        fn: What each rank calls.
        n: Number of ranks.
        args: Its arguments, the same objects on every rank.

    Returns:
        What `fn` returned on rank 0, which must be something that can be pickled.

    Raises:
        LaunchError: If a rank raised or was killed, with its rank and traceback; or this process cannot be copied.
    """
    _check(fn, n)
    with tempfile.TemporaryDirectory(prefix="phalanx-launch-") as folder, ExitStack() as stack:
        endpoints = [stack.enter_context(machine.bind(_ADDRESS, 0, flag="px.launch")) for _ in range(n)]
        store, gate = _store(), stack.enter_context(closing(_Gate()))
        ranks: list[_Rank] = []
        try:
            for rank in range(n):
                variables = _environment(rank, endpoints, store.port, folder)
                ranks.append(_start(fn, args, rank, variables, gate))
            gate.open(n)
            result: T = _collected(ranks)
            return result
        finally:
            _end(ranks)


class _Gate:
    """Where ranks wait until all are copied.

    The store's thread looks up the address of each rank that connects, under a lock of the C library, and a copy made
    just then would wait for that lock for ever. A pipe, as no rank that was killed can block the others there.
    """

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()

    def open(self, count: int) -> None:
        """Let so many ranks pass."""
        os.write(self._writes, bytes(count))

    def wait(self) -> bool:
        """Wait in a rank; return False if its parent has closed the gate without opening it."""
        os.close(self._writes)
        return bool(os.read(self._reads, 1))

    def close(self) -> None:
        """Close the parent's ends: ranks that still wait leave."""
        os.close(self._reads)
        os.close(self._writes)


@dataclass(slots=True)
class _Rank:
    number: int
    process: ForkProcess
    pipe: Connection


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    error: str
    traceback: str
    is_of_a_peer: bool
    """Whether it says that another rank was lost."""


def _check(fn: object, n: object) -> None:
    if not callable(fn) or isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise LaunchError(
            f"px.launch takes a function and a number of ranks, 1 or more, found {type(fn).__name__} and {n!r}. Write "
            "px.launch(train, 2, *arguments)."
        )
    ranks = os.environ.get("PHALANX_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if ranks != "1" or "PHALANX_RANK" in os.environ:
        raise LaunchError(
            "px.launch was called inside a rank of a job. Call it in a process of its own, or call the function here: "
            "the launcher has started all ranks already."
        )
    if "torch" in sys.modules and _has_used_device():
        raise LaunchError(
            "px.launch copies this process, which has used a GPU already, and CUDA does not survive that. Restart the "
            "notebook and touch GPUs only inside the function, or write a script for `phalanx run`."
        )
    context = sys.modules.get("phalanx.comm.context")
    if context is not None and context.is_initialized():
        raise LaunchError(
            "px.launch copies this process, which is a job of one already: px.init() or px.distribute was called here. "
            "Call px.shutdown() first, and px.init() inside the function."
        )


def _has_used_device() -> bool:
    from phalanx.accelerator import device_in_use  # loads torch

    return device_in_use() is not None


def _store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)


def _environment(rank: int, endpoints: Sequence[socket.socket], port: int, folder: str) -> Mapping[str, str | None]:
    offer = NodeOffer(
        node_rank=0,
        address=_ADDRESS,
        hostname=socket.gethostname(),
        endpoints={"worker": [f"{_ADDRESS}:{bound.getsockname()[1]}" for bound in endpoints]},
        job_id=os.path.basename(folder),
        store_port=port,
    )
    topology: Topology = build_topology([offer], 0, {}, folder)
    facts = JobFacts(
        mode="collective",
        log_dir=folder,
        attempt=0,
        max_restarts=0,
        timeout_s=float(os.environ.get("PHALANX_RENDEZVOUS_TIMEOUT_S", _RENDEZVOUS_S)),
        gloo_path=folder,
        interface="lo",
        is_multi_host=False,
    )
    return build(topology.local[rank], topology, facts, os.environ)


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, variables: Mapping[str, str | None], gate: _Gate
) -> _Rank:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_run,
        args=(fn, args, rank, variables, theirs, os.getpid(), gate),
        name=f"rank {rank}",
        daemon=False,
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each copy writes what is in there once more
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    variables: Mapping[str, str | None],
    pipe: Connection,
    parent: int,
    gate: _Gate,
) -> None:
    """Be one rank."""
    import torch

    from phalanx.comm.context import shutdown

    die_with_parent(parent)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    answer: tuple[str, Any]
    try:
        if not gate.wait():
            return
        value = fn(*args)
        shutdown()
        answer = ("value", pickle.dumps(value) if rank == 0 else None)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the caller gets it
        is_of_a_peer = isinstance(error, PeerLostError)
        text = f"{type(error).__name__}: {error}"
        answer = ("failed", _Failure(rank, text, "".join(traceback.format_exception(error)), is_of_a_peer))
    pipe.send(answer)
    if answer[0] == "failed":
        sys.exit(1)


def _collected(ranks: Sequence[_Rank]) -> Any:
    """Return rank 0's result once all have ended well, or raise what ended the first that did not."""
    waiting: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks}
    result = None
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)
            answer = _answer(rank)
            if isinstance(answer, _Failure):
                raise _error(_first([answer, *_further(waiting)]))
            result = answer if rank.number == 0 else result
    assert result is not None
    return pickle.loads(result)


def _answer(rank: _Rank) -> bytes | _Failure | None:
    try:
        _, value = rank.pipe.recv()
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return _Failure(rank.number, how, "", is_of_a_peer=False)
    return value  # type: ignore[no-any-return]


def _further(waiting: Mapping[Any, _Rank]) -> Iterator[_Failure]:
    """Yield the failures that come within a few seconds of the first."""
    left, deadline = dict(waiting), time.monotonic() + _OTHERS_S
    while left and (seconds := deadline - time.monotonic()) > 0:
        for pipe in wait(list(left), seconds):
            answer = _answer(left.pop(pipe))
            if isinstance(answer, _Failure):
                yield answer


def _first(failures: Sequence[_Failure]) -> _Failure:
    """Return the failure that the others are a consequence of, as far as one can tell."""
    return next((failure for failure in failures if not failure.is_of_a_peer), failures[0])


def _error(failure: _Failure) -> LaunchError:
    trace = f"\n\n{failure.traceback.rstrip()}" if failure.traceback else ". What it printed last says more."
    return LaunchError(f"rank {failure.rank} of px.launch failed: {failure.error}{trace}")


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.terminate()
    deadline = time.monotonic() + _END_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        with contextlib.suppress(OSError):
            rank.pipe.close()
