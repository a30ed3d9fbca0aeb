"""`default_budget`: the bytes that all tables of a server may take, where nobody says it."""

from __future__ import annotations

from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.host_memory import total_bytes


def default_budget() -> int:
    """Return nine tenths of the memory that this process's control groups, or the host, have."""
    limit, _ = ControlGroups().memory_limit()
    total = total_bytes()
    return min(limit or total, total) * 9 // 10
