"""`MappedRecords`: memory-mapped files of fixed-length records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError, DataError


class MappedRecords:
    """A file as a table of bytes, shape (records, record_bytes), of which the kernel keeps what is used.

    All processes of a node share that memory. A copy sent to another process opens the file there.

    Args:
        path: The file.
        first_byte: Where the first record begins.
        records: How many there are.
        record_bytes: Length of one.
    """

    def __init__(self, path: Path, first_byte: int, records: int, record_bytes: int) -> None:
        self.path = path
        self._place = (path, first_byte, records, record_bytes)
        self.table = _map_records(*self._place)

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedRecords, self._place


def find_file(folder: str | Path, name: str, endings: tuple[str, ...] = ("",)) -> Path:
    """Return the file of this name in a folder, or the first there is with one of `endings` after the name.

    Raises:
        ConfigError: If the folder does not exist.
        DataError: If there is none; lists what is there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"Asked for data in {folder}, which is not a folder. Give the folder that holds {name}.")
    for ending in endings:
        if (folder / f"{name}{ending}").is_file():
            return folder / f"{name}{ending}"
    present = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    missing = f"neither {name} nor {name}{endings[-1]}" if len(endings) > 1 else f"no {name}"
    raise DataError(f"{folder} holds {missing}; found {present}. Put the file there.")


def _map_records(path: Path, first_byte: int, records: int, record_bytes: int) -> NDArray[np.uint8]:
    if not records:
        return np.empty((0, record_bytes), np.uint8)  # nothing cannot be mapped
    try:
        return np.asarray(np.memmap(path, np.uint8, "r", first_byte, (records, record_bytes)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the folder and its files.") from None
