"""Records of a file that are broken: stop at the first, or leave them out and count them."""

from __future__ import annotations

import logging
from typing import Any, Literal, get_args

from phalanx.data.ranks import Shard, gather_integers
from phalanx.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger("phalanx.data")

OnCorrupt = Literal["stop", "skip"]


class Corrupt:
    """The broken records a reader met.

    Args:
        on_corrupt: `stop` at a broken record with an error that names it, or `skip` it.

    Raises:
        ConfigError: If it is neither.
    """

    def __init__(self, on_corrupt: OnCorrupt = "stop") -> None:
        if on_corrupt not in get_args(OnCorrupt):
            hint = did_you_mean(str(on_corrupt), get_args(OnCorrupt))
            raise ConfigError(f"Asked for on_corrupt={on_corrupt!r}.{hint} Give 'stop' or 'skip'.")
        self.on_corrupt = on_corrupt
        self.count = 0
        """Records left out so far."""

        self.first = ""
        """The first of them: its file, its place, what is wrong."""

    def add(self, problem: str, records: int = 1) -> None:
        """Take note of broken records, the first of which `problem` names; without a full stop.

        Raises:
            DataError: If reading is to stop at them.
        """
        if self.on_corrupt == "stop":
            raise DataError(f'{problem}. Get the file again, or pass on_corrupt="skip" to leave such records out.')
        self.first = self.first or problem
        self.count += records


def check_alike(dataset: Any, shard: Shard) -> None:
    """Raise unless all ranks left as many records out of a dataset with a length.

    Collective for datasets that skip records, when `shard.is_checked`; else nothing.

    Raises:
        DataError: On every rank, if they did not: their files differ, and so would the steps they take.
    """
    corrupt = _skipping(dataset)
    if corrupt is None or not shard.is_checked:
        return
    everyone = gather_integers([len(dataset), corrupt.count])
    if len({tuple(one) for one in everyone}) > 1:
        found = ", ".join(f"rank {rank} has {rows} and left out {out}" for rank, (rows, out) in enumerate(everyone))
        raise DataError(
            f"The ranks read different records of {type(dataset).__name__}: {found}. Give all of them the same files."
        )


def report(dataset: Any, shard: Shard, *, is_own: bool) -> None:
    """Log at the end of an epoch how many records were left out, which is the same number on every rank.

    Collective for datasets that skip records of files of their own, when `shard.is_checked`.

    Args:
        dataset: What was read.
        shard: Which part of it this process read.
        is_own: Whether each rank read other files, so that the counts are to be added up.
    """
    corrupt = _skipping(dataset)
    if corrupt is None:
        return
    count = corrupt.count
    if is_own and shard.is_checked:
        count = sum(one for (one,) in gather_integers([count]))
    if count and shard.index == 0:
        first = f"; the first here: {corrupt.first}" if corrupt.first else ""
        logger.warning("%d broken records of %s left out so far%s", count, type(dataset).__name__, first)


def _skipping(dataset: Any) -> Corrupt | None:
    corrupt = getattr(dataset, "corrupt", None)
    return corrupt if isinstance(corrupt, Corrupt) and corrupt.on_corrupt == "skip" else None
