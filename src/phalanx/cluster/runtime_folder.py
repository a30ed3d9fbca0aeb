"""`runtime_folder`: the user's private runtime folder (XDG_RUNTIME_DIR or /tmp), and the secret of this host in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from phalanx.errors import LaunchError


def runtime_folder() -> Path:
    """Return this user's run-time folder, made if missing.

    Raises:
        LaunchError: If it cannot be made, or someone else made it first: /tmp is open to all.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "phalanx" if base else Path("/tmp") / f"phalanx-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be made ({error.strerror}). Set XDG_RUNTIME_DIR to a folder that this user can write to."
        ) from None
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise LaunchError(
            f"{path} is not a private folder of this user (owner {status.st_uid}, mode "
            f"{status.st_mode & 0o777:o}). "
            "Remove it, or set XDG_RUNTIME_DIR."
        )
    return path


def own_secret() -> str:
    """Return 64 random hexadecimal digits that only this user can read, the same in every process on this host."""
    path = runtime_folder() / "secret"
    beside = runtime_folder() / f"secret.{os.getpid()}"
    if not path.exists():
        beside.touch(mode=0o600)
        beside.write_text(secrets.token_hex(32), encoding="utf-8")
        # A link is made or it is not: of several launchers that start at once, one wins and all read its secret.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(beside)
        beside.unlink()
    return path.read_text(encoding="utf-8")
