"""The commands `phalanx workspace` and `phalanx token`: workspaces, members, API tokens."""

from __future__ import annotations

import click

from phalanx.cli.output import (
    CommandGroup,
    jobs,
    jobs_in,
    json_flag,
    moment,
    show_change,
    show_json,
    show_named,
    show_removed,
    talk,
    words,
    workspace_flag,
)
from phalanx.i18n import tr
from phalanx.jobs.models import MemberRole
from phalanx.jobs.spec.quantities import to_seconds
from phalanx.launch.cli.flag_types import EITHER_SPELLING


@click.group(cls=CommandGroup, context_settings=EITHER_SPELLING, epilog="\b\nExample:\n  phalanx workspace add vision")
def workspace() -> None:
    """Manage workspaces: jobs, code sources, datasets and secrets that only their members see."""


@workspace.command("add", epilog="\b\nExample:\n  phalanx workspace add vision")
@click.argument("name")
@json_flag
def add_workspace(name: str, as_json: bool) -> None:
    """Create a workspace."""
    with jobs() as service:
        space = service.add_workspace(name)
    show_change(tr("workspace {name} is made.", name=name), space, as_json)


@workspace.command("list", epilog="\b\nExample:\n  phalanx workspace list")
@json_flag
def list_workspaces(as_json: bool) -> None:
    """List workspaces with their members."""
    with jobs() as service:
        workspaces = service.workspaces()
    rows = [[space.name, ", ".join(f"{name} ({role})" for name, role in space.members.items())] for space in workspaces]
    show_named([words()("workspace"), tr("member")], rows, workspaces, as_json)


@workspace.command("rm", epilog="\b\nExample:\n  phalanx workspace rm vision --yes")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_flag
def remove_workspace(name: str, yes: bool, as_json: bool) -> None:
    """Remove a workspace and everything in it; its jobs must have ended."""
    if not yes:
        click.confirm(
            tr(
                "Remove workspace {name} with its configurations, secrets, and the records and logs of its jobs?",
                name=name,
            ),
            abort=True,
            err=True,
        )
    with jobs() as service:
        service.remove_workspace(name)
    show_removed(tr("workspace"), name, as_json)


@workspace.group(cls=CommandGroup, epilog="\b\nExample:\n  phalanx workspace member add ann developer -w vision")
def member() -> None:
    """Manage members: viewers read, developers submit jobs, admins manage."""


@member.command("add", epilog="\b\nExample:\n  phalanx workspace member add ann developer -w vision")
@click.argument("name")
@click.argument("role", type=click.Choice([role.value for role in MemberRole]))
@workspace_flag
@json_flag
def add_member(name: str, role: str, workspace: str | None, as_json: bool) -> None:
    """Add a member, or change the role of one."""
    with jobs_in(workspace) as (service, workspace):
        service.put_member(workspace, name, MemberRole(role))
    message = tr(
        "{name} is {role} in workspace {workspace}. A token of theirs: phalanx token add NAME --owner {name}",
        name=name,
        role=role,
        workspace=workspace,
    )
    show_change(message, {"workspace": workspace, "name": name, "role": role}, as_json)


@member.command("rm", epilog="\b\nExample:\n  phalanx workspace member rm ann -w vision")
@click.argument("name")
@workspace_flag
@json_flag
def remove_member(name: str, workspace: str | None, as_json: bool) -> None:
    """Remove a member."""
    with jobs_in(workspace) as (service, workspace):
        service.remove_member(workspace, name)
    show_removed(tr("member"), name, as_json, workspace=workspace)


@click.group(
    cls=CommandGroup, context_settings=EITHER_SPELLING, epilog="\b\nExample:\n  phalanx token add laptop --lasts 30d"
)
def token() -> None:
    """Manage API tokens of `phalanx serve`."""


@token.command("add", epilog="\b\nExample:\n  phalanx token add laptop --lasts 30d")
@click.argument("name")
@click.option("--owner", help="Owner of the token; only the owner of the store may set it. Default: you.")
@click.option("--lasts", help="Lifetime, e.g. 12h or 30d. Default: no expiry.")
@json_flag
def add_token(name: str, owner: str | None, lasts: str | None, as_json: bool) -> None:
    """Create a token. It is shown only once."""
    try:
        lasts_s = None if lasts is None else to_seconds(lasts)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--lasts") from None
    with jobs() as service:
        new_token = service.add_token(name, owner=owner, lasts_s=lasts_s)
    if as_json:
        show_json(new_token)
    else:
        click.echo(new_token.text)
        talk(
            tr(
                "Keep this token of {owner}; it is not shown again. Whoever has it may do what {owner} may. Commands "
                "find it in PHALANX_TOKEN.",
                owner=new_token.token.owner,
            )
        )


@token.command("list", epilog="\b\nExample:\n  phalanx token list")
@json_flag
def list_tokens(as_json: bool) -> None:
    """List tokens, without their text."""
    with jobs() as service:
        tokens = service.tokens()
    rows = [[item.name, item.owner, moment(item.created), moment(item.expires) or tr("never")] for item in tokens]
    headings = [words()("name"), words()("owner"), words()("created"), tr("expires")]
    show_named(headings, rows, tokens, as_json)


@token.command("rm", epilog="\b\nExample:\n  phalanx token rm laptop")
@click.argument("name")
@click.option("--owner", help="Owner of the token. Default: you.")
@json_flag
def remove_token(name: str, owner: str | None, as_json: bool) -> None:
    """Revoke a token."""
    with jobs() as service:
        service.remove_token(name, owner=owner)
    show_removed(tr("token"), name, as_json)
