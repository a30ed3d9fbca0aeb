"""`find_newest_complete`: find the newest complete and intact checkpoint of a folder, agreed by all ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder.checkpoint_folder import is_checkpoint, list_checkpoints
from phalanx.checkpoint.folder.manifest import CheckpointManifest, read_manifest
from phalanx.checkpoint.folder.marker import COMPLETE, Marker
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensors.safetensors_file import check_file
from phalanx.errors import ConfigError, DataError

logger = logging.getLogger("phalanx.checkpoint")


def find_newest_complete(ranks: Ranks, folder: Path) -> CheckpointManifest | None:
    """Return the manifest of the newest checkpoint of a folder whose files all match their checksums.

    Collective. Each rank checks its share of the files. Skipped checkpoints are logged with the reason.

    Args:
        ranks: All ranks.
        folder: A folder of checkpoints, or one checkpoint.

    Returns:
        The manifest; None if no save to the folder has completed.

    Raises:
        ConfigError: If ranks see different files.
        DataError: If there are checkpoints and none is complete; gives the reason for each.
    """
    candidates = ranks.decide("find", lambda: None, lambda _: _candidates(folder))
    broken: list[str] = list(candidates["broken"])
    manifest = None
    for name in candidates["complete"]:
        path = folder if name == "." else folder / name
        manifests: list[CheckpointManifest] = []
        why = ranks.decide(
            f"check-{name}",
            lambda path=path, into=manifests: _check(ranks, path, into),  # type: ignore[misc]
            lambda answers, path=path: _why_not(path, answers),  # type: ignore[misc]
            timeout_s=WRITE_TIMEOUT_S,
        )
        if why is None:
            manifest = manifests[0]
            break
        broken.append(why)
    skipped = [*broken, *candidates["unfinished"]]
    if manifest is None and broken:
        raise DataError(f"no checkpoint in {folder} is complete. {' '.join(skipped)}")
    if ranks.rank == 0:
        for why in skipped:
            logger.warning("skipped a checkpoint: %s", why)
    return manifest


def _candidates(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {"complete": [], "broken": [], "unfinished": []}
    if is_checkpoint(folder):
        return {"complete": ["."], "broken": [], "unfinished": []}
    markers = list_checkpoints(folder)
    reasons = {path: why for path, why in markers.items() if isinstance(why, str)}
    return {
        "complete": [path.name for path, marker in markers.items() if isinstance(marker, Marker)],
        "broken": [why for path, why in reasons.items() if (path / COMPLETE).exists()],
        "unfinished": [why for path, why in reasons.items() if not (path / COMPLETE).exists()],
    }


def _check(ranks: Ranks, path: Path, into: list[CheckpointManifest]) -> dict[str, str | None]:
    """Check a manifest and this rank's share of its files; return the name of the save, or why it cannot be used."""
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


def _why_not(path: Path, answers: list[dict[str, str | None]]) -> str | None:
    """Return why a checkpoint cannot be used, from the answers of all ranks; None if it can."""
    for rank, answer in enumerate(answers):
        if answer["why"] is not None:
            is_for_all = all(other["why"] == answer["why"] for other in answers)
            return answer["why"] if is_for_all else f"{answer['why']} (Rank {rank} says so.)"
    if len({answer["save"] for answer in answers}) > 1:
        raise ConfigError(f"{path} is not the same checkpoint on all ranks. Name a folder that all nodes share.")
    return None


def no_checkpoint_error(folder: Path) -> ConfigError:
    """Return the error of a folder without any checkpoint."""
    exists = "holds none" if folder.is_dir() else "does not exist"
    return ConfigError(f"asked to load a checkpoint of {folder}, which {exists}. Name the folder given to px.save.")
