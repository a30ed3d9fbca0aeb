"""Ranks of elastic jobs end at random points, saves among them; a launcher is killed and its job resumed."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import phalanx as px
from benchmarks.elastic_faults import POINTS, SHARDING, TWO_MODELS, draw_faults
from benchmarks.elastic_jobs import RANK_SCRIPT, Trained, read_lines
from benchmarks.elastic_models import complete_steps, digest, nets_of
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult

RANKS, FAULTS = 4, 9
WIDTH, HIDDEN = 16, 32
UPDATES, SAVE_EVERY = 400, 25
SCRIPT = ("--samples", 240, "--pause", 0.003, "--width", WIDTH, "--hidden", HIDDEN, "--save-every", SAVE_EVERY)
PATIENCE = {"PHALANX_PATIENCE_S": "0.5"}
SAVING = ("save", "write", "written", "saved")
"""Points of a save; one rank writes."""

TIMEOUT_S = 120.0
_lock = threading.Lock()


@dataclass(frozen=True)
class TrainingKind:
    """What a job trains, and how it keeps the state of optimizers."""

    adversaries: bool = False
    """Two models with an optimizer each, instead of one."""

    mirror: int | None = None
    """Mirrors of each shard, where optimizer state is sharded (ZeRO 1); None where every rank has all of it."""

    @property
    def flags(self) -> list[object]:
        """Those of `elastic_rank`."""
        models = ["--adversaries"] if self.adversaries else []
        if self.mirror is None:
            return models
        return [*models, "--sharding", "--mirror", self.mirror, "--resume"]

    @property
    def points(self) -> tuple[str, ...]:
        """Where its ranks may end."""
        models = TWO_MODELS if self.adversaries else ()
        return (*POINTS, *SAVING, *models, *(() if self.mirror is None else SHARDING))


def arguments(folder: Path, updates: int, *flags: object) -> list[object]:
    """Return the script and its arguments, as `phalanx run` takes them."""
    return [RANK_SCRIPT, "--folder", folder, "--epochs", updates // 10, *SCRIPT, *flags]


def undisturbed(folder: Path, updates: int = UPDATES, *, adversaries: bool = False) -> tuple[Trained, dict[str, str]]:
    """Return the same training without faults, which shards nothing, and the weights of its checkpoints by path."""
    with _lock:
        return _train_undisturbed(folder / f"{updates}{' of adversaries' * adversaries}", updates, adversaries)


@cache
def _train_undisturbed(folder: Path, updates: int, adversaries: bool) -> tuple[Trained, dict[str, str]]:
    kind = TrainingKind(adversaries)
    with LaunchedJob(folder) as job:
        job.start("-n", "1:2", "--replicas", RANKS, *arguments(folder, updates, *kind.flags), env=PATIENCE)
        trained = read(job, TIMEOUT_S)
        if trained.code or len(trained.hashes) != 1 or trained.remaining:
            raise RuntimeError(f"the training without faults has failed:\n{trained.remaining}\n{job.report()}")
    return trained, checkpoints(folder)


def read(job: LaunchedJob, timeout_s: float) -> Trained:
    """Wait for a job, and read what it left."""
    started = time.time()
    codes = job.wait(timeout_s)
    code = next((code for code in codes if code), 0)
    return Trained(job.folder, code, job.output(), time.time() - started, read_lines(job.folder), job.remaining())


def checkpoints(folder: Path) -> dict[str, str]:
    """Return the digest of the weights in every complete checkpoint, by its path.

    Raises:
        PhalanxError: If one that counts as complete cannot be loaded.
    """
    found = {}
    for adversaries in (False, True):
        for name, net in nets_of(adversaries, WIDTH, HIDDEN).items():
            for step in sorted(complete_steps(folder / name)):
                px.load(folder / name / f"step-{step}", net)
                found[f"{name}/step-{step}"] = digest(net)
    return found


def checkpoint_problems(folder: Path, expected: dict[str, str]) -> list[str]:
    """Return in words which checkpoints are corrupt, or not those of the undisturbed run."""
    try:
        found = checkpoints(folder)
    except px.errors.PhalanxError as error:
        return [f"a checkpoint is corrupt: {error}"]
    return [f"{path} has other weights" for path in found if found[path] != expected.get(path)]


def ranks_are_lost(
    folder: Path,
    seed: int,
    reference: Path,
    *,
    kind: TrainingKind = TrainingKind(),
    count: int = FAULTS,
    updates: int = UPDATES,
) -> SoakResult:
    """Kill and stop ranks of one launcher at random points."""
    every = max(updates // (2 * count), 5)
    faults = draw_faults(seed, count, ranks=RANKS, first=10, every=every, points=kind.points)
    expected, saved = undisturbed(reference, updates, adversaries=kind.adversaries)
    with LaunchedJob(folder) as job:
        (folder / "faults.json").write_text(json.dumps(faults))
        launcher = ("-n", f"1:{RANKS}", "--replicas", RANKS, "--max-restarts", 100)
        job.start(*launcher, *arguments(folder, updates, *kind.flags), env=PATIENCE)
        trained = read(job, TIMEOUT_S)
        problems = [
            *hang_of(job),
            *trained.problems(expected, may_restart=kind.mirror is not None),
            *checkpoint_problems(folder, saved),
            *restart_problems(folder, trained.restarts, kind.mirror),
        ]
        happened = fired(folder, faults)
        return SoakResult("ranks lost", seed, happened, problems, trained.seconds, job.report(), trained.restarts)


def restart_problems(folder: Path, restarts: int, mirror: int | None) -> list[str]:
    """Return in words which restarts of the whole job had no good reason: a shard that nobody is left to have."""
    good = "together with their mirrors" if mirror else "had no mirror (mirror=1)"
    reasons, bad = 0, []
    for path in folder.rglob("events.launcher.0.jsonl"):
        lost = set[str]()  # since all ranks last had their shards
        for event in map(json.loads, path.read_text().splitlines()):
            lost.update(event["lost"])
            if reason := event.get("ended"):
                reasons += 1
                if mirror is None or good not in reason or len(lost) <= mirror:
                    bad.append(f"the job began again after the loss of {', '.join(sorted(lost))}: {reason}")
            elif len(event["seconds"]) == event["ranks"]:
                lost.clear()
    if reasons < restarts:
        bad.append(f"the job began again {restarts} times, and gave {reasons} reasons")
    return bad


def launcher_is_killed(folder: Path, seed: int, reference: Path, *, updates: int = UPDATES) -> SoakResult:
    """Kill the launcher; what it started must go, and the job, resumed, must end as if nothing had been."""
    expected, saved = undisturbed(reference, updates)
    generator = random.Random(seed)
    moment, number = generator.randrange(1, updates - 20), generator.choice([signal.SIGKILL, signal.SIGTERM])
    faults: list[str] = []
    flags = ("-n", f"1:{generator.choice([2, 3, RANKS])}", "--replicas", RANKS)
    with LaunchedJob(folder) as job:
        launcher = job.start(*flags, *arguments(folder, updates), env=PATIENCE)
        if job.wait_until(lambda: newest_update(folder) >= moment):
            launcher.send_signal(number)
            faults.append(f"{number.name} of the launcher at update {moment}")
        job.wait(TIMEOUT_S)
        problems = [f"{each} is left of the job whose launcher was killed" for each in job.remaining()]
    with LaunchedJob(folder) as job:
        job.start(*flags, *arguments(folder, updates, "--resume"), env=PATIENCE)
        trained = read(job, TIMEOUT_S)
        problems += [*hang_of(job), *(f"resumed: {each}" for each in checkpoint_problems(folder, saved))]
        if trained.code or trained.remaining or trained.hashes != expected.hashes:
            problems.append(f"resumed: code {trained.code}, weights {trained.hashes}, left {trained.remaining}")
        return SoakResult("launcher killed", seed, faults, problems, trained.seconds, job.report())


def newest_update(folder: Path) -> int:
    """Return the last update that a rank has written."""
    lines = read_lines(folder).values()
    return max((line["update"] for own in lines for line in own[-3:] if "update" in line), default=-1)


def fired(folder: Path, faults: list[dict[str, Any]]) -> list[str]:
    """Return in words the faults that came about."""
    return [
        f"{signal.Signals(order['signal']).name} at {order['point']} of update {order['update']} or later"
        + (f", {order['delay'] * 1000:.0f} ms after" if order["delay"] else "")
        for number, order in enumerate(faults)
        if (folder / f"fault.{number}").exists()
    ]


def hang_of(job: LaunchedJob) -> list[str]:
    """Return in words whether a job did not end by itself."""
    return ["the job did not end"] if job.has_timed_out else []
