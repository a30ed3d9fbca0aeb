"""`ParallelMode`: MindSpore's parallel modes of a `Model`: DATA_PARALLEL, HYBRID_PARALLEL, AUTO_PARALLEL, ..."""

from __future__ import annotations

from enum import StrEnum

from phalanx.errors import ConfigError, did_you_mean


class ParallelMode(StrEnum):
    """How a `Model` trains on the ranks that were launched; equal global batches give equal losses in every mode."""

    STAND_ALONE = "stand_alone"
    """One process; with more ranks it is an error."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds the full model and reads samples of its own."""

    HYBRID_PARALLEL = "hybrid_parallel"
    """Also cut layers (`px.shard`) or stages, as the strategy's degrees say."""

    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    """The same as HYBRID_PARALLEL: you mark the layers, the rest follows."""

    AUTO_PARALLEL = "auto_parallel"
    """The planner decides."""


def as_mode(word: str) -> ParallelMode:
    """Return the mode of this name.

    Raises:
        ConfigError: If there is none.
    """
    try:
        return ParallelMode(str(word).lower())
    except ValueError:
        names = [mode.name for mode in ParallelMode]
        raise ConfigError(
            f"parallel_mode is one of {', '.join(names)}, found {word!r}.{did_you_mean(str(word), names)}"
        ) from None
