"""A real PostgreSQL for tests: Debian's, on a Unix socket in a temporary folder, ended with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_USER = "postgres"
_INSTALL = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "postgresql"]


@contextmanager
def server() -> Iterator[Path]:
    """Run a server; yield the folder of its socket. Skips the test, with the reason, where there can be none."""
    programs = _programs()
    with tempfile.TemporaryDirectory(prefix="phalanx-postgres-") as name:
        folder = Path(name)
        if os.getuid() == 0:  # the server refuses to run as root
            shutil.chown(folder, _USER)
        data = folder / "data"
        _run(programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        _run(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start")
        try:
            yield folder
        finally:
            _run(programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")


def url(folder: Path, schema: str) -> str:
    """Return the URL of a database whose tables are in `schema`, which is made."""
    import psycopg

    with psycopg.connect(host=str(folder), user="postgres", dbname="postgres") as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"')
    return f"postgresql://postgres@/postgres?host={folder}&options=-csearch_path%3D{schema}"


def _run(*command: object) -> None:
    as_user = ["runuser", "-u", _USER, "--"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*as_user, *map(str, command)], cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout


def _programs() -> Path:
    if not _installed() and os.getuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            _INSTALL, check=False, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
    if not (found := _installed()):
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql), or has no user postgres")
    return found[-1]


def _installed() -> list[Path]:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return []
    return sorted(path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb"))
