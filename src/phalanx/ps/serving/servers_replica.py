"""`ServersReplica`: the tables of all servers of a job, kept current from their logs while the job trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from phalanx.cluster.role.role import LAYOUT_FILE
from phalanx.errors import ConfigError, PhalanxError
from phalanx.ps.server.presence import ServerNumber, read_server_number
from phalanx.ps.serving.server_replica import ServerReplica
from phalanx.ps.serving.view import TableView
from phalanx.ps.wire.client.server_layout import read_layout

POLL_S = 0.02

LAYOUT_POLL_S = 0.2

RETRY_S = 5.0
"""Pause after a log that cannot be read; a base that replaces it may make it whole."""

_log = logging.getLogger("phalanx.ps")


class ServersReplica:
    """Follows the logs of a job's servers. It reads their files alone and takes no lock of theirs.

    Where the job has another number of servers, it continues with those, and answers from the tables of before until it
    has read theirs.

    Args:
        directory: Folder with the folders of the servers, or that of a job's only server, or the job's LOG_DIR.
        poll_s: Seconds between two looks at a log.

    Raises:
        ConfigError: If no server keeps its log there, or one is missing.
        DataError: If a log is broken; names file and offset.
    """

    def __init__(self, directory: Path, poll_s: float = POLL_S) -> None:
        self._directory, self._poll_s = _folder_of_servers(directory), poll_s
        self._layout = _layout_of(self._directory)
        self._followed = _FollowedServers(find_servers(self._directory), poll_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow_layout, name="follow the servers' number", daemon=True)
        self._thread.start()

    def view(self) -> TableView:
        """Return the tables of this moment; the version is segment and byte of each server's log."""
        return self._followed.view()

    def close(self) -> None:
        """Follow the logs no longer."""
        self._stopped.set()
        self._thread.join()
        self._followed.close()

    def _follow_layout(self) -> None:
        pause, reported = LAYOUT_POLL_S, ""
        while not self._stopped.wait(pause):
            pause = LAYOUT_POLL_S
            try:
                if (layout := _layout_of(self._directory)) != self._layout:
                    self._followed.close()  # the folders of those servers are deleted
                    newer = _FollowedServers(find_servers(self._directory), self._poll_s)
                    self._layout, self._followed = layout, newer
                    _log.info("follows %d servers now", len(newer.view().parts))
            except (PhalanxError, OSError) as error:
                pause = RETRY_S
                if str(error) != reported:
                    reported = str(error)
                    _log.error("rows grow old: %s", error)


class _FollowedServers:
    """The servers of one layout, a thread for each."""

    def __init__(self, folders: Sequence[Path], poll_s: float) -> None:
        self._servers = [ServerReplica(path) for path in folders]
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
        servers = self._servers
        version, as_of = "-".join(server.version for server in servers), min(server.as_of for server in servers)
        steps = [min(of_worker) for of_worker in zip(*(server.steps for server in servers), strict=False)]
        return TableView([server.tables for server in servers], version, as_of, steps)

    def close(self) -> None:
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


def _folder_of_servers(directory: Path) -> Path:
    return directory / "servers" if (directory / "servers").is_dir() else directory


def _layout_of(directory: Path) -> int:
    """Return how often the number of servers has changed."""
    layout = read_layout(directory / LAYOUT_FILE)
    return 0 if layout is None else layout.number


def find_servers(directory: Path) -> list[Path]:
    """Return the folders of a job's servers, in their order.

    Raises:
        ConfigError: If there is none, or one is missing or of another job.
    """
    directory = _folder_of_servers(directory)
    if (layout := read_layout(directory / LAYOUT_FILE)) is not None:
        directory /= layout.folder
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
