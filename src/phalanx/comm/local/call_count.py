"""`calls_issued`: how many collectives this process has issued, which tells whether some code exchanges anything."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def calls_issued() -> int:
    """Return the collectives issued so far on all groups of this process; 0 where it is alone."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_available() else {}
    return sum(map(_calls_of, groups)) if groups else 0


def _calls_of(group: Any) -> int:
    counted = getattr(group, "calls_issued", None)
    if counted is not None:
        return int(counted)
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, NotImplementedError):  # a backend that does not count
        return 0
