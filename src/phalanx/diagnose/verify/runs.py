"""`ComparedRun`: a run to record; `record_run` starts it with the launcher and reads what its ranks recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.diagnose.recorded_process import last_lines, run_recorded
from phalanx.diagnose.verify.records import RecordedRun, read_run
from phalanx.errors import ConfigError, LaunchError
from phalanx.parallel.observe.recorder import RECORD_VARIABLE, RecordRequest

PLAN_VARIABLE = "PHALANX_PLAN"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One of the runs that are compared."""

    label: str
    ranks: int
    script: Path
    arguments: Sequence[str]
    folder: Path = field(default_factory=Path.cwd)
    """Where it runs."""

    replicas: int | None = None
    plan: Path | None = None
    perturb: bool = False


def record_run(spec: ComparedRun, out: Path, *, steps: int, timeout_s: float) -> RecordedRun:
    """Run a script until it has made so many steps, and return what its ranks recorded.

    Args:
        spec: The run.
        out: An empty folder for its records and logs.
        steps: Optimizer steps after which it ends.
        timeout_s: Seconds after which it is stopped.

    Raises:
        LaunchError: If it fails or takes longer; with the last lines it printed.
    """
    request = RecordRequest(str(out / "steps"), steps, spec.perturb)
    variables = {**os.environ, RECORD_VARIABLE: request.to_text()}
    if spec.plan is not None:
        variables[PLAN_VARIABLE] = str(spec.plan.resolve())
    replicas = () if spec.replicas is None else ("--replicas", str(spec.replicas))
    command = [sys.executable, "-m", "phalanx.launch", "-n", str(spec.ranks), "--log-dir", str(out / "log"), *replicas]
    output = out / "output.txt"
    code = run_recorded(
        [*command, str(spec.script), *spec.arguments],
        folder=spec.folder,
        variables=variables,
        output=output,
        timeout_s=timeout_s,
        title=f"the run with {spec.label}",
        advice="Ask for fewer --steps, or give a longer --timeout.",
    )
    run = read_run(spec.label, out / "steps", spec.ranks)
    if code != 0 and len(run.steps) < steps:
        raise LaunchError(
            f"the run with {spec.label} failed with exit code {code} after {len(run.steps)} steps. Make `phalanx run "
            f"-n {spec.ranks} {spec.script}` work first. The last lines it printed:\n{last_lines(output)}"
        )
    return run


@contextmanager
def checked_out(commit: str, script: Path, out: Path) -> Iterator[tuple[Path, Path]]:
    """Check out a commit of the script's repository beside it, for as long as the block lasts.

    Yields:
        The folder that stands for the current one, and the script there.

    Raises:
        ConfigError: If there is no repository, commit, or script in it.
    """
    top = Path(_git(script.resolve().parent, "rev-parse", "--show-toplevel"))
    revision = _git(top, "rev-parse", "--verify", f"{commit}^{{commit}}")
    tree = out / "commit"
    _git(top, "worktree", "add", "--detach", "--quiet", str(tree), revision)
    try:
        there = tree / script.resolve().relative_to(top)
        if not there.exists():
            raise ConfigError(f"{script} is not in commit {commit}. Give a commit that has it.")
        current = Path.cwd()
        yield (tree / current.relative_to(top) if current.is_relative_to(top) else there.parent), there
    finally:
        _git(top, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise ConfigError("--against needs git, which is not installed. Install it, or compare --plan files.") from None
    if done.returncode:
        raise ConfigError(f"git {arguments[0]} failed in {folder}: {done.stderr.strip()}. Check --against.")
    return done.stdout.strip()
