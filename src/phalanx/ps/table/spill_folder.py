"""`spill_folder`: where tables keep the rows that leave memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from phalanx.cluster.env.environment import Environment


def spill_folder() -> str:
    """Return the folder for the files of tables: the one that is set, a server's own, or one for temporary files."""
    settings = Environment(os.environ)
    folder = settings.text("PHALANX_SPILL_DIR") or settings.text("PHALANX_SERVER_DIR")
    if folder is None:
        return tempfile.gettempdir()
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder
