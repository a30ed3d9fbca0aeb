"""Roles, environment variables, rendezvous and hardware of a job's processes (opens no socket)."""

from phalanx.cluster.role.role import Role

__all__ = ["Role"]
