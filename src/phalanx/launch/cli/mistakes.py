"""`describe_mistake`: what is wrong with a command line, and what to write; `flags_of`; `refuse_old_flags`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from phalanx.errors import did_you_mean, nearest
from phalanx.i18n import tr

_RENAMED = {
    "--cluster_node_ips": "--ips",
    "--selected_gpus": "--gpus",
    "--np": "--nproc-per-node",
}
_REMOVED = {
    "--node_ip": "the launcher finds this host in --ips by itself; --node-rank decides where that is open",
    "--use_paddlecloud": "cluster environments are recognised by themselves",
    "--started_port": "ports are chosen by the system; --http-port fixes the meeting port",
    "--log_level": "set the level in your script; --log-format chooses the form",
    "--print_config": "--verbose prints the configuration",
}
_ELSEWHERE = {
    "--num_processes": "-n",
    "--num_gpus": "-n",
    "--num_machines": "--nnodes",
    "--num_nodes": "--nnodes",
    "--machine_rank": "--node-rank",
    "--main_process_ip": "--master-addr",
    "--rdzv_endpoint": "--master-addr and --http-port",
}
"""Flags of accelerate, deepspeed and torchrun."""


def describe_mistake(error: click.UsageError) -> str:
    """Return what is wrong with a command line and what to write instead, as one line."""
    path = "phalanx" if error.ctx is None else error.ctx.command_path
    flag = _unknown_flag(error)
    if flag is not None:
        match = nearest(flag, flags_of(error.ctx))
        near = "" if match is None else tr(" Did you mean '{flag}'?", flag=match)
        return tr(
            "No such option '{flag}'.{nearest} `{program} --help` lists all.", flag=flag, nearest=near, program=path
        )
    message = " ".join(error.format_message().split())
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        return message + _nearest_choice(error)
    ended = message if message.endswith((".", "?")) else f"{message}."
    return tr("{mistake} `{program} --help` shows how.", mistake=ended, program=path)


def _unknown_flag(error: click.UsageError) -> str | None:
    """Return the flag that the command does not have; a command with a script takes it for the name of its file."""
    if isinstance(error, click.NoSuchOption):
        return error.option_name
    file = re.match(r"File '(--[^']*)' does not exist", error.message)
    return None if file is None else file[1].partition("=")[0]


def flags_of(context: click.Context | None) -> list[str]:
    """Return the flags that the help of a command lists, as it spells them."""
    parameters = [] if context is None else context.command.get_params(context)
    options = [option for option in parameters if isinstance(option, click.Option) and not option.hidden]
    return [flag for option in options for flag in (*option.opts, *option.secondary_opts)]


def _nearest_choice(error: click.BadParameter) -> str:
    """Return a hint at the nearest of the values that the parameter lists; empty where it lists none like it."""
    kind = None if error.param is None else error.param.type
    value = re.match(r"'(.*?)' is not one of ", error.message)
    if not isinstance(kind, click.Choice) or value is None:
        return ""
    return did_you_mean(value[1], map(str, kind.choices))


def _refuse_old(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is None:
        return
    flag = param.opts[0]
    if flag in _REMOVED:
        raise click.UsageError(f"{flag} was removed: {_REMOVED[flag]}. Leave it out.", ctx)
    name, verb = (_RENAMED[flag], "now called") if flag in _RENAMED else (_ELSEWHERE[flag], "not known; here it is")
    raise click.UsageError(f"{flag} is {verb} {name}. Write {name} instead.", ctx)


def refuse_old_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Have a command answer to flags of other launchers with its own name for them."""
    for flag in (*_RENAMED, *_REMOVED, *_ELSEWHERE):
        # A value is optional, so that `--print_config` alone and `--node_ip X` both get the answer.
        option = click.option(
            flag,
            hidden=True,
            callback=_refuse_old,
            expose_value=False,
            is_flag=False,
            flag_value="",
            default=None,
            is_eager=True,
        )
        command = option(command)
    return command
