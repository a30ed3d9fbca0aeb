"""`upgrade`: upgrade the database schema with alembic, under a lock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from phalanx.errors import ConfigError
from phalanx.jobs.store.tables import REVISION

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext, RevisionStep
    from alembic.script import ScriptDirectory

_LOCK = 0x7068616C616E78  # of PostgreSQL: one upgrade at a time


def is_current(connection: Connection) -> bool:
    """Return whether the database is at this version's revision; alembic need not be imported then."""
    return _revision(connection) == REVISION


def upgrade(connection: Connection, shown_url: str) -> None:
    """Upgrade the database of `connection`, inside its transaction, which alone writes.

    Raises:
        ConfigError: If a newer version wrote it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    revision = _revision(connection)
    if revision != REVISION:
        _migrate(connection, revision, shown_url)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def scripts() -> ScriptDirectory:
    """Return the migrations of this version, as alembic sees them."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(__file__).parent / "migrations"))


def _migrate(connection: Connection, current: str | None, shown_url: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext

    versions = scripts()
    revisions = {script.revision for script in versions.walk_revisions()}
    if current is not None and current not in revisions:
        raise ConfigError(
            f"The store at {shown_url} was written by a newer version of Phalanx: it is at revision {current}, this "
            f"one knows revisions up to {REVISION}. Upgrade Phalanx here, or choose another PHALANX_HOME."
        )

    def steps(revision: tuple[str, ...], _: MigrationContext) -> list[RevisionStep]:
        return versions._upgrade_revs("head", revision)  # type: ignore[arg-type]

    with EnvironmentContext(Config(), versions, fn=steps) as environment:
        environment.configure(connection=connection)
        environment.run_migrations()
