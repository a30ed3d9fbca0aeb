"""Entry points of the launcher: `phalanx run`, `fleetrun`, `python -m phalanx.launch`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None, *, name: str | None = None, wants_servers: bool = False) -> None:
    """Run the launcher and leave the process with its exit code.

    The fork server starts before anything else is imported: its import of torch is the longest part of every start, and
    everything the launcher does meanwhile is free.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` when omitted.
        name: How the program calls itself in messages; `fleetrun` or `phalanx run`, as started, when omitted.
        wants_servers: Whether only a parameter-server job will do (`launch_ps`).
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the job takes its signals into its own hands, Ctrl-C ends this process, and with it the fork server,
        # without a traceback of whatever was being imported.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if name is None:
        name = "fleetrun" if os.path.basename(sys.argv[0]) == "fleetrun" else "phalanx run"
    server = None
    if command_line and command_line[0] not in ("-h", "--help"):
        from phalanx.launch.job.fork_server_handle import ForkServerHandle

        server = ForkServerHandle()
    from phalanx.launch.cli.flags import run

    sys.exit(run(command_line, server, name=name, wants_servers=wants_servers))
