"""Alembic migration 1: workspaces, configurations, secrets, jobs, attempts, events, leases."""

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TIME = sa.DateTime(timezone=True)


def _workspace(*, key: bool = True) -> sa.Column[str]:
    workspace = sa.ForeignKey("workspaces.name", ondelete="CASCADE")
    return sa.Column("workspace", sa.String, workspace, primary_key=key, nullable=False)


def _job() -> tuple[sa.Column[str], sa.Column[int]]:
    job = sa.ForeignKey("jobs.id", ondelete="CASCADE")
    return (
        sa.Column("job", sa.String, job, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    )


def upgrade() -> None:
    """Make the tables."""
    _spaces()
    _jobs()
    op.create_table(
        "leases",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("expires", _TIME, nullable=False),
    )


def _spaces() -> None:
    workspaces = op.create_table(
        "workspaces",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("created", _TIME, nullable=False),
    )
    # There is always one, so that a first job needs nothing made before it.
    op.bulk_insert(workspaces, [{"name": "default", "created": datetime.now(UTC)}])
    op.create_table(
        "members",
        _workspace(),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
    )
    op.create_table(
        "configs",
        _workspace(),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("created", _TIME, nullable=False),
    )
    op.create_table(
        "secrets",
        _workspace(),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("encrypted", sa.Text, nullable=False),
        sa.Column("created", _TIME, nullable=False),
    )


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String, primary_key=True),
        _workspace(key=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("backend", sa.String, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("started", _TIME),
        sa.Column("ended", _TIME),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("failure", sa.JSON),
        sa.Column("request", sa.String),
        sa.UniqueConstraint("workspace", "owner", "request", name="one_job_a_request"),
    )
    op.create_index("jobs_by_workspace", "jobs", ["workspace", "created"])
    op.create_index("jobs_by_state", "jobs", ["state", "created"])
    op.create_index("jobs_by_time", "jobs", ["created"])
    op.create_table(
        "attempts",
        *_job(),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("handle", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("failure", sa.JSON),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("started", _TIME),
        sa.Column("ended", _TIME),
    )
    op.create_table(
        "events",
        *_job(),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
    )
