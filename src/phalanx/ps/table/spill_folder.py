"""`spill_folder`: where tables keep the rows that leave memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from phalanx.cluster.env.environment import Environment
from phalanx.errors import ConfigError


def spill_folder() -> str:
    """Return the folder for the files of tables: the one that is set, a server's own, or one for temporary files.

    Raises:
        ConfigError: If it is not there and cannot be made.
    """
    settings = Environment(os.environ)
    folder = settings.text("PHALANX_SPILL_DIR") or settings.text("PHALANX_SERVER_DIR")
    if folder is None:
        return tempfile.gettempdir()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Tables with max_bytes keep rows in {folder}, which cannot be made: {error.strerror}. "
            "Set PHALANX_SPILL_DIR to a folder on a disk with room."
        ) from error
    return folder
