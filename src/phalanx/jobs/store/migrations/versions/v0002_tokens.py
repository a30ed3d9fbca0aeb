"""Alembic migration 2: API tokens, retry origin and change counter of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add what is new."""
    op.add_column("jobs", sa.Column("retry_of", sa.String))
    changes = op.create_table("changes", sa.Column("number", sa.Integer, nullable=False))
    op.bulk_insert(changes, [{"number": 0}])
    op.create_table(
        "tokens",
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("owns_store", sa.Integer, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True)),
    )
