"""The command `phalanx completion`: print what has a shell complete commands, flags and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from phalanx.errors import InternalError

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="\b\nExample:\n"
    '  eval "$(phalanx completion bash)"             in ~/.bashrc\n'
    '  eval "$(phalanx completion zsh)"              in ~/.zshrc, after compinit\n'
    "  phalanx completion fish | source              in ~/.config/fish/config.fish\n"
    "  phalanx completion bash > phalanx.sh          into a file"
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that has SHELL complete commands, flags and files of phalanx."""
    from phalanx.cli.group import phalanx

    kind = get_completion_class(shell)
    if kind is None:
        raise InternalError(f"click completes nothing in {shell}, which is one of {SHELLS}")
    click.echo(kind(phalanx, {}, "phalanx", "_PHALANX_COMPLETE").source())
