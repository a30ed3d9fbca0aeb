"""`LoadBalance`: measures the ranks of a running job and gives faster ones more replicas, or more samples.

Which rank computes a replica changes no bit of the result. Samples weigh by their number wherever they are computed, so
the gradient is that of the global batch. Ranks tell each other their seconds every few updates, and all decide alike: a
split is changed when another one would have saved `SAVED_STEPS` steps in the last updates, and at least `MIN_GAIN` of a
step in each half of them. Ranks that compute the same samples together (tensor parallel) count as the slowest of them.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Literal, Protocol

import torch
from torch.optim import Optimizer

from phalanx.cluster.shares import least_rows, split_rows
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.batch.sample_split import START, BatchPosition, SampleSplit
from phalanx.comm.collectives import all_gather
from phalanx.comm.context import Context
from phalanx.comm.events.event_file import append_event
from phalanx.parallel.balance.headroom import Headroom, count_sharing_ranks, gradient_bytes
from phalanx.parallel.balance.step_clock import MeasuredWork, StepClock
from phalanx.parallel.session import distributed_models
from phalanx.plan.apportion import RankSpeed, apportion, gain, least_step_s, step_s

logger = logging.getLogger("phalanx.parallel")

LEAST_INTERVAL, MOST_INTERVAL = 4, 10
"""Updates from one exchange of figures to the next, at least and at most; `INTERVAL_S` chooses between them."""

INTERVAL_S, LEAST_INTERVAL_S = 0.4, 0.05
"""Seconds between two exchanges: within the limits above, and at least. Comparing ranks takes their time."""

MIN_GAIN = 0.05
"""Part of a step that another split must save."""

SAVED_STEPS = 1.0
"""Steps that it would have saved in the updates by which it is chosen: 5 % of each of 20 updates, or 12.5 % of 8."""

MIN_WINDOW_S = 0.2
"""Seconds that each half of these updates takes at least: shorter ones are of single periods of the scheduler."""

_MOST_UPDATES, _MOST_S = int(2 * SAVED_STEPS / MIN_GAIN), 4 * MIN_WINDOW_S
"""Updates that are looked back at, or those of the last seconds."""

Unit = Literal["replicas", "samples"]


class Split(Protocol):
    """What is split over the ranks."""

    unit: Unit

    @property
    def sizes(self) -> list[int]:
        """Units of each rank."""

    @property
    def is_fixed(self) -> bool:
        """Whether it cannot change now."""

    def unit_s(self, measured: MeasuredWork) -> float:
        """Return the seconds of one unit; 0 if none was measured."""

    def most(self, headroom: Headroom, current: int) -> int:
        """Return how many units this rank's memory holds."""

    def position(self) -> BatchPosition:
        """Return how far loaders of this rank have cut batches."""

    def change(self, sizes: Sequence[int], after: BatchPosition) -> None:
        """Split otherwise, once all ranks can."""


class ReplicaSplit:
    """Logical replicas over ranks."""

    unit: Unit = "replicas"

    def __init__(self, context: Context, replicas: Replicas) -> None:
        self._context, self._replicas = context, replicas

    @property
    def sizes(self) -> list[int]:
        """See `Split`."""
        return [len(local) for local in self._replicas.assignment]

    @property
    def is_fixed(self) -> bool:
        """See `Split`."""
        return self._replicas.is_moving or self._context.batches.is_reading_ahead

    def unit_s(self, measured: MeasuredWork) -> float:
        """See `Split`."""
        return measured.batch_s / measured.batches if measured.batches else 0.0

    def most(self, headroom: Headroom, current: int) -> int:
        """See `Split`."""
        params = [param for model in distributed_models() for param in model.parameters()]
        return headroom.most_replicas(current, self._replicas.count, gradient_bytes(params))

    def position(self) -> BatchPosition:
        """See `Split`."""
        return START  # replicas wait for the end of an epoch themselves where batches are requested ahead

    def change(self, sizes: Sequence[int], after: BatchPosition) -> None:
        """See `Split`."""
        self._replicas.move(
            tuple(range(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True))
        )


class RowSplit:
    """Samples of a global batch over ranks."""

    unit: Unit = "samples"
    is_fixed = False

    def __init__(self, context: Context, split: SampleSplit) -> None:
        self._context, self._split = context, split

    @property
    def sizes(self) -> list[int]:
        """See `Split`."""
        return split_rows(self._rows(), self._split.parts)

    def _rows(self) -> int:
        rows_for = self._context.rows_for
        return self._split.ranks if rows_for is None else rows_for(self._split.ranks)

    def unit_s(self, measured: MeasuredWork) -> float:
        """See `Split`."""
        return measured.batch_s / measured.rows if measured.rows else 0.0

    def most(self, headroom: Headroom, current: int) -> int:
        """See `Split`."""
        return headroom.most_samples(current, self._rows())

    def position(self) -> BatchPosition:
        """See `Split`."""
        return self._split.furthest

    def change(self, sizes: Sequence[int], after: BatchPosition) -> None:
        """See `Split`."""
        self._split.change(sizes, after)


