"""The `phalanx` command; subcommands are imported when used.

In: words on a command line. Out: calls of the packages below, tables and JSON on standard output, an exit code. Start
with `group`, which knows all commands, then the file of a command.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line.

    `run` goes past click, whose import would delay the one thing that takes long: importing torch in the
    fork server.
    """
    if sys.argv[1:2] == ["run"]:
        from phalanx.launch.cli.command import main as run

        run(sys.argv[2:])
    from phalanx.cli.group import main as group

    group()
