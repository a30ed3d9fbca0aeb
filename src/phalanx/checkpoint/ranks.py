"""`Ranks`: gather a value of each rank, decide on rank 0, broadcast the decision or the error.

They use the job's store, not the process group: a background thread may take part while training continues, and a
rank that does not arrive is an error that names it, not a collective that hangs.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import phalanx.comm.context as context_of
from phalanx.comm import process_group
from phalanx.comm.agreement import agree
from phalanx.comm.store import JobStore
from phalanx.errors import BackendError, ConfigError, DataError, PeerLostError, PhalanxError, PlanError

logger = logging.getLogger("phalanx.checkpoint")

_KINDS: dict[str, type[PhalanxError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, PeerLostError, PlanError)
}


def is_elastic() -> bool:
    """Return whether ranks of this job may leave and join, each with all of the state."""
    return context_of.is_initialized() and context_of.current().recovery is not None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of this job that take part in one call."""

    rank: int
    world_size: int
    store: JobStore | None
    """None with one process."""

    prefix: str
    """Prefix of the store keys of this call."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return this rank by itself."""
        return cls(0, 1, None, "")

    @classmethod
    def meet(cls, call: str, terms: Any, *, timeout_s: float | None = None) -> Ranks:
        """Wait for all ranks to make the same call.

        Collective.

        Args:
            call: Name of the call, for messages.
            terms: JSON value that must be the same on all ranks.
            timeout_s: Seconds to wait for the slowest rank; the rendezvous timeout when omitted.

        Raises:
            PeerLostError: If a rank did not arrive in time; names it.
            ConfigError: If ranks called with different terms, or this worker is not connected to the others.
        """
        context = context_of.init()
        if not context.is_distributed:
            return cls.alone()
        if not dist.is_initialized():
            raise ConfigError(
                f"{call} needs all workers, and worker {context.rank} was started again alone. Save tables with "
                "fleet.save_persistables, or start the whole job again."
            )
        agree(call, terms, timeout_s=process_group.rendezvous_timeout_s() if timeout_s is None else timeout_s)
        meeting = process_group.meeting()  # its calls are counted alike on all ranks, also where one joined later
        return cls(context.rank, context.world_size, meeting.store, f"checkpoint/{meeting.calls}")

    def decide(
        self,
        topic: str,
        collect: Callable[[], Any],
        decide: Callable[[list[Any]], Any],
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return what rank 0 decided from the values of all ranks.

        Collective. If `collect` fails on any rank, or `decide` on rank 0, all ranks raise.

        Args:
            topic: Name of this decision, unique in a call.
            collect: Returns this rank's JSON value.
            decide: From all values in rank order to the decision, a JSON value. Called on rank 0 only.
            timeout_s: Seconds to wait for the slowest rank; the rendezvous timeout when omitted.

        Raises:
            PhalanxError: The error: as raised on the rank where it occurred, elsewhere with that rank named.
            PeerLostError: If a rank did not arrive in time.
        """
        if self.store is None:
            try:
                return decide([collect()])
            except OSError as error:
                raise _as_ours(error) from error
        timeout_s = process_group.rendezvous_timeout_s() if timeout_s is None else timeout_s
        mine: Exception | None = None
        try:
            message = {"said": collect()}
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks must not wait for this one
            mine, message = error, _failure(self.rank, error)
        self.store.set(self._key(topic, self.rank), json.dumps(message))
        if self.rank == 0:
            decision, mine = self._decide(topic, decide, mine, timeout_s)
        else:
            decision = self._await_decision(topic, timeout_s)
        if mine is not None:
            raise _as_ours(mine) from mine.__cause__
        if "failed" in decision:
            raise _KINDS.get(decision["kind"], BackendError)(f"on rank {decision['rank']}: {decision['failed']}")
        return decision["decision"]

    def _decide(
        self, topic: str, decide: Callable[[list[Any]], Any], mine: Exception | None, timeout_s: float
    ) -> tuple[dict[str, Any], Exception | None]:
        assert self.store is not None
        others = [self._key(topic, rank) for rank in range(self.world_size)]
        self._await(topic, others, timeout_s)
        answers = [json.loads(self.store.get(key)) for key in others]
        decision = next((answer for answer in answers if "failed" in answer), None)
        if decision is None:
            try:
                decision = {"decision": decide([answer["said"] for answer in answers])}
            except Exception as error:  # noqa: BLE001 -- the other ranks must receive it
                mine, decision = error, _failure(0, error)
        self.store.set(self._key(topic, "decision"), json.dumps(decision))
        # This process may host the store and may exit after this: the others must have read the decision by then.
        heard = [self._key(topic, f"heard/{rank}") for rank in range(1, self.world_size)]
        self._await(topic, heard, timeout_s)
        for key in (*others, *heard, self._key(topic, "decision")):
            self.store.delete(key)
        return decision, mine

    def _await_decision(self, topic: str, timeout_s: float) -> dict[str, Any]:
        assert self.store is not None
        key = self._key(topic, "decision")
        if not self.store.wait([key], timeout_s):
            self._await(topic, [self._key(topic, rank) for rank in range(self.world_size)], 0.0)
            raise self._absent(topic, [0], timeout_s)
        decision: dict[str, Any] = json.loads(self.store.get(key))
        self.store.set(self._key(topic, f"heard/{self.rank}"), "")
        return decision

    def _await(self, topic: str, keys: Sequence[str], timeout_s: float) -> None:
        assert self.store is not None
        if not self.store.wait(keys, timeout_s):
            absent = [int(key.rpartition("/")[2]) for key in keys if not self.store.has([key])]
            raise self._absent(topic, absent, timeout_s)

    def _absent(self, topic: str, ranks: Sequence[int], timeout_s: float) -> PeerLostError:
        who = "; ".join(process_group.describe_rank(rank) for rank in ranks)
        return PeerLostError(
            f"rank {self.rank} waited {timeout_s:.0f} s at {topic!r} of a checkpoint for {who}, which did not answer. "
            "It has ended or hangs: its log says where."
        )

    def _key(self, topic: str, who: int | str) -> str:
        return f"{self.prefix}/{topic}/{who}"


def _failure(rank: int, error: Exception) -> dict[str, Any]:
    ours = _as_ours(error)
    return {"failed": str(ours), "kind": type(ours).__name__, "rank": rank}


def _as_ours(error: Exception) -> Exception:
    """Return an error of the file system as one of ours, and any other as it is."""
    if not isinstance(error, OSError):
        return error
    where = f" {error.filename}" if error.filename else ""
    do_this = _REMEDIES.get(error.errno or 0, "Name another folder")
    return BackendError(f"the file system did not take{where}: {error.strerror}. {do_this}.")


_REMEDIES = (
    {errno.ENOENT: "Name a folder that all nodes share"}
    | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room, or name another folder")
    | dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Let this user write there, or name another folder")
)
"""What to do about errors of the file system."""
