"""`TokenRecords`: API tokens, stored as hashes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta
from typing import Any

from sqlalchemy import and_, delete, insert, select
from sqlalchemy.exc import IntegrityError

from phalanx.errors import AccessError, NotFoundError, StateError
from phalanx.jobs.models import Actor
from phalanx.jobs.protocol import NewToken, Token
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database

_PREFIX = "phx"


class TokenRecords:
    """The tokens in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, actor: Actor, *, lasts_s: float | None = None) -> NewToken:
        """Make a token with which `actor` is recognised; those that have expired go.

        Raises:
            StateError: If that actor has one of this name.
        """
        identity = secrets.token_hex(4)
        text = f"{_PREFIX}_{identity}_{secrets.token_urlsafe(32)}"
        created = self._database.now()
        expires = None if lasts_s is None else created + timedelta(seconds=lasts_s)
        row: dict[str, Any] = {"name": name, "owner": actor.name, "created": created, "expires": expires}
        secret_columns = {"id": identity, "digest": _digest(text), "owns_store": int(actor.owner)}
        try:
            with self._database.writes() as connection:
                connection.execute(delete(tables.tokens).where(tables.tokens.c.expires <= created))
                connection.execute(insert(tables.tokens).values(row | secret_columns))
        except IntegrityError:
            raise StateError(
                f"{actor.name} has a token {name!r} already. Choose another name, or remove that one first."
            ) from None
        return NewToken(Token(**row), text)

    def find(self, owner: str | None = None) -> list[Token]:
        """Return tokens by owner and name; of one owner, or all."""
        c = tables.tokens.c
        query = select(c.name, c.owner, c.created, c.expires).order_by(c.owner, c.name)
        if owner is not None:
            query = query.where(c.owner == owner)
        with self._database.reads() as connection:
            return [Token(**row) for row in connection.execute(query).mappings()]

    def remove(self, name: str, owner: str) -> None:
        """End a token.

        Raises:
            NotFoundError: If `owner` has none of this name.
        """
        c = tables.tokens.c
        with self._database.writes() as connection:
            removed = connection.execute(delete(tables.tokens).where(and_(c.owner == owner, c.name == name))).rowcount
        if not removed:
            raise NotFoundError(f"{owner} has no token {name!r}. `phalanx token list` shows those there are.")

    def actor_of(self, text: str) -> Actor:
        """Return who a token stands for.

        Raises:
            AccessError: If it is unknown or has expired; both say the same.
        """
        identity = [*text.split("_", 2), ""][1]
        c = tables.tokens.c
        with self._database.reads() as connection:
            row = connection.execute(select(tables.tokens).where(c.id == identity)).mappings().one_or_none()
        digest = "" if row is None else row["digest"]
        is_valid = hmac.compare_digest(digest, _digest(text))
        if row is None or not is_valid or (row["expires"] is not None and row["expires"] <= self._database.now()):
            raise AccessError(
                "The token is unknown or has expired. Make one where the store is: phalanx token add NAME."
            )
        return Actor(row["owner"], owner=bool(row["owns_store"]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
