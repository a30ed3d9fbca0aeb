"""`SecretRecords`: encrypted secrets of workspaces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, delete, insert, select

from phalanx.errors import ConfigError, NotFoundError
from phalanx.jobs.models import Job
from phalanx.jobs.protocol import SecretName
from phalanx.jobs.spec.training_job import secrets_of
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database
from phalanx.jobs.store.workspaces import select_workspace

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

_NEW_KEY = "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"


class SecretRecords:
    """The secrets in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, workspace: str, name: str, value: str) -> SecretName:
        """Store a value, encrypted, in place of one that was there."""
        row: dict[str, Any] = {"workspace": workspace, "name": name, "created": self._database.now()}
        encrypted = self._cipher.encrypt(value.encode()).decode()
        with self._database.writes() as connection:
            select_workspace(connection, workspace, lock=True)
            connection.execute(delete(tables.secrets).where(_is_secret(workspace, name)))
            connection.execute(insert(tables.secrets).values(encrypted=encrypted, **row))
        return SecretName(**row)

    def names(self, workspace: str) -> list[SecretName]:
        """Return the names of a workspace's secrets."""
        c = tables.secrets.c
        query = select(c.workspace, c.name, c.created).where(c.workspace == workspace).order_by(c.name)
        with self._database.reads() as connection:
            return [SecretName(**row) for row in connection.execute(query).mappings()]

    def value(self, workspace: str, name: str) -> str:
        """Return the value of a secret.

        Raises:
            NotFoundError: If there is none.
            ConfigError: If it was encrypted with another key.
        """
        with self._database.reads() as connection:
            query = select(tables.secrets.c.encrypted).where(_is_secret(workspace, name))
            encrypted = connection.execute(query).scalar_one_or_none()
        if encrypted is None:
            raise _no_secret(workspace, name)
        if (value := self._decrypted(encrypted)) is None:
            raise ConfigError(
                f"The secret {name!r} of workspace {workspace!r} was encrypted with another key than the one in "
                f"{self._key_source}. Bring that key back, or put the secret again: phalanx secret add {name}."
            )
        return value

    def values(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return secrets in the clear, by name; errors as of `value`."""
        return {name: self.value(workspace, name) for name in names}

    def select_used(self, connection: Connection, workspace: str, spec: Mapping[str, Any]) -> list[str]:
        """Return the values of the secrets that a job uses, as far as they are still there."""
        c = tables.secrets.c
        names = secrets_of(spec)
        if not names:
            return []
        query = select(c.encrypted).where(c.workspace == workspace, c.name.in_(names))
        values = [self._decrypted(encrypted) for encrypted in connection.execute(query).scalars()]
        return [value for value in values if value is not None]  # what another key encrypted, no rank was given

    def used_by(self, job: Job) -> list[str]:
        """Return the values that nothing of a job may show: of the secrets that it uses and that are still there."""
        with self._database.reads() as connection:
            return self.select_used(connection, job.workspace, job.spec)

    def remove(self, workspace: str, name: str) -> None:
        """Remove a secret.

        Raises:
            NotFoundError: If there is none.
        """
        with self._database.writes() as connection:
            removed = connection.execute(delete(tables.secrets).where(_is_secret(workspace, name))).rowcount
        if not removed:
            raise _no_secret(workspace, name)

    def _decrypted(self, encrypted: str) -> str | None:
        """Return a value in the clear; None if another key encrypted it."""
        from cryptography.fernet import InvalidToken

        try:
            return self._cipher.decrypt(encrypted.encode()).decode()
        except InvalidToken:
            return None

    @property
    def _key_source(self) -> str:
        return "PHALANX_SECRET_KEY" if os.environ.get("PHALANX_SECRET_KEY") else str(self._database.home / "key")

    @cached_property
    def _cipher(self) -> Fernet:
        from cryptography.fernet import Fernet  # most commands meet no secret

        key = os.environ.get("PHALANX_SECRET_KEY") or _read_or_create_key(self._database.home / "key")
        try:
            return Fernet(key)
        except ValueError:
            raise ConfigError(
                f"{self._key_source} holds no key: it takes 32 bytes in URL-safe base64. Make one with: {_NEW_KEY}"
            ) from None


def _is_secret(workspace: str, name: str) -> Any:
    return and_(tables.secrets.c.workspace == workspace, tables.secrets.c.name == name)


def _no_secret(workspace: str, name: str) -> NotFoundError:
    return NotFoundError(
        f"Workspace {workspace!r} has no secret {name!r}. Put it there: phalanx secret add {name} -w {workspace}."
    )


def _read_or_create_key(path: Path) -> str:
    if not path.exists():
        from cryptography.fernet import Fernet

        beside = path.with_name(f"key.{os.getpid()}.new")
        beside.touch(mode=0o600)
        beside.write_bytes(Fernet.generate_key())
        # A link is made or it is not: of several that start at once, one wins and all read its key.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(beside)
        beside.unlink()
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}, the key of the secrets, can be read by others. Run: chmod 600 {path}")
    return path.read_text()
