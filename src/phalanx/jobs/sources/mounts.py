"""`Bind`: bind-mount datasets at absolute paths, in a mount namespace of the job.

Root may do that; others where the kernel lets users make namespaces. Nothing is mounted for anybody else, but a folder
that has to be made for a mount stays, empty.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import BackendError
from phalanx.jobs.sources.datasets import content
from phalanx.jobs.spec.code_and_data import Dataset

_SCRIPT = """
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p -- "$2"; elif [ ! -e "$2" ]; then mkdir -p -- "$(dirname -- "$2")" && : > "$2"; fi &&
    mount -o "$3" -- "$1" "$2" || exit 125
    shift 3
done
shift
exec "$@"
"""


@dataclass(frozen=True)
class Bind:
    """A folder or file that a job sees at another path too."""

    source: Path
    target: Path
    readonly: bool


def binds(datasets: Iterable[Dataset], home: Path) -> list[Bind]:
    """Return what has to be bound for datasets with absolute mounts; nothing for one that lies at its mount already."""
    mounts = [
        Bind(content(d, home), Path(d.mount), d.readonly) for d in datasets if d.mount and d.mount.startswith("/")
    ]
    return [bind for bind in mounts if bind.source != bind.target]


def prefix(mounts: list[Bind]) -> list[str]:
    """Return the prefix of a command that lets it alone see `mounts`; the command keeps its process id and user."""
    if not mounts:
        return []
    options = {True: "bind,ro", False: "bind"}
    words = [word for bind in mounts for word in (str(bind.source), str(bind.target), options[bind.readonly])]
    script = ["sh", "-c", _SCRIPT, "mounts", *words, "--"]
    alone = ["--mount", "--propagation", "private", "--"]
    if os.geteuid() == 0:
        return ["unshare", *alone, *script]
    back = ["unshare", "--user", f"--map-user={os.geteuid()}", f"--map-group={os.getegid()}", "--"]
    return ["unshare", "--user", "--map-root-user", *alone, *script, *back]


def check(mounts: list[Bind]) -> None:
    """Try whether `mounts` can be bound on this machine; a source that is not fetched yet counts as a folder.

    Raises:
        BackendError: If it cannot.
    """
    if not mounts:
        return
    with tempfile.TemporaryDirectory() as empty:
        tested = [Bind(b.source if b.source.exists() else Path(empty), b.target, b.readonly) for b in mounts]
        try:
            process = subprocess.run([*prefix(tested), "true"], capture_output=True, text=True, timeout=30, check=False)
            reason = process.stderr.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(f"{_cannot(mounts)}: {error}. {_INSTEAD}") from None
    if process.returncode:
        raise BackendError(f"{_cannot(mounts)}: {reason[0]}. {_INSTEAD}")


_INSTEAD = "Write a relative mount, which needs no rights, or read the path from PHALANX_DATASET_*."


def _cannot(mounts: list[Bind]) -> str:
    return f"{' and '.join(str(bind.target) for bind in mounts)} cannot be mounted for a job on this machine"
