"""`list_entries`, `digest`: list, hash and copy a code folder, honouring ignore files."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pathspec import GitIgnoreSpec

from phalanx.errors import SpecError
from phalanx.jobs.sources.build_once import Progress
from phalanx.units import format_mb

MOST_BYTES = 2 << 30
MOST_FILES = 100_000

_IGNORED_NAMES = frozenset({".git", "__pycache__", ".venv"})


@dataclass(frozen=True)
class TreeEntry:
    """A file or symbolic link of a tree. `path` is relative to its root; `link` is where a link leads, else None."""

    path: str
    bytes: int
    executable: bool
    link: str | None = None


def list_entries(root: Path, *, everything: bool = False) -> list[TreeEntry]:
    """Return the files and links of a folder of code, by path.

    Files that .phalanxignore leaves out are not among them, or .gitignore where the root has no .phalanxignore; both
    in git's syntax, those in folders below included, and above in the same repository. `.git`, `.venv` and
    `__pycache__` never are.

    Args:
        root: The folder.
        everything: Whether to look for no ignore files.

    Raises:
        SpecError: If it is no folder, cannot be read, is too large, or has links that lead out of it.
    """
    if not root.is_dir():
        raise SpecError(f"code: {root} is no folder. Give the folder of the code.")
    ignored = None if everything else _Ignored.around(root)
    try:
        entries = sorted(_walk(root, "", ignored), key=lambda entry: entry.path)
    except OSError as error:
        raise SpecError(
            f"code: cannot read {error.filename}: {error.strerror}. Make it readable, or list it in .phalanxignore."
        ) from None
    _check_size(root, entries)
    _check_links(root, entries)
    return entries


def digest(root: Path, entries: list[TreeEntry]) -> str:
    """Return the SHA-256 of paths, modes and contents, the same wherever the tree lies."""
    whole = hashlib.sha256()
    for entry in entries:
        if entry.link is not None:
            kind, content = "link", hashlib.sha256(entry.link.encode()).hexdigest()
        else:
            kind = "program" if entry.executable else "file"
            with (root / entry.path).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{kind} {content} {entry.path}\0".encode(errors="surrogateescape"))
    return whole.hexdigest()


def copy(root: Path, entries: list[TreeEntry], into: Path) -> None:
    """Copy `entries` of `root` into the new folder `into`."""
    into.mkdir()
    progress = Progress(f"copying code from {root}", sum(entry.bytes for entry in entries))
    for entry in entries:
        target = into / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.link is not None:
            target.symlink_to(entry.link)
        else:
            shutil.copyfile(root / entry.path, target)
            target.chmod(0o755 if entry.executable else 0o644)
        progress.add(entry.bytes)


@dataclass(frozen=True)
class _Ignored:
    """The ignore files that apply to a folder, each with its own folder, the nearest first."""

    file_name: str
    specs: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    @classmethod
    def around(cls, root: Path) -> Self:
        """Return what the folders above `root` ignore in it, up to the top of its repository."""
        if (root / ".phalanxignore").is_file():
            return cls(".phalanxignore")
        above = list(root.absolute().parents)
        top = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), None)
        ignored = cls(".gitignore")
        if top is not None and not (root / ".git").exists():
            for folder in reversed(above[: top + 1]):
                ignored = ignored.inside(str(folder))
        return ignored

    def inside(self, folder: str) -> Self:
        """Return this with the ignore file of `folder`, if it has one."""
        path = Path(folder, self.file_name)
        if not path.is_file():
            return self
        spec = GitIgnoreSpec.from_lines(path.read_text(errors="surrogateescape").splitlines())
        return replace(self, specs=((folder + "/", spec), *self.specs))

    def has(self, path: str) -> bool:
        """Return whether an absolute path, with a slash behind it for a folder, is ignored."""
        for folder, spec in self.specs:
            decision = spec.check_file(path.removeprefix(folder)).include
            if decision is not None:
                return decision
        return False


def _walk(folder: Path, prefix: str, ignored: _Ignored | None) -> Iterator[TreeEntry]:
    absolute = os.path.abspath(folder)
    ignored = ignored and ignored.inside(absolute)
    with os.scandir(absolute) as items:
        for item in items:
            is_folder = item.is_dir(follow_symlinks=False)
            if item.name in _IGNORED_NAMES or (ignored is not None and ignored.has(item.path + "/" * is_folder)):
                continue
            if is_folder:
                yield from _walk(Path(item.path), f"{prefix}{item.name}/", ignored)
            else:
                yield _entry(item, prefix + item.name)


def _entry(item: os.DirEntry[str], path: str) -> TreeEntry:
    status = item.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return TreeEntry(path, 0, False, os.readlink(item.path))
    if not stat.S_ISREG(status.st_mode):
        raise SpecError(f"code: {item.path} is no file, folder or link. Remove it, or list it in .phalanxignore.")
    return TreeEntry(path, status.st_size, bool(status.st_mode & stat.S_IXUSR))


def _check_size(root: Path, entries: list[TreeEntry]) -> None:
    total = sum(entry.bytes for entry in entries)
    if total <= MOST_BYTES and len(entries) <= MOST_FILES:
        return
    largest = sorted(entries, key=lambda entry: -entry.bytes)[:5]
    named = ", ".join(f"{entry.path} ({format_mb(entry.bytes)})" for entry in largest)
    raise SpecError(
        f"code: {root} has {len(entries)} files with {format_mb(total)}, and at most {MOST_FILES} with "
        f"{format_mb(MOST_BYTES)} are copied. The largest are {named}. List what a job does not need in "
        ".phalanxignore, and give data as datasets."
    )


def _check_links(root: Path, entries: list[TreeEntry]) -> None:
    top = root.resolve()
    for entry in entries:
        if entry.link is not None and (
            entry.link.startswith("/") or not (root / entry.path).resolve().is_relative_to(top)
        ):
            raise SpecError(
                f"code: the link {entry.path} leads out of the code, to {entry.link}. Copy what it leads "
                "to, list it in .phalanxignore, or give it as a dataset."
            )