@dataclass(frozen=True, slots=True)
class _Figures:
    """What a rank tells the others."""

    unit_s: float
    """Seconds of a unit; 0 if it is not known, or the split cannot change."""

    update_s: float
    sample_s: float
    most: int
    measured_s: float
    position: BatchPosition

    def to_list(self) -> list[float]:
        return [
            self.unit_s,
            self.update_s,
            self.sample_s,
            float(self.most),
            self.measured_s,
            *map(float, self.position),
        ]

    @classmethod
    def of(cls, values: Sequence[float]) -> _Figures:
        unit_s, update_s, sample_s, most, measured_s, returns, epoch, position = values
        return cls(unit_s, update_s, sample_s, int(most), measured_s, (int(returns), int(epoch), int(position)))

    @property
    def speed(self) -> RankSpeed:
        return RankSpeed(self.unit_s, self.update_s, self.most)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What all ranks told each other at one update."""

    updates: int
    """Updates since the exchange before."""

    figures: list[_Figures]
    """Of every rank, or of those together that compute the same samples."""

    seconds: float
    """Seconds that it covers: the fewest that a rank measured."""

    @property
    def speeds(self) -> list[RankSpeed]:
        """The speed of each rank."""
        return [figure.speed for figure in self.figures]

    def next_interval(self) -> int:
        """Return after how many updates of this length to exchange figures again."""
        update_s = max(self.seconds / self.updates, 1e-6)
        most = max(MOST_INTERVAL, math.ceil(LEAST_INTERVAL_S / update_s))
        return min(most, max(LEAST_INTERVAL, math.ceil(INTERVAL_S / update_s)))


class LoadBalance:
    """Balances the ranks that read their own samples. Updates are collective now and then.

    Args:
        context: This process's place in the job.
        split: What is split over its ranks.
    """

    def __init__(self, context: Context, split: Split) -> None:
        self._context, self._split = context, split
        self._clock = StepClock(context.device)
        self._headroom = Headroom(context.device, count_sharing_ranks(context))
        self._updates = 0
        self._interval = self._until_exchange = MOST_INTERVAL
        self._began = time.perf_counter()
        self._exchanged: list[_Exchange] = []
        """The last exchanges since the split changed, the newest last."""

        self._sizes: list[int] = []
        """The split that they are of."""

        self._sample_s = 0.0
        context.batches.clock = weakref.ref(self._clock)

    @property
    def unit(self) -> Unit:
        """What is split."""
        return self._split.unit

    def begin_update(self, optimizer: Optimizer) -> None:
        """Note that the parameters are about to be updated."""
        self._clock.begin_update(optimizer)

    def updated(self, _optimizer: Optimizer) -> None:
        """Count an update; every so many, compare the ranks. Collective then."""
        self._clock.end_update()
        self._updates += 1
        self._until_exchange -= 1
        if not self._until_exchange:
            self._exchange()
            self._decide()
            self._until_exchange = self._interval

    def facts(self) -> dict[str, float | int]:
        """Return what this rank's events hold: its replicas or its part of the samples, and its speed."""
        sizes, index = self._split.sizes, self._context.readers.index
        current = sizes[index] if index < len(sizes) else 0
        share = {"replicas": current} if self.unit == "replicas" else {}
        return {
            **share,
            "share": round(current / max(1, sum(sizes)), 4),
            **({"ms_per_sample": round(1e3 * self._sample_s, 4)} if self._sample_s else {}),
        }

    def _exchange(self) -> None:
        measured, sizes = self._clock.take(), self._split.sizes
        current = sizes[self._context.readers.index]
        self._sample_s = measured.sample_s
        own = _Figures(
            0.0 if self._split.is_fixed else self._split.unit_s(measured),
            measured.update_s / max(1, measured.updates),
            measured.sample_s,
            self._split.most(self._headroom, current),
            time.perf_counter() - self._began,
            self._split.position(),
        )
        self._began = time.perf_counter()
        readers = self._context.readers
        values = torch.tensor([[readers.index, *own.to_list()]], dtype=torch.float64).to(self._context.device)
        rows = all_gather(values, same_shapes=True).tolist()  # over all ranks: they have to decide alike
        if sizes != self._sizes:
            self._exchanged, self._sizes = [], sizes
        figures = [[_Figures.of(row[1:]) for row in rows if row[0] == index] for index in range(readers.count)]
        slowest = [_slowest(together) for together in figures]
        exchange = _Exchange(self._interval, slowest, min(figure.measured_s for figure in slowest))
        self._exchanged.append(exchange)
        # What all ranks know decides: their intervals, and which exchanges count, are the same.
        self._interval = exchange.next_interval()

    def _decide(self) -> None:
        last = self._exchanged[-1]
        if not all(figure.unit_s > 0 for figure in last.figures):
            self._exchanged.clear()
            return
        while _updates(self._exchanged[1:]) > _MOST_UPDATES and _seconds(self._exchanged[1:]) > _MOST_S:
            del self._exchanged[0]
        # A rank that changed its speed a moment ago is seen in the last exchanges, a small difference only in many.
        length = 2
        while length <= len(self._exchanged):
            window = self._exchanged[-length:]
            after = self._better_split(window)
            if after is not None:
                self._split.change(after, max(figure.position for figure in last.figures))
                self._exchanged.clear()
                self._tell(_typical(_newer_half(window)), self._sizes, after)
                return
            length += length // 2

    def _better_split(self, window: list[_Exchange]) -> list[int] | None:
        """Return the split that would have saved enough in some updates; None if none would have."""
        halves = window[: len(window) // 2], _newer_half(window)
        if min(map(_seconds, halves)) < MIN_WINDOW_S:
            return None
        # The older half tells whether it lasts; where a speed has just changed, some of its updates are from before.
        before, speeds = self._sizes, _speeds(halves[1])
        if 1 - least_step_s(speeds, sum(before)) / step_s(speeds, before) < MIN_GAIN:
            return None  # as nearly always, and cheap to tell
        least = least_rows(sum(before), len(before)) if self.unit == "samples" else 1
        after = apportion(speeds, sum(before), least=least)
        if after is None or min(gain(_speeds(half), before, after) for half in halves) < MIN_GAIN:
            return None
        saved = sum(exchange.updates * gain(exchange.speeds, before, after) for exchange in window)
        return after if saved >= SAVED_STEPS else None

    def _tell(self, figures: Sequence[_Figures], before: Sequence[int], after: Sequence[int]) -> None:
        if self._context.rank:
            return
        speeds = [figure.speed for figure in figures]
        was_s, is_s = step_s(speeds, before), step_s(speeds, after)
        moved = ", ".join(
            f"{now} instead of {then} on rank {rank} ({1e3 * figure.sample_s:.3g} ms per sample)"
            for rank, (then, now, figure) in enumerate(zip(before, after, figures, strict=True))
            if then != now
        )
        logger.info(
            "%s move to faster ranks: %s; a step takes about %.3g ms instead of %.3g, %.0f %% less",
            self.unit,
            moved,
            1e3 * is_s,
            1e3 * was_s,
            100 * (1 - is_s / was_s),
        )
        append_event(
            "balance",
            unit=self.unit,
            update=self._updates,
            before=list(before),
            after=list(after),
            ms_per_sample=[round(1e3 * figure.sample_s, 4) for figure in figures],
            gain=round(1 - is_s / was_s, 4),
        )


def _slowest(figures: Sequence[_Figures]) -> _Figures:
    """Return the figures of ranks that compute the same samples together: each waits for the slowest of them."""
    unit_s = [figure.unit_s for figure in figures]
    return _Figures(
        max(unit_s) if min(unit_s) > 0 else 0.0,
        max(figure.update_s for figure in figures),
        max(figure.sample_s for figure in figures),
        min(figure.most for figure in figures),
        min(figure.measured_s for figure in figures),
        max(figure.position for figure in figures),
    )


def _newer_half(window: list[_Exchange]) -> list[_Exchange]:
    """Return the newer half of some exchanges, with the middle one."""
    return window[len(window) // 2 :]


def _seconds(exchanges: Sequence[_Exchange]) -> float:
    """Return the seconds that exchanges are of."""
    return sum(exchange.seconds for exchange in exchanges)


def _updates(exchanges: Sequence[_Exchange]) -> int:
    """Return the updates that exchanges are of."""
    return sum(exchange.updates for exchange in exchanges)


def _speeds(exchanges: Sequence[_Exchange]) -> list[RankSpeed]:
    """Return the speed of each rank."""
    return [figure.speed for figure in _typical(exchanges)]


def _typical(exchanges: Sequence[_Exchange]) -> list[_Figures]:
    """Return the median figures of each rank, so that one of several exchanges changes little; memory as told last."""
    return [
        _Figures(
            median(figure.unit_s for figure in rank),
            median(figure.update_s for figure in rank),
            median(figure.sample_s for figure in rank),
            rank[-1].most,
            rank[-1].measured_s,
            rank[-1].position,
        )
        for rank in zip(*(exchange.figures for exchange in exchanges), strict=True)
    ]
