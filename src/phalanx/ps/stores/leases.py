"""`Leases`: assign the files of an epoch to workers; files of a dead worker are assigned again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import ConfigError


class Leases:
    """The files of each epoch. Kept by server 0; one thread at a time."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}

    def check(self, epoch: int, files: Sequence[str]) -> None:
        """Check that all workers mean the same files.

        Raises:
            ConfigError: If an epoch began with other files; names the first that differs. Or if these are no names.
        """
        _require("epoch", epoch, int)
        if not isinstance(files, (list, tuple)):
            raise ConfigError(f"files of a lease must be a list of names, found {files!r}.")
        for file in files:
            _require("files", file, str)
        progress = self._epochs.get(epoch)
        if progress is None or list(progress.offsets) == list(files):
            return
        differing = sorted(set(progress.offsets) ^ set(files))
        raise ConfigError(
            f"Asked for files of epoch {epoch} from a list of {len(files)}; another worker gave {len(progress.offsets)}"
            + (f"; {differing[0]!r} is in one of them only." if differing else " in another order.")
            + " Give every worker the same list."
        )

    def lease(self, worker: int, epoch: int, files: Sequence[str]) -> dict[str, Any]:
        """Give a worker its next file.

        Returns:
            `file` and the `offset` to continue from; `file` is null when none is free, and `left` then says how many
            others still read.
        """
        if self._epochs and epoch < min(self._epochs):
            # All others are two epochs further: it was read to its end, and is not kept.
            return {"file": None, "offset": 0, "left": 0}
        state = self._epochs.setdefault(epoch, _Epoch(files))
        self._epochs = {number: e for number, e in self._epochs.items() if number >= epoch - 1}
        for file in state.offsets:
            if file not in state.done and file not in state.holders:
                state.holders[file] = worker
                return {"file": file, "offset": state.offsets[file], "left": len(state.offsets) - len(state.done)}
        return {"file": None, "offset": 0, "left": len(state.offsets) - len(state.done)}

    def record_progress(self, epoch: int, file: str, offset: int, *, end: bool) -> None:
        """Note how far a file was read and trained on, and whether that was all of it."""
        state = self._epochs[epoch]
        state.offsets[file] = offset
        if end:
            state.done.add(file)
            state.holders.pop(file, None)

    def check_progress(self, worker: int, epoch: int, file: str, offset: int) -> None:
        """Check that a worker holds the file it reports on.

        Raises:
            ConfigError: If it does not, or reports what is no place in a file.
        """
        for word, value, kind in (("epoch", epoch, int), ("file", file, str), ("offset", offset, int)):
            _require(word, value, kind)
        state = self._epochs.get(epoch)
        if state is None or state.holders.get(file) != worker:
            raise ConfigError(
                f"Worker {worker} reports on file {file!r} of epoch {epoch}, which it does not hold. Lease it first."
            )

    def release(self, worker: int) -> None:
        """Let others have the files of a worker that died or left."""
        for state in self._epochs.values():
            state.holders = {file: holder for file, holder in state.holders.items() if holder != worker}

    def to_json(self) -> dict[str, Any]:
        """Return all progress."""
        return {
            str(number): {"offsets": dict(e.offsets), "done": sorted(e.done), "holders": dict(e.holders)}
            for number, e in self._epochs.items()
        }

    def restore(self, value: Mapping[str, Any], *, holders: bool) -> None:
        """Take over what `to_json` returned; `holders` says whether the same workers still read."""
        self._epochs = {}
        for number, entry in value.items():
            epoch = self._epochs[int(number)] = _Epoch(entry["offsets"])
            epoch.offsets = dict(entry["offsets"])
            epoch.done = set(entry["done"])
            epoch.holders = dict(entry["holders"]) if holders else {}


class _Epoch:
    def __init__(self, files: Sequence[str] | Mapping[str, int]) -> None:
        self.offsets: dict[str, int] = dict.fromkeys(files, 0)
        self.done: set[str] = set()
        self.holders: dict[str, int] = {}


def _require(word: str, value: object, kind: type) -> None:
    """Raise unless a value that a worker sent is of this type, before it is written to the log."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{word} of a lease must be {kind.__name__}, found {value!r}. Run the same version of phalanx everywhere."
        )
