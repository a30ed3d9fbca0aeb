"""Find the newest checkpoint that is whole, all ranks together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder.folder import is_checkpoint, present
from phalanx.checkpoint.folder.manifest import COMPLETE, Manifest, Marker, read_manifest
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensors.file import check_file
from phalanx.errors import ConfigError, DataError

logger = logging.getLogger("phalanx.checkpoint")


def newest_good(ranks: Ranks, folder: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint of a folder whose files are all as they were written.

    Collective. Each rank reads its part of the files to check them. Those that are skipped are logged with the reason.

    Args:
        ranks: All ranks.
        folder: A folder of checkpoints, or one checkpoint.

    Returns:
        The manifest; None if the folder has no checkpoint, as long as no save to it has ended.

    Raises:
        ConfigError: If ranks see different files.
        DataError: If there are checkpoints and none is whole; says why of each.
    """
    found = ranks.decide("find", lambda: None, lambda _: _candidates(folder))
    broken: list[str] = list(found["broken"])
    chosen = None
    for name in found["whole"]:
        path = folder if name == "." else folder / name
        checked: list[Manifest] = []
        why = ranks.decide(
            f"check-{name}",
            lambda path=path, into=checked: _check(ranks, path, into),  # type: ignore[misc]
            lambda said, path=path: _why_not(path, said),  # type: ignore[misc]
            timeout_s=WRITE_TIMEOUT_S,
        )
        if why is None:
            chosen = checked[0]
            break
        broken.append(why)
    skipped = [*broken, *found["unfinished"]]
    if chosen is None and broken:
        raise DataError(f"no checkpoint in {folder} is whole. {' '.join(skipped)}")
    if ranks.rank == 0:
        for why in skipped:
            logger.warning("skipped a checkpoint: %s", why)
    return chosen


def _candidates(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {"whole": [], "broken": [], "unfinished": []}
    if is_checkpoint(folder):
        return {"whole": ["."], "broken": [], "unfinished": []}
    there = present(folder)
    wrong = {path: why for path, why in there.items() if isinstance(why, str)}
    return {
        "whole": [path.name for path, marker in there.items() if isinstance(marker, Marker)],
        "broken": [why for path, why in wrong.items() if (path / COMPLETE).exists()],
        "unfinished": [why for path, why in wrong.items() if not (path / COMPLETE).exists()],
    }


def _check(ranks: Ranks, path: Path, into: list[Manifest]) -> dict[str, str | None]:
    """Read a manifest, and this rank's part of the files it names; say which save it is, or why it cannot be used."""
    try:
        manifest = read_manifest(path)
        for file in manifest.files[ranks.rank :: ranks.world_size]:
            check_file(path, file)
    except DataError as error:
        return {"why": str(error)}
    except OSError as error:
        return {"why": f"{error.filename or path} cannot be read: {error.strerror}."}
    into.append(manifest)
    return {"why": None, "save": manifest.save}


def _why_not(path: Path, said: list[dict[str, str | None]]) -> str | None:
    """Return why a checkpoint cannot be used, from what all ranks say of it; None if it can."""
    for rank, answer in enumerate(said):
        if answer["why"] is not None:
            is_for_all = all(other["why"] == answer["why"] for other in said)
            return answer["why"] if is_for_all else f"{answer['why']} (Rank {rank} says so.)"
    if len({answer["save"] for answer in said}) > 1:
        raise ConfigError(f"{path} is not the same checkpoint on all ranks. Name a folder that all hosts share.")
    return None


def none_there(folder: Path) -> ConfigError:
    """Return the error of a folder without any checkpoint."""
    exists = "holds none" if folder.is_dir() else "does not exist"
    return ConfigError(f"asked to load a checkpoint of {folder}, which {exists}. Name the folder given to px.save.")
