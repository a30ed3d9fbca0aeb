"""`LeaseRecords`: leases in the database, for leader election of controllers."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module

from sqlalchemy import delete, or_, select, update

from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database


class LeaseRecords:
    """The leases in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, name: str, holder: str, seconds: float) -> bool:
        """Take or renew a lease; return whether `holder` has it, for `seconds` from now.

        Hosts that share a store must agree on the time within a fraction of `seconds`.
        """
        c = tables.leases.c
        now = self._database.now()
        values = {"holder": holder, "expires": now + timedelta(seconds=seconds)}
        is_free = or_(c.holder == holder, c.expires < now)
        with self._database.writes() as connection:
            if connection.execute(update(tables.leases).where(c.name == name, is_free).values(values)).rowcount:
                return True
            # That of PostgreSQL takes long to import, and most stores are none.
            dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
            new = dialect.insert(tables.leases).values(name=name, **values).on_conflict_do_nothing()
            return connection.execute(new.returning(c.name)).first() is not None

    def holder(self, name: str) -> str | None:
        """Return who has a lease now."""
        c = tables.leases.c
        with self._database.reads() as connection:
            holders = connection.execute(select(c.holder).where(c.name == name, c.expires >= self._database.now()))
            return holders.scalar_one_or_none()

    def release(self, name: str, holder: str) -> None:
        """Give a lease back, if `holder` has it."""
        c = tables.leases.c
        with self._database.writes() as connection:
            connection.execute(delete(tables.leases).where(c.name == name, c.holder == holder))
