"""The commands `phalanx code`, `phalanx dataset` and `phalanx secret`: named configurations of a workspace."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from phalanx.cli.job_spec import parse_code
from phalanx.cli.output import (
    CommandGroup,
    jobs_in,
    json_flag,
    moment,
    show_change,
    show_named,
    show_removed,
    words,
    workspace_flag,
)
from phalanx.errors import SpecError
from phalanx.i18n import tr
from phalanx.jobs.models import NamedConfig
from phalanx.jobs.protocol import SecretName
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.file import validate
from phalanx.launch.cli.flag_types import EITHER_SPELLING


@click.group(
    cls=CommandGroup,
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n  phalanx code add trainer https://git.example.com/ml/trainer.git --ref main",
)
def code() -> None:
    """Register code sources under a name: `code: {name: NAME}` in a job."""


@code.command(
    "add",
    epilog="\b\nExample:\n"
    "  phalanx code add trainer https://git.example.com/ml/trainer.git --ref main\n"
    "  phalanx code add here .",
)
@click.argument("name")
@click.argument("source")
@click.option("--ref", help="Branch, tag or commit of a repository.")
@click.option("--subdir", help="Working directory inside the repository.")
@click.option("--secret", help="Secret with the token for the repository.")
@workspace_flag
@json_flag
def add_code(name: str, source: str, workspace: str | None, as_json: bool, **fields: str | None) -> None:
    """Register a repository (git+https://...) or a folder; replaces an existing entry."""
    options = {field: value for field, value in fields.items() if value is not None}
    with jobs_in(workspace) as (service, workspace):
        entry = service.put_code(workspace, name, validate(Code, parse_code(source) | options))
    _show_entry(tr("code"), name, entry, as_json)


@code.command("list", epilog="\b\nExample:\n  phalanx code list -w vision")
@workspace_flag
@json_flag
def list_codes(workspace: str | None, as_json: bool) -> None:
    """List the code sources of a workspace."""
    with jobs_in(workspace) as (service, workspace):
        configs = service.codes(workspace)
    rows = [
        [config.name, config.config["git"] or config.config["path"], config.config["ref"], config.config["subdir"]]
        for config in configs
    ]
    show_named([words()("name"), words()("uri"), "ref", "subdir"], rows, configs, as_json)


@code.command("rm", epilog="\b\nExample:\n  phalanx code rm trainer")
@click.argument("name")
@workspace_flag
@json_flag
def remove_code(name: str, workspace: str | None, as_json: bool) -> None:
    """Remove a code source."""
    with jobs_in(workspace) as (service, workspace):
        service.remove_code(workspace, name)
    show_removed(tr("code"), name, as_json, workspace=workspace)


@click.group(
    cls=CommandGroup,
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n  phalanx dataset add digits /data/digits --mount /data/digits",
)
def dataset() -> None:
    """Register datasets under a name: `datasets: [NAME]` in a job."""


@dataset.command(
    "add",
    epilog="\b\nExample:\n"
    "  phalanx dataset add digits /data/digits --mount /data/digits\n"
    "  phalanx dataset add clicks s3://bucket/clicks --mount clicks",
)
@click.argument("name")
@click.argument("uri")
@click.option("--kind", type=click.Choice(["local", "nas", "s3", "oss", "http"]), help="Default: from the URI.")
@click.option("--mount", help="Mount path: relative to the working directory, or absolute.")
@click.option("--file-system", help="nas: id of the file system.")
@click.option("--endpoint", help="s3, oss: address of the service.")
@click.option("--sha256", help="http: expected SHA-256.")
@click.option("--secret", help="s3, oss: secret with ACCESS_KEY_ID:ACCESS_KEY_SECRET.")
@click.option("--writable", is_flag=True, help="Allow jobs to write to it.")
@workspace_flag
@json_flag
def add_dataset(
    name: str, uri: str, workspace: str | None, writable: bool, as_json: bool, **fields: str | None
) -> None:
    """Register a path or an s3://, oss:// or https:// address; replaces an existing entry."""
    config = {"name": name, "uri": uri if "://" in uri else str(Path(uri).absolute()), "readonly": not writable}
    overrides = {field: value for field, value in fields.items() if value is not None}
    with jobs_in(workspace) as (service, workspace):
        entry = service.put_dataset(workspace, validate(Dataset, config | overrides))
    _show_entry(tr("dataset"), name, entry, as_json)


@dataset.command("list", epilog="\b\nExample:\n  phalanx dataset list --json")
@workspace_flag
@json_flag
def list_datasets(workspace: str | None, as_json: bool) -> None:
    """List the datasets of a workspace."""
    with jobs_in(workspace) as (service, workspace):
        configs = service.datasets(workspace)
    rows = [[config.name, config.config["kind"], config.config["uri"], _mount(config)] for config in configs]
    show_named([words()("name"), words()("kind"), words()("uri"), "mount"], rows, configs, as_json)


@dataset.command("rm", epilog="\b\nExample:\n  phalanx dataset rm digits")
@click.argument("name")
@workspace_flag
@json_flag
def remove_dataset(name: str, workspace: str | None, as_json: bool) -> None:
    """Remove a dataset."""
    with jobs_in(workspace) as (service, workspace):
        service.remove_dataset(workspace, name)
    show_removed(tr("dataset"), name, as_json, workspace=workspace)


@click.group(
    cls=CommandGroup,
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n  phalanx secret add HUB_TOKEN --from-env HUB_TOKEN",
)
def secret() -> None:
    """Manage secrets, passed to jobs as environment variables; their values are never shown."""


@secret.command("add", epilog="\b\nExample:\n  phalanx secret add HUB_TOKEN --from-env HUB_TOKEN")
@click.argument("name")
@click.option("--from-env", metavar="VARIABLE", help="Read the value from this environment variable.")
@workspace_flag
@json_flag
def add_secret(name: str, from_env: str | None, workspace: str | None, as_json: bool) -> None:
    """Store a secret.

    The value is read from a prompt or standard input, never from the command line, which other users can see.
    """
    value = _value(name, from_env)
    with jobs_in(workspace) as (service, workspace):
        entry = service.put_secret(workspace, name, value)
    _show_entry(tr("secret"), name, entry, as_json)


@secret.command("list", epilog="\b\nExample:\n  phalanx secret list -w vision")
@workspace_flag
@json_flag
def list_secrets(workspace: str | None, as_json: bool) -> None:
    """List the names of the secrets of a workspace."""
    with jobs_in(workspace) as (service, workspace):
        secrets = service.secrets(workspace)
    show_named(
        [words()("name"), words()("created")],
        [[item.name, moment(item.created)] for item in secrets],
        secrets,
        as_json,
    )


@secret.command("rm", epilog="\b\nExample:\n  phalanx secret rm HUB_TOKEN")
@click.argument("name")
@workspace_flag
@json_flag
def remove_secret(name: str, workspace: str | None, as_json: bool) -> None:
    """Remove a secret."""
    with jobs_in(workspace) as (service, workspace):
        service.remove_secret(workspace, name)
    show_removed(tr("secret"), name, as_json, workspace=workspace)


def _show_entry(what: str, name: str, entry: NamedConfig | SecretName, as_json: bool) -> None:
    message = tr("{what} {name} is kept in workspace {workspace}.", what=what, name=name, workspace=entry.workspace)
    show_change(message, entry, as_json)


def _mount(config: NamedConfig) -> str:
    return config.config["mount"] or ""


def _value(name: str, variable: str | None) -> str:
    if variable is not None:
        if variable not in os.environ:
            raise SpecError(f"--from-env {variable}: there is no such environment variable. Set it first.")
        return os.environ[variable]
    if sys.stdin.isatty():
        return str(click.prompt(tr("Value of {name}", name=name), hide_input=True, err=True))
    return sys.stdin.read().removesuffix("\n")
