"""`WorkspaceRecords`: workspaces and their members."""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping, delete, insert, select
from sqlalchemy.exc import IntegrityError

from phalanx.errors import NotFoundError, StateError
from phalanx.i18n import tr
from phalanx.jobs.models import JobState, MemberRole, Workspace
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database


class WorkspaceRecords:
    """The workspaces in a database. What belongs to one goes with it, in every table, once its jobs have ended."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, workspace: str) -> Workspace:
        """Make a workspace.

        Raises:
            StateError: If there is one of that name.
        """
        try:
            with self._database.writes() as connection:
                connection.execute(insert(tables.workspaces).values(name=workspace, created=self._database.now()))
        except IntegrityError:
            raise StateError(f"There is a workspace {workspace!r} already. Choose another name.") from None
        return self.get(workspace)

    def find(self, member: str | None = None) -> list[Workspace]:
        """Return workspaces with their members, by name; those that `member` is in, or all."""
        c = tables.workspaces.c
        query = select(tables.workspaces).order_by(c.name)
        if member is not None:
            of_member = select(tables.members.c.workspace).where(tables.members.c.name == member)
            query = query.where(c.name.in_(of_member))
        with self._database.reads() as connection:
            by_name = {row["name"]: Workspace(**row) for row in connection.execute(query).mappings()}
            for row in connection.execute(select(tables.members)).mappings():
                if row["workspace"] in by_name:
                    by_name[row["workspace"]].members[row["name"]] = MemberRole(row["role"])
        return list(by_name.values())

    def get(self, workspace: str) -> Workspace:
        """Return one workspace with its members.

        Raises:
            NotFoundError: If there is none.
        """
        with self._database.reads() as connection:
            record = select_workspace(connection, workspace)
            query = select(tables.members).where(tables.members.c.workspace == workspace)
            members = {row["name"]: MemberRole(row["role"]) for row in connection.execute(query).mappings()}
        return Workspace(record["name"], record["created"], members)

    def remove(self, workspace: str) -> list[str]:
        """Remove a workspace and everything in it; return the ids of the jobs that were.

        Raises:
            StateError: If a job in it has not ended.
        """
        c = tables.jobs.c
        with self._database.writes() as connection:
            select_workspace(connection, workspace, lock=True)
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
        with self._database.writes() as connection:
            select_workspace(connection, workspace, lock=True)
            connection.execute(delete(tables.members).where(c.workspace == workspace, c.name == name))
            connection.execute(insert(tables.members).values(workspace=workspace, name=name, role=role))

    def remove_member(self, workspace: str, name: str) -> None:
        """End a membership.

        Raises:
            NotFoundError: If there is none.
        """
        c = tables.members.c
        with self._database.writes() as connection:
            removed = connection.execute(delete(tables.members).where(c.workspace == workspace, c.name == name))
        if not removed.rowcount:
            raise NotFoundError(f"{name!r} is no member of workspace {workspace!r}.")


def select_workspace(connection: Connection, workspace: str, *, lock: bool = False) -> RowMapping:
    """Return the row of a workspace, locked until the transaction ends if `lock`.

    Raises:
        NotFoundError: If there is none.
    """
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
