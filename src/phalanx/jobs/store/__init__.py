"""The store: workspaces, jobs and everything around them, in SQLite or PostgreSQL.

from phalanx.jobs.store import JobDatabase
"""

from __future__ import annotations

from phalanx.jobs.store.jobs import JobRows
from phalanx.jobs.store.leases import LeaseRows
from phalanx.jobs.store.tokens import TokenRows


class JobDatabase(JobRows, TokenRows, LeaseRows):
    """The whole store. Each method is one transaction, which is durable when the method has returned.

    Who may do what is not asked here but in `jobs/service/service`. `JobDatabase(url, home)` opens one; `close` or
    `with` ends it.
    """
