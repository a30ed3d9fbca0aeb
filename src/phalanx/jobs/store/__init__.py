"""The store: workspaces, jobs and everything around them, in SQLite or PostgreSQL.

from phalanx.jobs.store import JobStore
"""

from __future__ import annotations

from phalanx.jobs.store.jobs import JobRows
from phalanx.jobs.store.leases import LeaseRows
from phalanx.jobs.store.tokens import TokenRows


class JobStore(JobRows, TokenRows, LeaseRows):
    """Everything that is kept. Each method is one transaction: when it has returned, nothing of it can be lost.

    Who may do what is not asked here but in `jobs/service/service`. `JobStore(url, home)` opens one; `close` or
    `with` ends it.
    """
