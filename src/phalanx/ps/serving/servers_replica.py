"""`ServersReplica`: the tables of all servers of a job, kept current from their logs while the job trains."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from phalanx.errors import ConfigError, PhalanxError
from phalanx.ps.server.presence import ServerNumber, read_server_number
from phalanx.ps.serving.server_replica import ServerReplica
from phalanx.ps.serving.view import TableView

POLL_S = 0.02

RETRY_S = 5.0
"""Pause after a log that cannot be read; a base that replaces it may make it whole."""

_log = logging.getLogger("phalanx.ps")


class ServersReplica:
    """Follows the logs of a job's servers, a thread for each. It reads their files alone and takes no lock of theirs.

    Args:
        directory: Folder with the folders of the servers, or that of a job's only server, or the job's LOG_DIR.
        poll_s: Seconds between two looks at a log.

    Raises:
        ConfigError: If no server keeps its log there, or one is missing.
        DataError: If a log is broken; names file and offset.
    """

    def __init__(self, directory: Path, poll_s: float = POLL_S) -> None:
        self._servers = [ServerReplica(path) for path in find_servers(directory)]
        for server in self._servers:
            server.poll()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(server, poll_s), name=f"follow {number}", daemon=True)
            for number, server in enumerate(self._servers)
        ]
        for thread in self._threads:
            thread.start()

    def view(self) -> TableView:
        """Return the tables of this moment; the version is segment and byte of each server's log."""
        servers = self._servers
        version, as_of = "-".join(server.version for server in servers), min(server.as_of for server in servers)
        steps = [min(of_worker) for of_worker in zip(*(server.steps for server in servers), strict=False)]
        return TableView([server.tables for server in servers], version, as_of, steps)

    def close(self) -> None:
        """Follow the logs no longer."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, server: ServerReplica, poll_s: float) -> None:
        pause, reported = poll_s, ""
        while not self._stopped.wait(pause):
            try:
                if pause != poll_s:
                    server.restart()
                server.poll()
                pause = poll_s
            except (PhalanxError, OSError) as error:
                pause = RETRY_S
                if str(error) != reported:
                    reported = str(error)
                    _log.error("rows grow old: %s", error)


def find_servers(directory: Path) -> list[Path]:
    """Return the folders of a job's servers, in their order.

    Raises:
        ConfigError: If there is none, or one is missing or of another job.
    """
    if (directory / "servers").is_dir():
        directory /= "servers"
    is_single = not (directory / "0").is_dir()
    first = directory if is_single else directory / "0"
    servers = read_server_number(first).servers
    folders = [first] if is_single else [directory / str(number) for number in range(servers)]
    for number, folder in enumerate(folders):
        if read_server_number(folder) != ServerNumber(number, servers) or _read_job(folder) != _read_job(first):
            raise ConfigError(
                f"{folder} is not the folder of server {number} of {servers} of the job in {first}. Give a folder that "
                "the servers of all hosts share, as --server-dir of the job."
            )
    if len(folders) != servers:
        raise ConfigError(
            f"{directory} is the folder of one of {servers} servers. Give the folder that holds the folders of all."
        )
    return folders


def _read_job(folder: Path) -> str:
    return (folder / "job").read_text(encoding="utf-8")
