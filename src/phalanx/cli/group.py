"""The `phalanx` click group: its subcommands, imported when used."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from phalanx import __version__
from phalanx.errors import PhalanxError, nearest
from phalanx.launch.cli.flag_types import EITHER_SPELLING
from phalanx.launch.cli.mistakes import describe_mistake

_COMMANDS = {
    "run": (
        "phalanx.launch.cli.flags",
        "command",
        "Launch a training script on this node (one process per GPU by default).",
    ),
    "ps": ("phalanx.launch.job.registry", "command", "List the running jobs with their ranks, pids, step and loss."),
    "scale": (
        "phalanx.launch.cli.scale_command",
        "command",
        "Change how many ranks a running elastic job has.",
    ),
    "restart-servers": (
        "phalanx.launch.cli.restart_servers_command",
        "command",
        "Restart the parameter servers of a running job, one after the other.",
    ),
    "scale-servers": (
        "phalanx.launch.cli.scale_servers_command",
        "command",
        "Change how many parameter servers a running job has.",
    ),
    "why": (
        "phalanx.launch.cli.why_command",
        "command",
        "Say why a running job is stalled: which rank, where, and who waits for it.",
    ),
    "rank-table": ("phalanx.launch.cli.rank_table_commands", "command", "Make, check or convert a rank table."),
    "predict": (
        "phalanx.auto.commands",
        "command",
        "Predict step time and memory of a training run from a JSON description.",
    ),
    "plan": (
        "phalanx.cli.plan",
        "command",
        "Find the fastest way to train a script or a described model on a cluster.",
    ),
    "calibrate": (
        "phalanx.diagnose.calibrate.command",
        "command",
        "Benchmark this machine; predict and plan use the result.",
    ),
    "job": ("phalanx.cli.jobs", "job", "Submit and manage training jobs."),
    "workspace": ("phalanx.cli.workspaces", "workspace", "Manage workspaces and their members."),
    "code": ("phalanx.cli.configurations", "code", "Register code sources (git repository or folder) under a name."),
    "dataset": ("phalanx.cli.configurations", "dataset", "Register datasets under a name."),
    "secret": ("phalanx.cli.configurations", "secret", "Manage secrets, passed to jobs as environment variables."),
    "token": ("phalanx.cli.workspaces", "token", "Manage API tokens."),
    "serve": ("phalanx.cli.serve", "serve", "Run the job server (HTTP API and web console)."),
    "ui": ("phalanx.cli.serve", "ui", "Open the web console in a browser."),
    "serve-table": ("phalanx.cli.serve_table", "command", "Answer rows of embedding tables over HTTP."),
    "env": ("phalanx.diagnose.commands", "env", "Show the environment variables that Phalanx reads or writes."),
    "verify": (
        "phalanx.diagnose.verify.commands",
        "command",
        "Compare a script on 1 and N ranks step by step; name the first difference and its cause.",
    ),
    "replay": (
        "phalanx.diagnose.replay.commands",
        "command",
        "Do a step of a run again from its flight log; say whether its gradients have the same bits.",
    ),
    "doctor": ("phalanx.diagnose.doctor.command", "doctor", "Check this machine for what training needs."),
    "completion": ("phalanx.cli.completion", "completion", "Print what has a shell complete commands and flags."),
}

_SECTIONS = {
    "Train": ("run", "ps", "scale", "restart-servers", "scale-servers", "why", "verify", "replay"),
    "Plan": ("plan", "predict", "calibrate"),
    "Jobs": ("job", "workspace", "code", "dataset", "secret", "token", "serve", "ui"),
    "More": ("doctor", "env", "rank-table", "serve-table", "completion"),
}
"""The commands as the help lists them."""

_SUGGESTIONS = {
    "launch": "run",
    "train": "run",
    "submit": "job submit",
    "logs": "job logs",
    "stop": "job stop",
    "list": "job list",
    "status": "job list",
    "top": "ps",
    "start": "run",
    "cancel": "job stop",
    "kill": "job stop",
    "version": "--version",
    "help": "--help",
}
"""What other programs call a command."""


class _LazyGroup(click.Group):
    """Knows its commands by name only, so that the list costs no imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named first in `args`, or fail with the nearest name."""
        if args[0] not in _COMMANDS:
            near = nearest(args[0], [*_COMMANDS, *_SUGGESTIONS])
            hint = "" if near is None else f" Did you mean 'phalanx {_SUGGESTIONS.get(near, near)}'?"
            ctx.fail(f"There is no command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        for heading, names in _SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _COMMANDS[name][2]) for name in names])


@click.group(
    cls=_LazyGroup,
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n"
    "  phalanx run -n 2 train.py\n"
    "  phalanx plan train.py --cluster h100x8,nodes=4\n"
    "  phalanx job submit job.yaml",
)
@click.version_option(__version__, prog_name="phalanx")
def phalanx() -> None:
    """Train a PyTorch script in parallel, from a laptop to a cluster."""


def main() -> None:
    """Run the command named on the command line and leave the process."""
    try:
        phalanx(prog_name="phalanx", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        _fail("phalanx" if error.ctx is None else error.ctx.command_path, describe_mistake(error), error.exit_code)
    except click.ClickException as error:
        _fail("phalanx", error.format_message(), error.exit_code)
    except click.Abort:
        _fail("phalanx", "aborted", 1)
    except PhalanxError as error:
        _fail("phalanx", str(error), 1)


def _fail(name: str, message: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"{name}: {message}\n")
    sys.exit(exit_code)
