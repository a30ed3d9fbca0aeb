"""`Database`: SQLite or PostgreSQL connection and transactions (SQLAlchemy)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, OperationalError

from phalanx.errors import BackendError, ConfigError
from phalanx.jobs.store.upgrade import is_current, upgrade

_BUSY_S = 30.0
"""How long a writer of SQLite waits for the one before it."""

Clock = Callable[[], datetime]


def now() -> datetime:
    """Return the present moment in UTC."""
    return datetime.now(UTC)


class Database:
    """An opened database, brought to the present revision.

    Several processes and threads may have one open. A write is durable when its transaction has ended: SQLite
    writes ahead and syncs at every commit.
    """

    def __init__(self, url: str | None, home: Path, *, clock: Clock = now) -> None:
        """Open the database, made if missing.

        Args:
            url: `sqlite:///FILE` or `postgresql://...`. None: what PHALANX_STORE says, else a file in `home`.
            home: Folder of all state, made if missing, for this user alone.
            clock: Says what time it is.

        Raises:
            ConfigError: If the URL cannot work, or a newer version wrote the database.
            BackendError: If it cannot be reached.
        """
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home = home
        self.now = clock
        self._url = _parse_url(url or os.environ.get("PHALANX_STORE") or f"sqlite:///{home.absolute() / 'jobs.db'}")
        _keep_private(self._url)
        self._engine = _engine(self._url)
        self._writing = self._engine.execution_options(writes=True)
        try:
            self._upgrade()
        except BaseException:
            self.close()
            raise

    def _upgrade(self) -> None:
        with self.reads() as connection:
            current = is_current(connection)
        if not current:
            with self.writes() as connection:
                upgrade(connection, self.shown_url)

    @property
    def shown_url(self) -> str:
        """Where the database is, without a password."""
        return self._url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._engine.dispose()

    @contextmanager
    def reads(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._translate_errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writes(self) -> Iterator[Connection]:
        """A transaction that alone writes (SQLite), or that locks the rows it asks for (PostgreSQL)."""
        with self._translate_errors(), self._writing.begin() as connection:
            yield connection

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise ConfigError(f"The store cannot keep that: {str(error.orig).strip()}.") from error
        except OperationalError as error:
            raise BackendError(
                f"The store at {self.shown_url} cannot be used: {str(error.orig).strip()}. "
                "Check that it runs, its disk and its permissions; PHALANX_STORE says where it is."
            ) from error


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = URL.create("none")
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise ConfigError(
            "The store's address (PHALANX_STORE) is neither SQLite's nor PostgreSQL's. "
            "Write sqlite:////folder/jobs.db or postgresql://user@host/database."
        )
    return parsed


def _keep_private(url: URL) -> None:
    """Make SQLite's file before SQLite does, for this user alone; the files beside it get the same mode."""
    if url.get_backend_name() == "sqlite" and url.database not in (None, ":memory:"):
        with contextlib.suppress(OSError):  # opening gives the better error
            Path(str(url.database)).touch(mode=0o600)


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True, json_deserializer=from_json)
        engine = create_engine(url, connect_args={"timeout": _BUSY_S}, json_deserializer=from_json)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A store on PostgreSQL needs the package {error.name}, which is not installed. "
            "Run: pip install 'phalanx[postgresql]'"
        ) from error
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin` says, not where the driver would begin them
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A writer that begins as a reader can find at its first write that another was faster, and has to start over.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
