"""`resolve`: validate a submitted spec, pin code and data versions, expand named configurations."""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from phalanx.errors import PhalanxError, SpecError, did_you_mean
from phalanx.i18n import tr
from phalanx.jobs.backend_registry import BACKENDS
from phalanx.jobs.limits import Limits
from phalanx.jobs.sources import code as codes
from phalanx.jobs.sources import datasets, mounts
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.command import PythonCommand, python_command
from phalanx.jobs.spec.file import validate
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase

logger = logging.getLogger("phalanx.jobs")

_SHELLS = ("sh", "bash", "dash", "zsh")


class WorkspaceConfigs:
    """The configurations and secrets of one workspace. A name that is not there raises NotFoundError."""

    def __init__(self, store: JobDatabase, workspace: str) -> None:
        self._store = store
        self._workspace = workspace

    def code(self, name: str) -> dict[str, Any]:
        """Return the fields of a code configuration."""
        return self._store.configs.get(self._workspace, "code", name).config

    def dataset(self, name: str) -> dict[str, Any]:
        """Return the fields of a dataset configuration."""
        return self._store.configs.get(self._workspace, "dataset", name).config

    def secret_names(self) -> Set[str]:
        """Return the names of all secrets."""
        return {secret.name for secret in self._store.secrets.names(self._workspace)}

    def secret(self, name: str) -> str:
        """Return the value of a secret."""
        return self._store.secrets.value(self._workspace, name)


def resolve(
    spec: TrainingJob, *, configs: WorkspaceConfigs, home: Path, base: Path | None, limits: Limits | None = None
) -> TrainingJob:
    """Return `spec` as it will run: configurations in place of names, commits of refs, versions of datasets.

    The tree of the code is kept under `home`. Resolving what was resolved checks it again and changes nothing. Warns of
    changes in a working copy that the commit lacks.

    Args:
        spec: The job as it was written.
        configs: What its names mean.
        home: PHALANX_HOME.
        base: Folder that relative paths are meant from; None refuses relative paths.
        limits: What may be named of this machine; None is no limit.

    Raises:
        SpecError: With every problem that was found: names that mean nothing, code, script or data that is not there,
            mounts that cannot be, disks that are too small.
    """
    problems = _Problems()
    problems.extend(_missing_secrets(spec, configs))
    if limits is not None:
        limits.check(spec)
    with problems.of("code"):
        code = _expand(spec.code, Code, configs.code)
        code = code if limits is None else limits.code(code)
        spec = spec.model_copy(update={"code": codes.pin(code, home, base, _value(configs, code.secret))})
    pinned = []
    for dataset in spec.datasets:
        with problems.of(f"datasets.{dataset.name}"):
            whole = _expand(dataset, Dataset, configs.dataset)
            whole = whole if limits is None else limits.dataset(whole, sees_local_paths=_sees_local_paths(spec))
            secret = _value(configs, whole.secret)
            egress = None if limits is None else limits.egress
            pinned.append(datasets.pin(whole, base, secret, on_this_machine=_sees_local_paths(spec), egress=egress))
    with problems.of("command"):
        problems.extend(_of_the_tree(spec, pinned, home, outside=limits is None))
    if _sees_local_paths(spec):
        problems.extend(_of_this_machine(spec, pinned, home))
    problems.raise_for(spec)
    _warn_of_unused(spec)
    return validate(TrainingJob, spec.model_dump() | {"datasets": [dataset.model_dump() for dataset in pinned]})


def _warn_of_unused(spec: TrainingJob) -> None:
    """Warn of options for another backend than the one that runs the job."""
    for backend in (BACKENDS.keys() & TrainingJob.model_fields) - {spec.backend}:
        for field in getattr(spec, backend).model_dump(exclude_defaults=True):
            logger.warning("%s.%s does nothing: the job runs on %s", backend, field, spec.backend)


def _sees_local_paths(spec: TrainingJob) -> bool:
    return BACKENDS[spec.backend].sees_local_paths


class _Problems(list[str]):
    """What is wrong with a job, a line each."""

    @contextmanager
    def of(self, field: str) -> Iterator[None]:
        """Note an error of ours, or of the system, as a problem of `field`, and continue."""
        try:
            yield
        except PhalanxError as error:
            message = str(error)
            self.append(message if message.startswith(field) else f"{field}: {message}")
        except OSError as error:
            self.append(f"{field}: {error.filename}: {error.strerror}. Correct it.")

    def raise_for(self, spec: TrainingJob) -> None:
        if self:
            lines = "\n  ".join(dict.fromkeys(self))
            raise SpecError(f"{tr('job {name!r} cannot run as it is written:', name=spec.name)}\n  {lines}")


ConfigT = TypeVar("ConfigT", Code, Dataset)


