"""`SlotReader`: reads click-log files block by block; broken lines raise, or are skipped and counted."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from phalanx.data.ctr.slot_rows import SlotRows
from phalanx.data.ctr.slots import SlotSchema, describe_broken, parse_slots
from phalanx.data.samples.bad_records import BadRecords, OnCorrupt
from phalanx.errors import ConfigError, DataError

logger = logging.getLogger("phalanx.data")

BLOCK_BYTES = 1 << 22
"""Text parsed at a time."""


def list_files(where: str | Path | Sequence[str | Path]) -> list[str]:
    """Return the files that `where` names: a file, a folder's files in the order of their names, or a list.

    Raises:
        ConfigError: If it is no file or folder, names none, or names one twice.
    """
    if isinstance(where, str | Path):
        where = _in_folder(Path(where))
    files = [str(f) for f in where]
    if not files or len(set(files)) < len(files):
        raise ConfigError(f"Asked to read the files {files}. Give at least one, and each once.")
    return files


def _in_folder(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"Asked for data in {path}, which is neither a file nor a folder. Give one that exists.")
    return sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_")))


class SlotReader:
    """Reads files of one schema, plain or compressed with gzip (`.gz`).

    Args:
        schema: What a line holds.
        on_corrupt: `stop` at the first broken line, or `skip` them, counted in `corrupt`; a file that had
            some is named in the log.
    """

    def __init__(self, schema: SlotSchema, on_corrupt: OnCorrupt = "stop") -> None:
        self.schema, self.corrupt = schema, BadRecords(on_corrupt)

    def blocks(self, path: str | Path, first_row: int = 0) -> Iterator[SlotRows]:
        """Yield a file's rows, some thousands at a time.

        Args:
            path: The file.
            first_row: How many rows to leave out at the beginning; broken lines are no rows.

        Raises:
            DataError: If the file cannot be read, or a line is broken; names file, line, field and what was found.
        """
        lines, broken, first = 0, 0, ""
        for text in _texts(Path(path)):
            parsed = parse_slots(text, self.schema)
            if parsed.first_broken is not None:
                line = lines + parsed.first_broken.line + 1
                problem = f"{path}, line {line}: {describe_broken(parsed.first_broken, self.schema)}"
                self.corrupt.add(problem, parsed.broken)
                first = first or problem
            broken += parsed.broken
            lines += len(parsed.rows) + parsed.broken
            skipped = min(first_row, len(parsed.rows))
            first_row -= skipped
            if skipped < len(parsed.rows):
                yield parsed.rows.slice(skipped, len(parsed.rows))
        if broken:
            logger.warning("%s. %d of the file's %d lines are broken and were left out", first, broken, lines)


def _texts(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces that end where lines do."""
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            while text := file.read(BLOCK_BYTES):
                yield text if text.endswith(b"\n") else text + file.readline()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is broken ({error}). Make the file again.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the folder and its files.") from None
