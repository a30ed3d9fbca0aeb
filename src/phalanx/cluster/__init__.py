"""Roles, environment variables, rendezvous and hardware of a job's processes (opens no socket).

In: /proc, the environment, what schedulers and description files say. Out: who this process is, what its host allows,
which machines there are. Imports no torch. Start with `role` and `spec`; `rendezvous` is how ranks wait for each other.
"""

from phalanx.cluster.role.role import Role

__all__ = ["Role"]
