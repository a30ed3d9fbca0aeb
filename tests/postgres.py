"""A real PostgreSQL for tests: Debian's, on a Unix socket in a temporary folder, ended with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from debian import WAIT_FOR_APT

_USER = "postgres"
_INSTALL = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "-o", WAIT_FOR_APT, "postgresql"]


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
        options = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off")
        command = [programs / "postgres", "-D", data, *(word for option in options for word in ("-c", option))]
        running = subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True, **_unprivileged())
        assert running.stderr is not None
        try:
            said = []
            for line in running.stderr:
                said.append(line)
                if "ready to accept connections" in line:
                    break
            else:
                pytest.fail("".join(said))
            rest = threading.Thread(target=running.stderr.read)
            rest.start()
            yield folder
        finally:
            running.send_signal(signal.SIGQUIT)
            running.wait()
        rest.join()
        running.stderr.close()


def url(folder: Path, schema: str) -> str:
    """Return the URL of a database whose tables are in `schema`, which is made."""
    import psycopg

    with psycopg.connect(host=str(folder), user="postgres", dbname="postgres") as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"')
    return f"postgresql://postgres@/postgres?host={folder}&options=-csearch_path%3D{schema}"


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], cwd="/", text=True, capture_output=True, **_unprivileged())
    assert done.returncode == 0, done.stdout + done.stderr


def _unprivileged() -> dict[str, Any]:
    """How a process is started that refuses to run as root."""
    if os.getuid() != 0:
        return {}
    user = pwd.getpwnam(_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


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
