"""Build a job spec from command-line arguments: file, `--set`, flags, command (submit, run, render)."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phalanx.cli.output import workspace_of
from phalanx.errors import SpecError
from phalanx.i18n import tr
from phalanx.jobs.backend_registry import BACKENDS
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.spec.code_and_data import Code
from phalanx.jobs.spec.file import read, validate
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.cli.flag_types import complete_path

_FILES = (".yaml", ".yml", ".json")

_FIELDS: dict[str, tuple[str, Any, str]] = {
    # flag: (field, type, help)
    "name": ("name", str, "Name of the job."),
    "workspace": ("workspace", str, "Workspace of the job. Default: default, or your only one."),
    "backend": ("backend", click.Choice(list(BACKENDS)), "Backend that runs the job. Default: local."),
    "launch": (
        "launch",
        click.Choice(["phalanx", "torchrun", "env"]),
        "Launcher of the ranks. Default: phalanx.",
    ),
    "nodes": ("resources.nodes", str, "Number of nodes, or a range as 1:4. Default: 1."),
    "procs-per-node": ("resources.procs_per_node", str, "Ranks per node, or a range as 1:4. Default: 1."),
    "cpu": ("resources.cpu", float, "CPU cores per node."),
    "memory": ("resources.memory", str, "Memory per node, e.g. 8Gi."),
    "gpu": ("resources.gpu", int, "GPUs per node."),
    "queue": ("queue", str, "Queue name."),
    "priority": ("priority", int, "1 to 9; higher starts earlier. Default: 5."),
    "max-runtime": ("max_runtime", str, "Time limit, e.g. 2h."),
    "retries": ("retries.max", int, "Maximum number of retries. Default: 0."),
    "image": ("kubernetes.image", str, "Kubernetes: container image."),
    "partition": ("slurm.partition", str, "Slurm: partition."),
}

_SHORT = {"workspace": ["-w"], "procs-per-node": ["-n"]}

_LISTS = {
    "dataset": "Registered dataset, NAME or NAME:MOUNT (repeatable).",
    "env": "Environment variable NAME=VALUE (repeatable).",
    "secret": "Secret to pass as an environment variable (repeatable).",
}


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the arguments and flags that `read_spec` reads."""
    for flag, text in reversed(_LISTS.items()):
        command = click.option(f"--{flag}", flag, multiple=True, help=text)(command)
    for flag, (_, kind, text) in reversed(_FIELDS.items()):
        spellings = [*_SHORT.get(flag, ()), f"--{flag}"]
        command = click.option(*spellings, flag.replace("-", "_"), type=kind, help=text)(command)
    command = click.option(
        "--code", help="Folder, repository (git+https://...@REF), or name of a registered code source."
    )(command)
    command = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Override any field, e.g. resources.nodes=2 (repeatable).",
    )(command)
    return click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar="[FILE] [-- COMMAND...]", shell_complete=complete_path
    )(command)


def read_spec(options: dict[str, Any]) -> tuple[TrainingJob, Path]:
    """Return the job of a command's arguments and flags, and the folder that its relative paths start from.

    Paths in a file start from the file's folder, paths in flags from the current one.

    Raises:
        SpecError: If it is no job.
    """
    words = list(options["words"])
    file = Path(words.pop(0)) if words and (words[0].endswith(_FILES) or words[0] == "-") else None
    if file is None and not words and not options["settings"]:
        raise SpecError(
            tr(
                "There is no job to submit. Give a file, `phalanx job submit job.yaml`, or a command: `phalanx job "
                "submit --name mnist -- python train.py`."
            )
        )
    flags = {field: options[flag.replace("-", "_")] for flag, (field, _, _) in _FIELDS.items()}
    flags |= {f"env.{name}": value for name, value in map(_pair, options["env"])}
    flags["datasets"] = list(options["dataset"]) or None
    flags["secrets"] = list(options["secret"]) or None
    flags["command"] = shlex.join(words) if words else None
    standard_input = file == Path("-")
    # Before the settings, which may add to it: --code git+https://... --set code.subdir=src
    code = [] if options["code"] is None else [f"code={json.dumps(parse_code(options['code']))}"]
    spec = read(sys.stdin.read() if standard_input else file, settings=[*code, *options["settings"]], flags=flags)
    return spec, Path.cwd() if file is None or standard_input else file.absolute().parent


def in_workspace(jobs: Jobs, spec: TrainingJob) -> TrainingJob:
    """Return `spec` with its workspace; if it names none, the one that `workspace_of` returns."""
    if "workspace" in spec.model_fields_set:
        return spec
    return spec.model_copy(update={"workspace": workspace_of(jobs, None)})


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"--env {text!r} has no value. Write NAME=VALUE.")
    return name, value


def parse_code(text: str) -> dict[str, Any]:
    """Return the fields of the code that a flag names: a folder, a repository, or a configuration.

    Raises:
        SpecError: If it is none of them.
    """
    if "://" not in text and Path(text).is_dir():
        # A folder in a flag starts from the current one, even if the rest comes from a file.
        return {"path": str(Path(text).absolute())}
    if re.fullmatch(r"[a-z0-9-]+", text):
        return {"name": text}
    return validate(Code, text).model_dump(exclude_unset=True)
