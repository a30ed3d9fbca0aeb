"""Secrets of workspaces, encrypted with a key that is not in the database."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, delete, insert, select

from phalanx.errors import ConfigError, NotFoundError
from phalanx.jobs.models import Job
from phalanx.jobs.protocol import SecretName
from phalanx.jobs.spec import secrets_of
from phalanx.jobs.store import tables
from phalanx.jobs.store.workspaces import WorkspaceRows

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

_NEW_KEY = "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"


class SecretRows(WorkspaceRows):
    """The part of the store that holds secrets."""

    def put_secret(self, workspace: str, name: str, value: str) -> SecretName:
        """Keep a value, encrypted, in place of one that was there."""
        row: dict[str, Any] = {"workspace": workspace, "name": name, "created": self._clock()}
        encrypted = self._box.encrypt(value.encode()).decode()
        with self._writes() as connection:
            self._need_workspace(connection, workspace, lock=True)
            connection.execute(delete(tables.secrets).where(_is_secret(workspace, name)))
            connection.execute(insert(tables.secrets).values(encrypted=encrypted, **row))
        return SecretName(**row)

    def secrets(self, workspace: str) -> list[SecretName]:
        """Return the names of a workspace's secrets."""
        c = tables.secrets.c
        query = select(c.workspace, c.name, c.created).where(c.workspace == workspace).order_by(c.name)
        with self._reads() as connection:
            return [SecretName(**row) for row in connection.execute(query).mappings()]

    def secret(self, workspace: str, name: str) -> str:
        """Return the value of a secret.

        Raises:
            NotFoundError: If there is none.
            ConfigError: If it was encrypted with another key.
        """
        with self._reads() as connection:
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

    def secret_values(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return secrets in the clear, by name; errors as of `secret`."""
        return {name: self.secret(workspace, name) for name in names}

    def _secrets_used(self, connection: Connection, workspace: str, spec: Mapping[str, Any]) -> list[str]:
        """Return the values of the secrets that a job uses, as far as they are still there."""
        c = tables.secrets.c
        names = secrets_of(spec)
        if not names:
            return []
        query = select(c.encrypted).where(c.workspace == workspace, c.name.in_(names))
        values = [self._decrypted(encrypted) for encrypted in connection.execute(query).scalars()]
        return [value for value in values if value is not None]  # what another key encrypted, no rank was given

    def secrets_used(self, job: Job) -> list[str]:
        """Return the values that nothing of a job may show: of the secrets that it uses and that are still there."""
        with self._reads() as connection:
            return self._secrets_used(connection, job.workspace, job.spec)

    def remove_secret(self, workspace: str, name: str) -> None:
        """Remove a secret.

        Raises:
            NotFoundError: If there is none.
        """
        with self._writes() as connection:
            gone = connection.execute(delete(tables.secrets).where(_is_secret(workspace, name))).rowcount
        if not gone:
            raise _no_secret(workspace, name)

    def _decrypted(self, encrypted: str) -> str | None:
        """Return a value in the clear; None if another key encrypted it."""
        from cryptography.fernet import InvalidToken

        try:
            return self._box.decrypt(encrypted.encode()).decode()
        except InvalidToken:
            return None

    @property
    def _key_source(self) -> str:
        return "PHALANX_SECRET_KEY" if os.environ.get("PHALANX_SECRET_KEY") else str(self.home / "key")

    @cached_property
    def _box(self) -> Fernet:
        from cryptography.fernet import Fernet  # most commands meet no secret

        key = os.environ.get("PHALANX_SECRET_KEY") or _read_or_create_key(self.home / "key")
        try:
            return Fernet(key)
        except ValueError:
            raise ConfigError(
                f"{self._key_source} holds no key: it takes 32 bytes in URL-safe base64. Make one with: {_NEW_KEY}"
            ) from None


class WorkspaceConfigs:
    """The configurations and secrets of one workspace, as `jobs/service/resolve` asks for them."""

    def __init__(self, store: SecretRows, workspace: str) -> None:
        self._store = store
        self._workspace = workspace

    def code(self, name: str) -> dict[str, Any]:
        """Return a code configuration; NotFoundError if there is none."""
        return self._store.config(self._workspace, "code", name).config

    def dataset(self, name: str) -> dict[str, Any]:
        """Return a dataset configuration; NotFoundError if there is none."""
        return self._store.config(self._workspace, "dataset", name).config

    def secret_names(self) -> Set[str]:
        """Return the names of all secrets."""
        return {secret.name for secret in self._store.secrets(self._workspace)}

    def secret(self, name: str) -> str:
        """Return a secret's value; NotFoundError if there is none."""
        return self._store.secret(self._workspace, name)


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
