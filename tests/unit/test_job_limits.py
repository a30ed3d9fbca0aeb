"""What a member of a server may name of its machine: what is listed, and nothing that tells what else is there."""

from __future__ import annotations

import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from known_configs import Known
from phalanx.errors import ConfigError, SpecError
from phalanx.jobs.limits import FILE, Limits
from phalanx.jobs.service.resolve import resolve
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob

NO_PATH_OF_THE_SERVER = {
    "code.ref": "a name in the repository",
    "command": "what it names outside the code is looked at by the rank alone",
    "env": "variables of the ranks",
    "datasets.file_system": "an id of a volume",
    "datasets.version": "an etag",
    "kubernetes.image": "a name in a registry",
    "kubernetes.pod_patch": "of pods; members may say it where the administrator allows that",
    "kubernetes.workload_patch": "of pods; members may say it where the administrator allows that",
    **dict.fromkeys(
        (
            *("kubernetes.namespace", "kubernetes.queue", "kubernetes.runtime", "kubernetes.service_account"),
            *("kubernetes.image_pull_secrets", "kubernetes.priority_class", "kubernetes.node_selector"),
            *("kubernetes.tolerations.key", "kubernetes.tolerations.value", "kubernetes.labels"),
            *("kubernetes.annotations", "slurm.partition", "slurm.account", "slurm.qos"),
        ),
        "a name in the cluster",
    ),
}
"""Fields that take text with a slash, and why that is never a path that the server opens."""

BASES: list[dict[str, Any]] = [
    {"datasets": [{"name": "d", "kind": kind, "uri": uri, **more}]}
    for kind, uri, more in (
        ("local", "/roots/d", {}),
        ("nas", "/roots/d", {"file_system": "f"}),
        ("http", "http://127.0.0.1:9/d", {}),
    )
]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a job that holds no other fields."""
    for name, field in model.model_fields.items():
        inner = [one for one in parts(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        yield from fields(inner[0], f"{prefix}{name}.") if inner else [f"{prefix}{name}"]


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from parts(inner)


def jobs_with(field: str, text: str) -> Iterator[TrainingJob]:
    """Every job that is one by its schema with `text` in a field."""
    outer, _, last = field.rpartition(".")
    if outer == "kubernetes.tolerations":
        outer, text = "kubernetes", {last: text}  # type: ignore[assignment]
        last = "tolerations"
    for base in BASES if outer == "datasets" else [{}]:
        for value in (text, [text], {"A": text}):
            for backend in ("local", "slurm"):
                said: dict[str, Any] = {
                    **{"name": "job", "command": "env true", "code": {"digest": "0" * 64}, "backend": backend},
                    **base,
                }
                if outer == "datasets":
                    said["datasets"] = [said["datasets"][0] | {last: value}]
                elif outer:
                    alone = field in ("code.path", "code.git")
                    said[outer] = ({} if alone else said.get(outer, {})) | {last: value}
                else:
                    said[last] = value
                try:
                    yield TrainingJob.model_validate(said)
                except ValidationError:
                    continue


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the tree of code that jobs name."""
    tree = tmp_path / "home" / "code" / ("0" * 64)
    tree.mkdir(parents=True)
    (tree / "train.py").touch()
    return tmp_path / "home"


def outcome(job: TrainingJob, home: Path, *roots: Path) -> str:
    limits = Limits(home, tuple(map(str, roots)))
    try:
        return resolve(job, configs=Known(), home=home, base=None, limits=limits).model_dump_json()
    except SpecError as error:
        return f"SpecError {error}"


@pytest.mark.parametrize("field", list(fields(TrainingJob)))
def test_every_path_that_a_job_can_name_is_refused_in_the_same_words_whether_it_is_there_or_not(
    field: str, home: Path, tmp_path: Path
) -> None:
    there, away = tmp_path / "there", tmp_path / "away_"
    there.mkdir()
    (there / "train.py").touch()
    roots = tmp_path / "roots"
    roots.mkdir()
    (roots / "link").symlink_to(tmp_path)
    for text in ("{}", "file://{}", "--chdir={}", "{}/train.py", f"{roots}/../{{}}", f"{roots}/link/{{}}"):
        spelled = [text.format(path if text[0] != "/" else path.name) for path in (there, away)]
        for one, other in zip(*(list(jobs_with(field, path)) for path in spelled), strict=True):
            found = outcome(one, home, roots), outcome(other, home, roots)
            assert found[0] == found[1].replace(away.name, there.name), spelled[0]
            if field not in NO_PATH_OF_THE_SERVER and (text in ("{}", "{}/train.py") or field == "slurm.options"):
                assert found[0].startswith("SpecError"), f"{field} took {spelled[0]}: check it in jobs/limits"
                assert "may not name" in found[0]


