"""Trees of code in an archive, as a client sends them and a server takes them in."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import SpecError

_MOST_FILES = 100_000
_MOST_BYTES = 2 << 30


def pack(tree: Path, files: Iterable[Path], archive: Path) -> None:
    """Write `files`, paths relative to `tree`, to a tar.gz archive."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in files:
            tar.add(tree / path, arcname=path.as_posix(), recursive=False)


def unpack(archive: Path, into: Path) -> None:
    """Write the files of a tar archive from outside to the empty folder `into`.

    Raises:
        SpecError: If the archive is broken or too large, or holds links, devices or names that lead out of it.
    """
    files = total = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                files, total = files + 1, total + member.size
                _check(member, files, total)
                tar.extract(member, into, filter="data")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise SpecError(f"The archive of code cannot be read ({error}). Send a tar.gz of regular files.") from None


def _check(member: tarfile.TarInfo, files: int, total: int) -> None:
    if not (member.isfile() or member.isdir()):
        raise SpecError(f"The archive of code holds {member.name!r}, which is no file or folder. Links are not taken.")
    if member.name.startswith("/"):
        raise SpecError(f"The archive of code holds {member.name!r}. Names in it must be relative.")
    if files > _MOST_FILES or total > _MOST_BYTES:
        raise SpecError(
            f"The archive of code holds more than {_MOST_FILES} files or {_MOST_BYTES >> 30} GiB. "
            "Leave out data and results."
        )
