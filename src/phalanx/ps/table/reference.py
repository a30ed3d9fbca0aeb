"""`ReferenceTable`: the embedding table in NumPy, test oracle and fallback of the native table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.hash64 import mix_one
from phalanx.ps.table.arrays import Columns, Keys, Rows, check_columns, check_shard
from phalanx.ps.table.initializers import admitted, initial_values, nearest_bfloat16, row_numbers, stochastic_bfloat16
from phalanx.ps.table.moment import CopiedMoment
from phalanx.ps.table.placement import SHARDS, mixed, shard_of, table_salt
from phalanx.ps.table.row_layout import INDEX_BYTES, layout_of
from phalanx.ps.table.rules import CountFilter, Probability, ShowClick, TableSpec

Counts = NDArray[np.uint32]

RENUMBER_AT = 2**32 - 2**16
"""How far ticks may run from the oldest one told apart, before those older than `KEEP_TICKS` become one."""

KEEP_TICKS = 2**31

LEAST_REMOVED = 64
"""Ids that went which a shard remembers; half as many as it has ids where that is more."""


class ReferenceTable:
    """See `phalanx.ps.table.table.RowTable`. One thread at a time.

    It has no files: rows that would move there stay in memory, as they are.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.layout = spec, layout_of(spec)
        self.stored = self.file_bytes = self.file_reads = 0
        self.tick = self.pushed = self.dropped = self.evicted = self.pulled = self.missed = 0
        self._salt = table_salt(spec.name)
        self._rows = np.zeros((0, self.layout.width), np.float32)
        self._free: list[int] = []
        self._shards = [_Shard() for _ in range(SHARDS)]
        self._oldest = 0  # ticks before this one are taken for it

    @property
    def rows(self) -> int:
        """Ids that have a row."""
        return sum(len(shard.slots) for shard in self._shards)

    @property
    def bytes(self) -> int:
        """What the rows and the index count against `max_bytes`."""
        entries = sum(len(shard.ticks) for shard in self._shards)
        return self.rows * self.layout.row_bytes + entries * INDEX_BYTES

    # --- reading ----------------------------------------------------------------------------------------------------

    def pull(self, keys: Keys, out: Rows) -> None:
        """Read rows; changes none."""
        slots = self._find(keys)
        has_row = slots >= 0
        out[has_row] = self._rows[slots[has_row], : self.spec.dim]
        out[~has_row] = self._initial_rows(keys[~has_row])
        self.pulled += len(keys)
        self.missed += int((~has_row).sum())

    def export(self, shard: int, since: int = 0) -> Columns:
        """Return a shard's rows, or those changed after tick `since`."""
        check_shard(shard)
        state = self._shards[shard]
        decays = self._decays(state, since)
        is_complete = since == 0 or since < max(state.swept, self._oldest) or decays is None
        keys = [key for key in state.in_order(self._salt) if is_complete or state.ticks[key] > since]
        rows = [key for key in keys if key in state.slots]
        waiting = [key for key in keys if key in state.waiting]
        return Columns(
            keys=np.array(rows, np.int64),
            ticks=np.array([state.ticks[key] for key in rows], np.uint64),
            rows=self._rows[[state.slots[key] for key in rows]].reshape(len(rows), self.layout.width),
            waiting_keys=np.array(waiting, np.int64),
            waiting_ticks=np.array([state.ticks[key] for key in waiting], np.uint64),
            waiting_counts=np.array([state.waiting[key] for key in waiting], np.uint32),
            days=np.array(state.days, np.uint64),
            removed=np.array([] if is_complete else state.removed_since(since, self._salt), np.int64),
            decays=0 if is_complete else decays or 0,
            tick=self.tick,
            is_complete=is_complete,
        )

    def moment(self, since: int = 0) -> CopiedMoment:
        """Return the table as it is now, in a copy."""
        return CopiedMoment(self.spec, [self.export(shard, since) for shard in range(SHARDS)])

    def keys(self, shard: int) -> Keys:
        """Return the ids of a shard that have a row, ordered by hash."""
        check_shard(shard)
        state = self._shards[shard]
        return np.array([key for key in state.in_order(self._salt) if key in state.slots], np.int64)

    # --- changing ---------------------------------------------------------------------------------------------------

    def push(
        self,
        keys: Keys,
        gradients: Rows,
        lr: float | None = None,
        counts: Counts | None = None,
        shows: NDArray[np.float32] | None = None,
        clicks: NDArray[np.float32] | None = None,
    ) -> int:
        """Apply gradients by the rule; returns how many were of ids not admitted."""
        tick = self._next_tick()
        counts = np.ones(len(keys), np.uint32) if counts is None else counts
        slots = self._admit(keys, counts, tick)
        trained = np.flatnonzero(slots >= 0)
        slots = slots[trained]
        dim, state = self.spec.dim, self.layout.state
        rows = self._rows[slots]
        self.spec.rule.update(
            rows[:, :dim],
            rows[:, dim : dim + state],
            gradients[trained],
            self.spec.rule.lr if lr is None else lr,
        )
        if self.layout.has_statistics:
            rows[:, -2] += (counts if shows is None else shows)[trained].astype(np.float32)
            rows[:, -1] += 0 if clicks is None else clicks[trained]
        self._rows[slots] = self._rounded(rows, keys[trained], tick)
        dropped = len(keys) - len(trained)
        self.pushed += len(keys)
        self.dropped += dropped
        self._evict(tick)
        return dropped

    def add(self, keys: Keys, deltas: Rows) -> None:
        """Add to rows, making those that are missing."""
        tick = self._next_tick()
        slots = self._make(keys, tick)
        rows = self._rows[slots]
        rows[:, : self.spec.dim] += deltas
        self._rows[slots] = self._rounded(rows, keys, tick)
        self.pushed += len(keys)
        self._evict(tick)

    def assign(self, keys: Keys, values: Rows) -> None:
        """Replace the values of rows, making those that are missing; optimizer state stays."""
        tick = self._next_tick()
        slots = self._make(keys, tick)
        self._rows[slots, : self.spec.dim] = self._stored(values)
        self.pushed += len(keys)
        self._evict(tick)

    def require_room(self) -> None:
        """Do nothing: there are no files."""

    def require_room_to_shrink(self) -> None:
        """Do nothing: there are no files."""

    def shrink(self) -> int:
        """End a day; returns how many rows went."""
        tick = self._next_tick()
        if not (self.spec.row_days or self.spec.waiting_days):
            return 0
        return sum(self._end_day(shard, tick) for shard in self._shards)

    def clear(self) -> None:
        """Drop everything but the counts of what happened."""
        tick = self._next_tick()
        for shard in self._shards:
            self._drop(shard, list(shard.ticks))
            shard.days, shard.removed, shard.swept = [], [], tick

    def restore(self, shard: int, columns: Columns) -> None:
        """Put exported columns in place of what the shard holds."""
        check_shard(shard)
        check_columns(self.spec, self._salt, shard, columns, self.layout.width)
        self._renumber(max(self.tick + 1 if columns.tick < self.tick else self.tick, columns.tick))
        state = self._shards[shard]
        if columns.is_complete:
            self._drop(state, list(state.ticks))
        else:
            self._decay(state, columns.decays)
            self._drop(state, [key for key in dict.fromkeys(columns.removed.tolist()) if key in state.ticks])
        state.days = [max(int(day), self._oldest) for day in columns.days]
        state.removed, state.swept = [], self.tick
        slots = [self._slot(state, key) for key in columns.keys.tolist()]
        self._rows[slots] = columns.rows
        self._rows[slots, : self.spec.dim] = self._stored(columns.rows[:, : self.spec.dim])
        for key, tick in zip(columns.keys.tolist(), columns.ticks.tolist(), strict=True):
            state.waiting.pop(key, None)
            state.ticks[key] = max(tick, self._oldest)
        waiting = columns.waiting_ticks.tolist(), columns.waiting_counts.tolist()
        for key, tick, count in zip(columns.waiting_keys.tolist(), *waiting, strict=True):
            self._drop(state, [key] if key in state.ticks else [])
            state.ticks[key], state.waiting[key] = max(tick, self._oldest), count

    # --- rows -------------------------------------------------------------------------------------------------------

    def _find(self, keys: Keys) -> NDArray[np.intp]:
        """Return the slot of each id, -1 for none."""
        shards = shard_of(keys, self._salt).tolist()
        slots = [self._shards[s].slots.get(key, -1) for s, key in zip(shards, keys.tolist(), strict=True)]
        return np.array(slots, np.intp)

    def _admit(self, keys: Keys, counts: Counts, tick: int) -> NDArray[np.intp]:
        """Return the slot of each id, making rows as the entry policy says; -1 where it says no."""
        entry = self.spec.entry
        if isinstance(entry, Probability):
            slots = self._find(keys)
            is_admitted = admitted(self.spec, self._numbers(keys)) | (slots >= 0)
            slots[is_admitted] = self._make(keys[is_admitted], tick)
            return slots
        if not isinstance(entry, CountFilter):
            return self._make(keys, tick)
        is_admitted = np.ones(len(keys), np.bool_)
        shards = shard_of(keys, self._salt).tolist()
        for i, (s, key, count) in enumerate(zip(shards, keys.tolist(), counts.tolist(), strict=True)):
            shard = self._shards[s]
            if key not in shard.slots:
                seen = shard.waiting.get(key, 0) + count
                is_admitted[i] = seen >= entry.count
                if not is_admitted[i]:
                    shard.waiting[key], shard.ticks[key] = seen, tick
        slots = np.full(len(keys), -1, np.intp)
        slots[is_admitted] = self._make(keys[is_admitted], tick)
        return slots

    def _make(self, keys: Keys, tick: int) -> NDArray[np.intp]:
        """Return the slot of each id, starting the rows that are missing."""
        missing = np.flatnonzero(self._find(keys) < 0)
        shards = [self._shards[s] for s in shard_of(keys, self._salt).tolist()]
        slots = np.empty(len(keys), np.intp)
        for i, (shard, key) in enumerate(zip(shards, keys.tolist(), strict=True)):
            shard.waiting.pop(key, None)
            shard.ticks[key] = tick
            slots[i] = self._slot(shard, key)
        new_slots = slots[missing]
        dim, state = self.spec.dim, self.layout.state
        started = np.zeros((len(new_slots), self.layout.width), np.float32)
        values = initial_values(self.spec.init, self._numbers(keys[missing]), dim)
        started[:, :dim] = self._stored(values)
        started[:, dim : dim + state] = self.spec.rule.initial_state(dim)
        self._rows[new_slots] = started
        return slots

    def _slot(self, shard: _Shard, key: int) -> int:
        """Return the slot of an id, taking a free one if it has none."""
        if key not in shard.slots:
            if not self._free:
                have = len(self._rows)
                more = max(16, have // 2)
                self._rows = np.concatenate([self._rows, np.zeros((more, self.layout.width), np.float32)])
                self._free = list(range(have + more - 1, have - 1, -1))
            shard.slots[key] = self._free.pop()
        return shard.slots[key]

    def _drop(self, shard: _Shard, keys: list[int]) -> int:
        """Forget ids; returns how many of them had a row."""
        slots = [shard.slots.pop(key) for key in keys if key in shard.slots]
        self._free += slots
        for key in keys:
            shard.waiting.pop(key, None)
            del shard.ticks[key]
        return len(slots)

    def _remove(self, shard: _Shard, keys: list[int], tick: int) -> int:
        """Forget ids as a change does, so that a delta can tell; returns how many of them had a row."""
        rows = self._drop(shard, keys)
        shard.removed += [(tick, key) for key in keys]
        most = max(LEAST_REMOVED, len(shard.ticks) // 2)
        if len(shard.removed) > most:
            shard.swept = shard.removed[-most - 1][0]
            shard.removed = [(then, key) for then, key in shard.removed if then > shard.swept]
        return rows

    # --- values -----------------------------------------------------------------------------------------------------

    def _numbers(self, keys: Keys) -> NDArray[np.uint64]:
        return row_numbers(mixed(keys, self._salt), self.spec.seed)

    def _initial_rows(self, keys: Keys) -> Rows:
        """Return what ids without a row read as."""
        numbers = self._numbers(keys)
        values = self._stored(initial_values(self.spec.init, numbers, self.spec.dim))
        return np.where(admitted(self.spec, numbers)[:, None], values, np.float32(0))

    def _stored(self, values: Rows) -> Rows:
        return values if self.spec.dtype == "float32" else nearest_bfloat16(values)

    def _rounded(self, rows: Rows, keys: Keys, tick: int) -> Rows:
        """Return rows as training leaves them: in bfloat16 a small step must not always round to none."""
        if self.spec.dtype == "bfloat16":
            dim = self.spec.dim
            rows[:, :dim] = stochastic_bfloat16(rows[:, :dim], self._numbers(keys), tick)
        return rows

    # --- time -------------------------------------------------------------------------------------------------------

    def _next_tick(self) -> int:
        self._renumber(self.tick + 1)
        return self.tick

    def _renumber(self, tick: int) -> None:
        """Advance to `tick`; when the oldest tick is too far back, take all older than `KEEP_TICKS` for one."""
        self.tick = tick
        if tick - self._oldest < RENUMBER_AT:
            return
        self._oldest = tick - KEEP_TICKS
        for shard in self._shards:
            shard.ticks = {key: max(t, self._oldest) for key, t in shard.ticks.items()}
            shard.days = [max(day, self._oldest) for day in shard.days]

    def _end_day(self, shard: _Shard, tick: int) -> int:
        """Decay a shard's rows, drop what is low or was not seen, and note the day; returns how many rows went."""
        self._decay(shard, 1)
        low = self._low(shard)
        rows_until, waiting_until = shard.day(self.spec.row_days), shard.day(self.spec.waiting_days)
        gone = [key for key in shard.slots if key in low or shard.ticks[key] <= rows_until]
        gone += [key for key in shard.waiting if shard.ticks[key] <= waiting_until]
        shard.days = [tick, *shard.days][: max(self.spec.row_days, self.spec.waiting_days)]
        return self._remove(shard, gone, tick)

    def _low(self, shard: _Shard) -> set[int]:
        """Return the ids whose score is too low."""
        entry = self.spec.entry
        if not isinstance(entry, ShowClick):
            return set()
        keys = list(shard.slots)
        show, click = self._rows[list(shard.slots.values()), -2:].T
        score = np.float32(entry.show_weight) * (show - click) + np.float32(entry.click_weight) * click
        return {key for key, is_low in zip(keys, score < np.float32(entry.drop_below), strict=True) if is_low}

    def _decay(self, shard: _Shard, times: int) -> None:
        """Decay show and click of all rows."""
        if isinstance(self.spec.entry, ShowClick):
            slots = list(shard.slots.values())
            for _ in range(times):
                self._rows[slots, -2:] *= np.float32(self.spec.entry.decay)

    def _decays(self, shard: _Shard, since: int) -> int | None:
        """Return how often show and click decayed after a tick, None if that is not known any more."""
        if not isinstance(self.spec.entry, ShowClick):
            return 0
        count = sum(day > since for day in shard.days)
        return None if count == self.spec.entry.unseen_days else count

    def _evict(self, tick: int) -> None:
        """Keep to `max_bytes`: shard after shard gives up its least recent eighth, from one picked by the tick."""
        if self.spec.max_bytes is None or self.spec.spills:
            return
        number = mix_one(tick) >> 54
        while self.bytes > self.spec.max_bytes:
            shard = self._shards[number]
            order = sorted(shard.in_order(self._salt), key=shard.ticks.__getitem__)
            evicted = order[: -(-len(order) // 8)]
            self.evicted += self._remove(shard, evicted, tick)
            number = (number + 1) % SHARDS


class _Shard:
    """What a shard knows about its ids."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.ticks: dict[int, int] = {}  # of rows and of waiting ids
        self.days: list[int] = []
        self.removed: list[tuple[int, int]] = []  # tick and id of what went, as far as it is remembered
        self.swept = 0  # tick of the last change that neither the ticks of rows, `removed` nor `days` tell

    def day(self, days: int) -> int:
        """Return the tick at which the day `days` ago began; -1 if it is not known, or `days` is 0."""
        return self.days[days - 1] if 0 < days <= len(self.days) else -1

    def in_order(self, salt: int) -> list[int]:
        keys = np.fromiter(self.ticks, np.int64, len(self.ticks))
        return _by_hash(keys, salt)

    def removed_since(self, tick: int, salt: int) -> list[int]:
        """Return the ids that went after a tick and are not there again."""
        keys = {key for then, key in self.removed if then > tick and key not in self.ticks}
        return _by_hash(np.fromiter(keys, np.int64, len(keys)), salt)


def _by_hash(keys: Keys, salt: int) -> list[int]:
    return keys[np.argsort(mixed(keys, salt))].tolist()  # type: ignore[no-any-return]