def test_there_is_a_reason_for_every_field_that_is_left_out() -> None:
    assert NO_PATH_OF_THE_SERVER.keys() <= set(fields(TrainingJob))


def test_paths_under_a_root_are_taken_as_what_they_lead_to(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "digits").mkdir(parents=True)
    (data / "now").symlink_to("digits")
    limits = Limits(tmp_path / "home", (str(data),))
    assert limits.code(Code(path=str(data / "now"))).path == str(data / "digits")
    assert limits.code(Code(git=f"file://{data}/now")).git == str(data / "digits")
    assert limits.code(Code(git="https://example.org/x.git")).git == "https://example.org/x.git"
    taken = limits.dataset(
        Dataset(name="d", kind="local", uri=str(data / "now"), mount=str(data / "m")), sees_local_paths=True
    )
    assert (taken.uri, taken.mount) == (str(data / "digits"), str(data / "m"))
    pod = Dataset(name="d", kind="nas", uri="/mnt/x", file_system="f", mount="/x")
    assert limits.dataset(pod, sees_local_paths=False) == pod


def test_a_root_never_reaches_the_home(tmp_path: Path) -> None:
    home = tmp_path / "state" / "home"
    home.mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    limits = Limits(home, (str(tmp_path), "/"))
    for path in (home, home / "key", home.parent, tmp_path, tmp_path / "link", Path("/")):
        with pytest.raises(SpecError, match="may not name"):
            limits.code(Code(path=str(path)))


def test_a_repository_on_the_server_is_read_under_a_root_alone(home: Path, tmp_path: Path) -> None:
    for name in ("roots/open", "closed"):
        (tmp_path / name).mkdir(parents=True)
        for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty"]):
            more = ["-m", "x"] if words[-1] == "--allow-empty" else []
            subprocess.run(["git", "-C", tmp_path / name, *words, *more], check=True)
    job = TrainingJob(name="job", command="env true", code=Code(git=str(tmp_path / "roots" / "open")))
    assert '"commit":"' in outcome(job, home, tmp_path / "roots")
    closed = job.model_copy(update={"code": Code(git=f"file://{tmp_path}/roots/%2e%2e/closed")})
    assert "may not name" in outcome(closed, home, tmp_path / "roots")


def test_what_the_administrator_writes_is_read_again_and_nothing_is_taken_while_it_is_wrong(tmp_path: Path) -> None:
    assert Limits.read(tmp_path) == Limits(tmp_path)
    (tmp_path / FILE).write_text("roots: [/data]\nbackends: [kubernetes]\nnamespaces: [team]\n")
    limits = Limits.read(tmp_path)
    assert (limits.roots, limits.backends, limits.namespaces) == (("/data",), ("kubernetes",), ("team",))
    job = TrainingJob(name="job", command="env true")
    with pytest.raises(SpecError, match="takes jobs for kubernetes, not local"):
        limits.check(job)
    with pytest.raises(SpecError, match="made in team, not in default"):
        limits.check(job.model_copy(update={"backend": "kubernetes"}))
    patch = {"namespace": "team", "pod_patch": {"spec": {"hostNetwork": True}}}
    patched = TrainingJob.model_validate({**job.model_dump(), "backend": "kubernetes", "kubernetes": patch})
    with pytest.raises(SpecError, match="pod_patch and workload_patch: members"):
        limits.check(patched)
    Limits(tmp_path, kubernetes_patch=True).check(patched)
    for wrong in ("roots: [data]", "roots: [/a/../b]", "root: [/data]", "- /data", "roots: {", "home: /x"):
        (tmp_path / FILE).write_text(wrong)
        with pytest.raises(ConfigError, match="nothing is taken from its members"):
            Limits.read(tmp_path)
