"""Workspaces, their members and configurations, as rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, RowMapping, and_, delete, insert, select
from sqlalchemy.exc import IntegrityError

from phalanx.errors import NotFoundError, StateError, did_you_mean
from phalanx.i18n import tr
from phalanx.jobs.models import MemberRole, NamedConfig, Workspace
from phalanx.jobs.states import JobState
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database


class WorkspaceRows(Database):
    """The part of the store that holds workspaces and what is named in them."""

    def create_workspace(self, workspace: str) -> Workspace:
        """Make a workspace.

        Raises:
            StateError: If there is one of that name.
        """
        try:
            with self._writes() as connection:
                connection.execute(insert(tables.workspaces).values(name=workspace, created=self._clock()))
        except IntegrityError:
            raise StateError(f"There is a workspace {workspace!r} already. Choose another name.") from None
        return self.workspace(workspace)

    def workspaces(self, member: str | None = None) -> list[Workspace]:
        """Return workspaces with their members, by name; those that `member` is in, or all."""
        c = tables.workspaces.c
        query = select(tables.workspaces).order_by(c.name)
        if member is not None:
            of_member = select(tables.members.c.workspace).where(tables.members.c.name == member)
            query = query.where(c.name.in_(of_member))
        with self._reads() as connection:
            spaces = {row["name"]: Workspace(**row) for row in connection.execute(query).mappings()}
            for row in connection.execute(select(tables.members)).mappings():
                if row["workspace"] in spaces:
                    spaces[row["workspace"]].members[row["name"]] = MemberRole(row["role"])
        return list(spaces.values())

    def workspace(self, workspace: str) -> Workspace:
        """Return one workspace with its members.

        Raises:
            NotFoundError: If there is none.
        """
        with self._reads() as connection:
            record = self._need_workspace(connection, workspace)
            query = select(tables.members).where(tables.members.c.workspace == workspace)
            members = {row["name"]: MemberRole(row["role"]) for row in connection.execute(query).mappings()}
        return Workspace(record["name"], record["created"], members)

    def remove_workspace(self, workspace: str) -> list[str]:
        """Remove a workspace and everything in it; return the ids of the jobs that were.

        Raises:
            StateError: If a job in it has not ended.
        """
        c = tables.jobs.c
        with self._writes() as connection:
            self._need_workspace(connection, workspace, lock=True)
            jobs = connection.execute(select(c.id, c.state).where(c.workspace == workspace)).all()
            if live := [job.id for job in jobs if not JobState(job.state).is_terminal]:
                raise StateError(
                    f"Workspace {workspace!r} has {len(live)} jobs that have not ended, such as {live[0]}. "
                    "Stop them first: phalanx job stop."
                )
            connection.execute(delete(tables.workspaces).where(tables.workspaces.c.name == workspace))
        return [job.id for job in jobs]

    def put_member(self, workspace: str, name: str, role: MemberRole) -> None:
        """Make someone a member, or give a member another role."""
        c = tables.members.c
        with self._writes() as connection:
            self._need_workspace(connection, workspace, lock=True)
            connection.execute(delete(tables.members).where(c.workspace == workspace, c.name == name))
            connection.execute(insert(tables.members).values(workspace=workspace, name=name, role=role))

    def remove_member(self, workspace: str, name: str) -> None:
        """End a membership.

        Raises:
            NotFoundError: If there is none.
        """
        c = tables.members.c
        with self._writes() as connection:
            gone = connection.execute(delete(tables.members).where(c.workspace == workspace, c.name == name))
        if not gone.rowcount:
            raise NotFoundError(f"{name!r} is no member of workspace {workspace!r}.")

    def put_config(self, workspace: str, kind: str, name: str, config: dict[str, Any]) -> NamedConfig:
        """Keep a configuration under a name, in place of one that was there. `kind` is code or dataset."""
        c = tables.configs.c
        row: dict[str, Any] = {"workspace": workspace, "name": name, "config": config, "created": self._clock()}
        with self._writes() as connection:
            self._need_workspace(connection, workspace, lock=True)
            same = and_(c.workspace == workspace, c.kind == kind, c.name == name)
            connection.execute(delete(tables.configs).where(same))
            connection.execute(insert(tables.configs).values(kind=kind, **row))
        return NamedConfig(**row)

    def configs(self, workspace: str, kind: str) -> list[NamedConfig]:
        """Return the configurations of a kind, by name."""
        c = tables.configs.c
        query = select(c.workspace, c.name, c.config, c.created).where(c.workspace == workspace, c.kind == kind)
        with self._reads() as connection:
            return [NamedConfig(**row) for row in connection.execute(query.order_by(c.name)).mappings()]

    def config(self, workspace: str, kind: str, name: str) -> NamedConfig:
        """Return one configuration.

        Raises:
            NotFoundError: If there is none.
        """
        configs = {config.name: config for config in self.configs(workspace, kind)}
        if name not in configs:
            raise NotFoundError(_none(workspace, kind, name) + did_you_mean(name, configs))
        return configs[name]

    def remove_config(self, workspace: str, kind: str, name: str) -> None:
        """Remove a configuration.

        Raises:
            NotFoundError: If there is none.
        """
        c = tables.configs.c
        same = and_(c.workspace == workspace, c.kind == kind, c.name == name)
        with self._writes() as connection:
            gone = connection.execute(delete(tables.configs).where(same)).rowcount
        if not gone:
            raise NotFoundError(_none(workspace, kind, name))

    def _need_workspace(self, connection: Connection, workspace: str, *, lock: bool = False) -> RowMapping:
        query = select(tables.workspaces).where(tables.workspaces.c.name == workspace)
        row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        if row is None:
            raise no_workspace(workspace)
        return row


def no_workspace(workspace: str) -> NotFoundError:
    """Return the error of a workspace that is not there, or that who asks is no member of."""
    return NotFoundError(
        tr("There is no workspace {name!r}. `phalanx workspace list` shows those there are.", name=workspace)
    )


def _none(workspace: str, kind: str, name: str) -> str:
    return f"Workspace {workspace!r} has no {kind} {name!r}. `phalanx {kind} list` shows those there are."
