"""`ConfigRecords`: named code sources and datasets of workspaces."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, delete, insert, select

from phalanx.errors import NotFoundError, did_you_mean
from phalanx.jobs.models import NamedConfig
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database
from phalanx.jobs.store.workspaces import select_workspace

ConfigKind = Literal["code", "dataset"]


class ConfigRecords:
    """The configurations in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, workspace: str, kind: ConfigKind, name: str, config: dict[str, Any]) -> NamedConfig:
        """Store a configuration under a name, in place of one that was there."""
        row: dict[str, Any] = {"workspace": workspace, "name": name, "config": config, "created": self._database.now()}
        with self._database.writes() as connection:
            select_workspace(connection, workspace, lock=True)
            connection.execute(delete(tables.configs).where(_is_config(workspace, kind, name)))
            connection.execute(insert(tables.configs).values(kind=kind, **row))
        return NamedConfig(**row)

    def find(self, workspace: str, kind: ConfigKind) -> list[NamedConfig]:
        """Return the configurations of a kind, by name."""
        c = tables.configs.c
        query = select(c.workspace, c.name, c.config, c.created).where(c.workspace == workspace, c.kind == kind)
        with self._database.reads() as connection:
            return [NamedConfig(**row) for row in connection.execute(query.order_by(c.name)).mappings()]

    def get(self, workspace: str, kind: ConfigKind, name: str) -> NamedConfig:
        """Return one configuration.

        Raises:
            NotFoundError: If there is none.
        """
        configs = {config.name: config for config in self.find(workspace, kind)}
        if name not in configs:
            raise NotFoundError(_no_config(workspace, kind, name) + did_you_mean(name, configs))
        return configs[name]

    def remove(self, workspace: str, kind: ConfigKind, name: str) -> None:
        """Remove a configuration.

        Raises:
            NotFoundError: If there is none.
        """
        with self._database.writes() as connection:
            removed = connection.execute(delete(tables.configs).where(_is_config(workspace, kind, name))).rowcount
        if not removed:
            raise NotFoundError(_no_config(workspace, kind, name))


def _is_config(workspace: str, kind: ConfigKind, name: str) -> ColumnElement[bool]:
    c = tables.configs.c
    return and_(c.workspace == workspace, c.kind == kind, c.name == name)


def _no_config(workspace: str, kind: ConfigKind, name: str) -> str:
    return f"Workspace {workspace!r} has no {kind} {name!r}. `phalanx {kind} list` shows those there are."
