"""A node without Python, which starts in milliseconds; tests of backends and controllers start it instead of ours."""

from __future__ import annotations

from pathlib import Path

from phalanx.jobs.backend import Submission
from phalanx.jobs.paths import attempt_folder
from phalanx.jobs.spec.training_job import TrainingJob

SCRIPT = r"""
folder=$1; node=$3
echo started >> "$folder/ran-$node"
printf running > "$folder/node-$node.beat"
cat "/proc/self/fd/$5" > "$folder/secrets-$node"
end() {
    printf '{"outcome": "%s", "cause": %s, "message": "%s", "exit_code": %s}' "$@" > "$folder/.end-$node"
    mv "$folder/.end-$node" "$folder/node-$node.json"
    exit
}
fail() { end failed '"user_code"' "rank 0 ended with exit code $1" "$1"; }
nap() { sleep "$1" & wait $!; kill $! 2> /dev/null; }
# Waits in the shell itself: a program that waits would keep the lock of a node that was killed.
hold() { mkfifo "$folder/hold-$node"; read -r _ < "$folder/hold-$node"; }
sulk() { trap true TERM; touch "$folder/sulks-$node"; while true; do nap 1; done; }
cards() { echo "cards $CUDA_VISIBLE_DEVICES"; nap 60; }
trap 'kill $! 2> /dev/null; end stopped null "asked to end by SIGTERM" null' TERM
echo "text of node $node"
eval "$(sed -n 's/^  "command": "\(.*\)",$/\1/p' "$folder/attempt.json")"
end succeeded null "" 0
"""
"""Runs the job's command in this shell, as `nap 5` or `fail 3`."""


def node(folder: Path) -> tuple[str, ...]:
    """Write the stand-in into `folder`; return what `Local` is to start."""
    script = folder / "stand-in.sh"
    script.write_text(SCRIPT)
    return ("/bin/sh", str(script))


def submission(
    home: Path, command: str, *, attempt: int = 1, secrets: dict[str, str] | None = None, **spec: object
) -> Submission:
    """Return an attempt at a job of the stand-in."""
    made = TrainingJob.model_validate({"name": "j", "command": command, **spec})
    return Submission("j", attempt, made, attempt_folder(home, "j", attempt), secrets or {})
