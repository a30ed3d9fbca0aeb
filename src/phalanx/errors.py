"""The exception hierarchy: `PhalanxError` and its subclasses, and "did you mean" suggestions.

    PhalanxError
    ├── ConfigError      what you wrote or set cannot work; you can fix it   (also a ValueError)
    │   ├── StrategyError    a DistributedStrategy setting                    (also a TypeError for a wrong type)
    │   ├── PlanError        a Plan that does not fit the model or the mesh
    │   ├── RoleError        environment variables that are missing or disagree
    │   ├── LaunchError      a launcher flag, host, port or script
    │   └── SpecError        a job that could never run as it is written
    ├── AccessError      you may not do that in this workspace, or are not known
    ├── NotFoundError    there is no job, workspace, ... of that name     (also a LookupError)
    ├── StateError       a job is in a state that does not allow it; look again
    ├── DataError        a file or record from outside is broken; names file and offset
    ├── NotFiniteError   a number of the training is NaN or infinite; names module, sample and rank
    ├── CorruptionError  a rank computed other bits than another from the same numbers; names both
    ├── PeerLostError    another rank or host failed, or did not come in time
    │   └── ShardLostError   ... and what only it had is needed to continue
    ├── ClosedError      you closed it already
    ├── BackendError     a scheduler or cluster said no
    └── InternalError    our bug; please report it

A message says what was asked, what was found and what to do, in that order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PhalanxError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(PhalanxError, ValueError):
    """What the user wrote or set cannot work."""


class StrategyError(ConfigError):
    """A setting of `DistributedStrategy` is unknown, contradictory or out of range."""


class StrategyTypeError(StrategyError, TypeError):
    """A strategy, or one of its settings, has the wrong type."""


class PlanError(ConfigError):
    """A Plan does not fit the model, the mesh or this version."""


class RoleError(ConfigError):
    """Environment variables that say who this process is are missing or disagree."""


class LaunchError(ConfigError):
    """A launcher flag, host, port or script cannot work."""


class SpecError(ConfigError):
    """A job, or a code or dataset configuration, could never work as it is written."""


class AccessError(PhalanxError):
    """Who asks is not known, or has no role that allows it."""


class NotFoundError(PhalanxError, LookupError):
    """There is no job, workspace, code, dataset or secret of that name that the one who asks may see."""


class StateError(PhalanxError):
    """A job is in a state that does not allow what was asked; it may have moved on meanwhile."""


class DataError(PhalanxError):
    """A file or record from outside is broken."""


class NotFiniteError(PhalanxError, ArithmeticError):
    """A number of the training is NaN or infinite."""


class CorruptionError(PhalanxError):
    """A rank computed other bits than another rank did from the same numbers."""


class PeerLostError(PhalanxError, RuntimeError):
    """Another rank or host failed, or did not come in time."""


class ShardLostError(PeerLostError):
    """A rank is lost that alone had a part of the training's state."""


class ClosedError(PhalanxError):
    """The caller closed this object already."""


class BackendError(PhalanxError):
    """A scheduler or cluster refused."""


class InternalError(PhalanxError):
    """A broken invariant of ours."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the known name nearest to `name`, or an empty string.

    Args:
        name: What was written.
        candidates: The names that exist.
    """
    match = nearest(name, candidates)
    return "" if match is None else f" Did you mean '{match}'?"


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if none is close."""
    by_lower = {k.lower(): k for k in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None
