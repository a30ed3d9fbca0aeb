"""What submission fixes of a job, and how it names everything that is wrong with one."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from known_configs import Known
from phalanx.errors import SpecError
from phalanx.jobs.service.resolve import resolve
from phalanx.jobs.sources.remote import RemoteObject
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.file import read
from phalanx.jobs.spec.training_job import TrainingJob


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name, text in {"src/train.py": "", "src/package/part.py": "", "src/run.sh": "", "data/x": "1"}.items():
        (tmp_path / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / name).write_text(text)
    return tmp_path / "base"


def resolved(base: Path, configs: Known | None = None, **fields: Any) -> TrainingJob:
    flags = {"name": "job", "command": "python train.py", "code": {"path": "src"}} | fields
    return resolve(read(flags=flags), configs=configs or Known(), home=base.parent / "home", base=base)


def test_names_become_what_they_mean_and_stay_so(base: Path) -> None:
    configs = Known(
        codes={"mine": {"path": str(base), "ref": "HEAD", "subdir": "."}},
        data={"mnist": {"name": "mnist", "kind": "local", "uri": "data", "mount": "in"}},
    )
    job = resolved(
        base, configs, code={"name": "mine", "subdir": "src"}, datasets=[{"name": "mnist", "mount": "mnist"}]
    )
    assert (job.code.name, job.code.path, job.code.subdir) == (None, str(base), "src")
    assert job.code.digest is not None
    assert job.datasets == (Dataset(name="mnist", kind="local", uri=str(base / "data"), mount="mnist"),)
    again = TrainingJob.model_validate_json(job.model_dump_json())
    assert resolve(again, configs=Known(), home=base.parent / "home", base=None) == job
    by_wire = TrainingJob.model_validate_json(
        read(flags={"name": "j", "command": "python src/train.py", "code": {"name": "mine"}}).model_dump_json()
    )
    assert resolve(by_wire, configs=configs, home=base.parent / "home", base=base).code == Code(
        path=str(base), digest=job.code.digest
    )


def test_everything_that_is_wrong_is_named_at_once(base: Path) -> None:
    with pytest.raises(SpecError) as caught:
        resolved(
            base,
            Known(secrets={"WANDB_KEY": "x"}),
            command="python trian.py",
            secrets=["WANDB_KYE"],
            datasets=[{"name": "a"}, {"name": "b", "uri": "absent"}, {"name": "c", "uri": "data", "mount": "src"}],
            checkpoint={"dir": "/proc/none"},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "job 'job' cannot run as it is written:"
    starts = (
        "  secrets: workspace default has no secret WANDB_KYE. Did you mean 'WANDB_KEY'?",
        "  datasets.a: there is no dataset a.",
        "  datasets.b: " + str(base / "absent") + " cannot be read on this machine",
        "  command: there is no file trian.py in the code. Did you mean 'train.py'?",
    )
    for start in starts:
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python train.py", None),
        ("python -u -m package.part --x", None),
        ("python -m json.tool", None),
        ("python -m pakage.part", "there is no module pakage.part in the code or installed here"),
        ("python lib/train.py", "there is no file lib/train.py in the code"),
        ("python /no/such.py", "there is no file /no/such.py on this machine"),
        ("bash run.sh 1", None),
        ("bash runn.sh", r"there is no file runn.sh in the code. Did you mean 'run.sh'\?"),
        ("bash -c 'x'", None),
        ("./run.sh", None),
        ("./walk.sh", "there is no file ./walk.sh in the code"),
        ("env A=1 python train.py", None),
        ("no-such-program x", "there is no program no-such-program on this machine"),
    ],
)
def test_the_script_of_a_command_is_in_the_code(base: Path, command: str, problem: str | None) -> None:
    if problem is None:
        assert resolved(base, command=command, launch="env").command == command
        return
    with pytest.raises(SpecError, match=problem):
        resolved(base, command=command, launch="env")


@pytest.mark.parametrize(
    ("field", "said", "problem"),
    [
        ("command", f"python {'a' * 300}.py", "command: .*File name too long"),
        ("code", {"path": "~nobody-at-all/code"}, "code.path: .*the name of no user"),
    ],
)
def test_what_the_system_refuses_is_a_problem_of_the_field(base: Path, field: str, said: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        resolved(base, **{field: said})


def test_what_pods_have_is_not_asked_of_this_machine(base: Path) -> None:
    nas = {"name": "n", "kind": "nas", "uri": "/mnt/n", "file_system": "fs", "mount": "/mnt/n"}
    job = resolved(base, backend="kubernetes", command="python -m megatron.run", datasets=[nas])
    assert job.datasets == (Dataset.model_validate(nas),)
    with pytest.raises(SpecError, match=r"datasets.d: .* which pods do not see"):
        resolved(base, backend="kubernetes", datasets=[{"name": "d", "uri": str(base / "data")}])


def test_a_mount_must_not_lie_where_the_code_has_something(base: Path) -> None:
    with pytest.raises(SpecError, match=r"datasets.d: the code has something at package itself"):
        resolved(base, datasets=[{"name": "d", "uri": "data", "mount": "package"}])


def test_a_checkpoint_folder_must_be_one_that_can_be_written(base: Path) -> None:
    assert resolved(base, checkpoint={"dir": str(base / "new" / "folder")}).checkpoint.dir == str(
        base / "new" / "folder"
    )
    assert not (base / "new").exists()
    with pytest.raises(SpecError, match=r"checkpoint.dir: .*train.py/x cannot be written"):
        resolved(base, checkpoint={"dir": str(base / "src" / "train.py" / "x")})


def test_data_must_fit_the_disk(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.jobs.sources.datasets.remote.look", lambda *_: RemoteObject("1", 100))
    data = [{"name": "d", "uri": "s3://bucket/x"}]
    assert resolved(base, datasets=data).datasets[0].size == 100
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("U", "free")(99))
    with pytest.raises(SpecError, match=r"datasets: 100 bytes are to be fetched, and .* has space for 99"):
        resolved(base, datasets=data)


def test_a_secret_of_the_data_is_looked_up_and_kept_out_of_the_job(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(dataset: Dataset, secret: str | None, _: object) -> RemoteObject:
        seen.append(secret)
        return RemoteObject("1", 1)

    monkeypatch.setattr("phalanx.jobs.sources.datasets.remote.look", look)
    data = [{"name": "d", "uri": "s3://bucket/x", "secret": "KEY"}]
    job = resolved(base, Known(secrets={"KEY": "hunter2"}), datasets=data)
    assert seen == ["hunter2"]
    assert "hunter2" not in job.model_dump_json()
    with pytest.raises(SpecError, match=r"datasets.d: there is no secret KEY"):
        resolved(base, datasets=data)
