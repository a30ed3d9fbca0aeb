"""`pack`, `unpack`: pack and unpack code trees as tar.gz, safely."""

from __future__ import annotations

import tarfile
from pathlib import Path

from phalanx.errors import SpecError
from phalanx.jobs.sources.code_tree import MOST_BYTES, MOST_FILES, list_entries


def pack(tree: Path, archive: Path) -> None:
    """Write the files of a folder of code that are not ignored to a tar.gz archive.

    Raises:
        SpecError: If it is no folder, too large, or has links that lead out of it.
    """
    entries = list_entries(tree)
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for entry in entries:
            tar.add(tree / entry.path, arcname=entry.path, recursive=False)


def unpack(archive: Path, into: Path) -> None:
    """Write the files of a tar archive from outside to the empty folder `into`.

    Raises:
        SpecError: If the archive is broken or too large, or holds devices, or links or names that lead out of it.
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
    if not (member.isfile() or member.isdir() or member.issym()):
        raise SpecError(f"The archive of code holds {member.name!r}, which is no file or folder.")
    if member.name.startswith("/"):
        raise SpecError(f"The archive of code holds {member.name!r}. Names in it must be relative.")
    if files > MOST_FILES or total > MOST_BYTES:
        raise SpecError(
            f"The archive of code holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB. "
            "Leave out data and results."
        )
