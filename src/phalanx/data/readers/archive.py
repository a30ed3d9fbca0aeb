"""`unpack_into`: extract zip and tar archives safely: no paths outside the folder, bounded size."""

from __future__ import annotations

import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from phalanx.errors import DataError

_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class _Member(NamedTuple):
    name: str
    size: int
    file: IO[bytes] | None
    """None for a folder."""


def unpack_into(archive: Path, folder: Path, max_bytes: int) -> None:
    """Unpack a zip or tar archive, unless that was done before.

    Its members appear in `folder` once all of them were read. Call it under a lock.

    Args:
        archive: The file.
        folder: The target folder.
        max_bytes: Most bytes to unpack.

    Raises:
        DataError: If it is no archive or broken; or holds something that is neither a file nor a folder, lies outside
            `folder`, or has more bytes; names the member.
    """
    mark = folder / f".{archive.name}.unpacked"
    if mark.exists():
        return
    # In the same file system, so that moving the members is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{archive.name}.", dir=folder) as staging:
        try:
            _write(_members(archive), Path(staging), archive, max_bytes)
        except _BROKEN as error:
            raise DataError(f"{archive}: the archive is broken ({error}). Delete it and download it again.") from None
        for path in sorted(Path(staging).iterdir()):
            _move(path, folder / path.name)
    mark.touch()


def _members(archive: Path) -> Iterator[_Member]:
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for member in tar:
                if not (member.isfile() or member.isdir()):
                    kind = "link" if member.issym() or member.islnk() else "device"
                    raise DataError(f"{archive}: holds the {kind} {member.name!r}. Unpack by hand what can be trusted.")
                yield _Member(member.name, member.size, tar.extractfile(member))
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                with packed.open(entry) as file:
                    yield _Member(entry.filename, entry.file_size, None if entry.is_dir() else file)
    else:
        raise DataError(f"{archive}: asked to unpack it, but it is neither a zip nor a tar archive. Leave unpack out.")


def _write(members: Iterator[_Member], folder: Path, archive: Path, max_bytes: int) -> None:
    left = max_bytes
    for member in members:
        inside = PurePosixPath(member.name.replace("\\", "/"))
        if inside.is_absolute() or ".." in inside.parts:
            raise DataError(
                f"{archive}: holds {member.name!r}, which would lie outside the folder. Do not trust this archive."
            )
        left -= member.size
        if left < 0:
            raise DataError(
                f"{archive}: holds more than max_bytes={max_bytes} bytes. Give a larger max_bytes if that is right."
            )
        path = folder / inside
        if member.file is None:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as target:
            _copy_exactly(member, target, archive)


def _copy_exactly(member: _Member, target: IO[bytes], archive: Path) -> None:
    # A header may lie about the size: exactly that many bytes are written, or it is an error.
    assert member.file is not None
    left = member.size
    while left and (piece := member.file.read(min(left, 1 << 20))):
        target.write(piece)
        left -= len(piece)
    if left:
        raise DataError(f"{archive}: {member.name!r} is cut off. Delete the archive and download it again.")


def _move(path: Path, target: Path) -> None:
    if path.is_dir() and target.is_dir():
        for inner in sorted(path.iterdir()):
            _move(inner, target / inner.name)
    else:
        path.replace(target)
