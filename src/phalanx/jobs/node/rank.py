"""`python -m phalanx.jobs.node.rank LOGS COMMAND...`: wrapper of a torchrun rank that writes its log file.

torchrun gives each rank two files under names it makes up; here rank R of every launch kind writes LOGS/workerlog.R.
"""

from __future__ import annotations

import os
import sys

from phalanx.launch.process import linux


def main(arguments: list[str]) -> None:
    """Write to the rank's log, die with the launcher, and become the command."""
    folder, *command = arguments
    rank = os.environ["RANK"]
    log = os.open(f"{folder}/workerlog.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    linux.die_with_parent(os.getppid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
