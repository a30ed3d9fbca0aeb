"""Who this process is, who the others are, and every environment variable that says so. Pure: opens no socket."""

from phalanx.cluster.role.role import Role

__all__ = ["Role"]
