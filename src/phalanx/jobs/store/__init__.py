"""The database of jobs, workspaces, secrets and tokens, in SQLite or PostgreSQL.

from phalanx.jobs.store import JobDatabase
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from phalanx.jobs.store.configs import ConfigRecords
from phalanx.jobs.store.database import Clock, Database, now
from phalanx.jobs.store.jobs import JobRecords
from phalanx.jobs.store.leases import LeaseRecords
from phalanx.jobs.store.secrets import SecretRecords
from phalanx.jobs.store.tokens import TokenRecords
from phalanx.jobs.store.workspaces import WorkspaceRecords


class JobDatabase:
    """The whole store: one database, and for each subject the object that owns its tables.

    Each method of these is one transaction, which is durable when the method has returned. Who may do what is not asked
    here but in `jobs/service/service`. `close` or `with` ends it.

    Attributes:
        home: Folder of all state.
        workspaces: Tables `workspaces` and `members`.
        configs: Table `configs`: code sources and datasets.
        secrets: Table `secrets`.
        jobs: Tables `jobs`, `attempts`, `events` and `changes`.
        tokens: Table `tokens`.
        leases: Table `leases`.
    """

    def __init__(self, url: str | None, home: Path, *, clock: Clock = now) -> None:
        """Open the store; see `Database`."""
        self.home = home
        self.database = Database(url, home, clock=clock)
        self.workspaces = WorkspaceRecords(self.database)
        self.configs = ConfigRecords(self.database)
        self.secrets = SecretRecords(self.database)
        self.jobs = JobRecords(self.database, self.secrets)
        self.tokens = TokenRecords(self.database)
        self.leases = LeaseRecords(self.database)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
