"""SQLAlchemy table definitions of the store."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

REVISION = "0002"


class Time(TypeDecorator[datetime]):
    """A moment in UTC. SQLite keeps no time zone, so there it is taken off and put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a moment to what the database stores."""
        if value is None:
            return None
        return value.astimezone(UTC).replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert what the database stores to a moment in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData()


def _workspace(*, key: bool = True) -> Column[str]:
    workspace = ForeignKey("workspaces.name", ondelete="CASCADE")
    return Column("workspace", String, workspace, primary_key=key, nullable=False)


workspaces = Table(
    "workspaces",
    metadata,
    Column("name", String, primary_key=True),
    Column("created", Time, nullable=False),
)

members = Table(
    "members",
    metadata,
    _workspace(),
    Column("name", String, primary_key=True),
    Column("role", String, nullable=False),
)

configs = Table(
    "configs",
    metadata,
    _workspace(),
    Column("kind", String, primary_key=True),  # code, dataset
    Column("name", String, primary_key=True),
    Column("config", JSON, nullable=False),
    Column("created", Time, nullable=False),
)

secrets = Table(
    "secrets",
    metadata,
    _workspace(),
    Column("name", String, primary_key=True),
    Column("encrypted", Text, nullable=False),
    Column("created", Time, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("digest", String, nullable=False),  # SHA-256 of the token's text, which is random: no salt is needed
    Column("owns_store", Integer, nullable=False),
    Column("created", Time, nullable=False),
    Column("expires", Time),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    _workspace(key=False),
    Column("name", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("backend", String, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("created", Time, nullable=False),
    Column("started", Time),
    Column("ended", Time),
    Column("attempt", Integer, nullable=False),
    Column("failure", JSON(none_as_null=True)),
    Column("retry_of", String),
    Column("request", String),
    UniqueConstraint("workspace", "owner", "request", name="one_job_a_request"),
    Index("jobs_by_workspace", "workspace", "created"),
    Index("jobs_by_state", "state", "created"),
    Index("jobs_by_time", "created"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job", String, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("state", String, nullable=False),
    Column("handle", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("failure", JSON(none_as_null=True)),
    Column("created", Time, nullable=False),
    Column("started", Time),
    Column("ended", Time),
)

events = Table(
    "events",
    metadata,
    Column("job", String, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("time", Time, nullable=False),
    Column("kind", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("data", JSON, nullable=False),
)

changes = Table(  # one row; writers of jobs take turns at it, so that it counts in the order of their commits
    "changes",
    metadata,
    Column("number", Integer, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("expires", Time, nullable=False),
)