def _expand(field: ConfigT, model: type[ConfigT], config: Any) -> ConfigT:
    """Return the configuration that `field` names with what `field` changes of it, or `field` if it names none."""
    if field.name is None or (isinstance(field, Dataset) and field.kind is not None):
        return field
    # What equals a default was not set: a job that came over the network has every field.
    changed = {name: value for name, value in field if value != model.model_fields[name].default}
    if isinstance(field, Code):
        del changed["name"]
    return validate(model, config(field.name) | changed)


def _value(configs: WorkspaceConfigs, name: str | None) -> str | None:
    return None if name is None else configs.secret(name)


def _missing_secrets(spec: TrainingJob, configs: WorkspaceConfigs) -> list[str]:
    names = configs.secret_names()
    return [
        f"secrets: workspace {spec.workspace} has no secret {name}.{did_you_mean(name, names)} "
        f"Put it there: phalanx secret add {name}."
        for name in spec.secrets
        if name not in names
    ]


# -- checks of the code ----------------------------------------------------------------------------------------------


def _of_the_tree(spec: TrainingJob, pinned: list[Dataset], home: Path, *, outside: bool) -> list[str]:
    """Return what the tree of the code lacks, or has in the way; files elsewhere are looked at if `outside`."""
    folder = codes.tree(spec.code, home) / spec.code.subdir
    if spec.code.name is not None or not folder.is_dir():
        return []  # the code itself is a problem that was named
    taken = [d for d in pinned if d.mount and not d.mount.startswith("/") and os.path.lexists(folder / d.mount)]
    return _wrong_command(spec, folder, outside=outside) + [
        f"datasets.{dataset.name}: the code has something at {dataset.mount} itself. Mount it elsewhere."
        for dataset in taken
    ]


def _wrong_command(spec: TrainingJob, folder: Path, *, outside: bool) -> list[str]:
    on_this_machine = _sees_local_paths(spec)
    python = python_command(spec.command)
    if python is not None and python.module:
        return _wrong_module(python, folder, on_this_machine)
    if python is not None:
        return _wrong_file(str(python.script), folder, on_this_machine and outside)
    words = shlex.split(spec.command)
    if words[0].rpartition("/")[2] in _SHELLS:
        named = words[1:] and not words[1].startswith("-")
        return _wrong_file(words[1], folder, on_this_machine and outside) if named else []
    if "/" in words[0]:
        return _wrong_file(words[0], folder, on_this_machine and outside)
    if on_this_machine and shutil.which(words[0]) is None:
        return [f"command: there is no program {words[0]} on this machine. Install it, or correct the command."]
    return []


def _wrong_file(path: str, folder: Path, outside: bool) -> list[str]:
    """Return why there is no file `path` in the code in `folder`; one elsewhere is looked at if `outside`."""
    leads_out = path.startswith("/") or ".." in Path(path).parts
    if (leads_out and not outside) or (folder / path).is_file():
        return []
    beside = (folder / path).parent
    names = [entry.name for entry in beside.iterdir() if entry.is_file()] if beside.is_dir() else []
    where = tr("on this machine" if path.startswith("/") else "in the code")
    hint = did_you_mean(Path(path).name, names)
    return [
        "command: "
        + tr(
            "there is no file {path} {where}.{hint} Commit it, stop ignoring it, or correct the command.",
            path=path,
            where=where,
            hint=hint,
        )
    ]


def _wrong_module(python: PythonCommand, folder: Path, on_this_machine: bool) -> list[str]:
    name = str(python.module)
    parts = name.split(".")
    if all(part.isidentifier() for part in parts):  # a slash in a name would lead out of the folder
        inside = folder.joinpath(*parts)
        if inside.with_suffix(".py").is_file() or inside.is_dir():
            return []
        if not on_this_machine or importlib.util.find_spec(parts[0]) is not None:
            return []
    return [f"command: there is no module {name} in the code or installed here. Commit it, or correct the command."]


# -- checks of the machine -------------------------------------------------------------------------------------------


def _of_this_machine(spec: TrainingJob, pinned: list[Dataset], home: Path) -> list[str]:
    problems = _Problems()
    to_fetch = sum(d.size or 0 for d in pinned if not d.is_path and not datasets.content(d, home).exists())
    home.mkdir(parents=True, exist_ok=True)
    if to_fetch > (free := shutil.disk_usage(home).free):
        problems.append(f"datasets: {to_fetch} bytes are to be fetched, and {home} has space for {free}. Make space.")
    if BACKENDS[spec.backend].uses_this_machine:
        with problems.of("datasets"):
            mounts.check(mounts.binds(pinned, home))
    if spec.checkpoint.dir is not None and spec.checkpoint.dir.startswith("/"):
        there = next(folder for folder in (Path(spec.checkpoint.dir) / "x").parents if folder.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            problems.append(f"checkpoint.dir: {spec.checkpoint.dir} cannot be written. Let it be, or leave it out.")
    return problems
