"""Find the newest checkpoint that is whole, all ranks together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import is_checkpoint, present
from phalanx.checkpoint.manifest import Manifest, Marker, read_manifest
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensor_file import check_file
from phalanx.errors import ConfigError, DataError

logger = logging.getLogger("phalanx.checkpoint")


def newest_good(ranks: Ranks, folder: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint of a folder whose files are all as they were written.

    Collective. Each rank reads its part of the files to check them. Those that are skipped are logged with the reason.

    Args:
        ranks: All ranks.
        folder: A folder of checkpoints, or one checkpoint.

    Returns:
        The manifest; None if the folder has no checkpoint at all.

    Raises:
        DataError: If there are checkpoints and none is whole; says why of each.
    """
    found = ranks.decide("find", lambda: None, lambda _: _candidates(folder))
    skipped: list[str] = list(found["skipped"])
    chosen = None
    for name in found["whole"]:
        path = folder if name == "." else folder / name
        checked: list[Manifest] = []
        why = ranks.decide(
            f"check-{name}",
            lambda path=path, into=checked: _check(ranks, path, into),  # type: ignore[misc]
            lambda said: next((answer for answer in said if answer), None),
            timeout_s=WRITE_TIMEOUT_S,
        )
        if why is None:
            chosen = checked[0]
            break
        skipped.append(why)
    if ranks.rank == 0:
        for why in skipped if chosen is not None else ():
            logger.warning("skipped a checkpoint: %s", why)
    if chosen is None and skipped:
        raise DataError(f"no checkpoint in {folder} is whole. {' '.join(skipped)}")
    return chosen


def _candidates(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {"whole": [], "skipped": []}
    if is_checkpoint(folder):
        return {"whole": ["."], "skipped": []}
    there = present(folder)
    return {
        "whole": [path.name for path, marker in there.items() if isinstance(marker, Marker)],
        "skipped": [why for why in there.values() if isinstance(why, str)],
    }


def _check(ranks: Ranks, path: Path, into: list[Manifest]) -> str | None:
    """Read a manifest, and this rank's part of the files it names; return why it cannot be used, or None."""
    try:
        manifest = read_manifest(path)
        for file in manifest.files[ranks.rank :: ranks.world_size]:
            check_file(path, file)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or path} cannot be read: {error.strerror}."
    into.append(manifest)
    return None


def none_there(folder: Path) -> ConfigError:
    """Return the error of a folder without any checkpoint."""
    exists = "holds none" if folder.is_dir() else "does not exist"
    return ConfigError(f"asked to load a checkpoint of {folder}, which {exists}. Name the folder given to px.save.")
