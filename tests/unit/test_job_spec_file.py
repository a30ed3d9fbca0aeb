"""Jobs from files, settings and flags, and what is said of mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from phalanx.errors import SpecError
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.file import read, validate
from phalanx.jobs.spec.training_job import TrainingJob

MNIST = """
name: mnist
command: python train.py --epochs 10
code: {git: "https://host/repo.git", ref: main}
datasets: [{name: mnist, mount: data}]
env: {LR: "0.01"}
resources: {nodes: 2, procs_per_node: 2, cpu: 4, memory: 8Gi}
retries: {max: 3, on: [node_failure, hang], hang_after: 30m}
"""


def test_yaml_json_and_a_file_say_the_same(tmp_path: Path) -> None:
    job = read(MNIST)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert read(tmp_path / "job.json") == job
    assert job.resources.memory == 8 * 2**30
    assert job.retries.hang_after == 1800
    assert [cause.value for cause in job.retries.on] == ["node_failure", "hang"], "`on` is a word, not true"


def test_flags_come_before_settings_and_settings_before_the_file() -> None:
    job = read(
        MNIST,
        settings=["resources.nodes=3", "resources.gpu=1", "env.LR='1e-3'", "code=.", "code.subdir=src", "code.path=x"],
        flags={"resources.nodes": 4, "workspace": None, "priority": 9},
    )
    assert (job.resources.nodes, job.resources.gpu, job.resources.cpu) == (4, 1, 4)
    assert (job.env, job.workspace, job.priority) == ({"LR": "1e-3"}, "default", 9)
    assert job.code == Code(path="x", subdir="src")
    assert read(flags={"name": "a", "command": "python t.py"}).code == Code(path=".")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam: x", r"nam: there is no such field. Did you mean 'name'\?"),
        ("resources: {ndoes: 2}", r"resources.ndoes: there is no such field. Did you mean 'nodes'\?"),
        ("datasets: [{name: a, mont: b}]", r"datasets.0.mont: there is no such field. Did you mean 'mount'\?"),
        ("command: ''", "command: the command is empty"),
        ("{}", "command: is missing. What starts the training"),
        ("name: My_Job", 'name: "My_Job" cannot be; write small letters, digits and dashes, 40 at most'),
        ("backend: slurmm", r"backend: \"slurmm\" is none of 'local', 'slurm', 'kubernetes'. Did you mean 'slurm'\?"),
        ("retries: {on: [hangs]}", r"retries.on.0: .* Did you mean 'hang'\?"),
        ("resources: {nodes: 0}", "resources.nodes: input should be greater than or equal to 1, found 0"),
        ("resources: {memory: lots}", "resources.memory: 'lots' is no amount of memory; write it as 8Gi"),
        ("max_runtime: soon", "max_runtime: 'soon' is no length of time"),
        ("checkpoint: {dir: ../x}", "checkpoint.dir: '../x' leads out of its folder"),
        ("checkpoint: {dir: /a/../b}", "checkpoint.dir: '/a/../b' leads out of its folder"),
        ("env: {LR: 0.01}", "env.LR: the value is no text; write it in quotes"),
        ("command: python a.py && echo", r"started without a shell, which '&&' needs"),
        ("command: python a.py --data $HOME/x", r"started without a shell, which '\$HOME' needs"),
        ("command: python 'a.py", "close every quote"),
        ("name: a\nname: b", "'name' is there twice"),
        ("[1, 2]", r"holds \[1, 2\], no job"),
        ("a: [", "neither YAML nor JSON"),
    ],
)
def test_a_mistake_is_named_with_its_field(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"env.RANK": "0"}, "RANK is set by the launch"),
        ({"env.KEY": "a", "secrets": ["KEY"]}, "KEY is in env and in secrets"),
        ({"launch": "torchrun", "servers.count": 2}, "servers are started by launch phalanx, not torchrun"),
    ],
)
def test_fields_that_do_not_go_together_are_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(MNIST, flags=flags)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        read("name: A\nresources: {nodes: 0, cpus: 1}\ncode: {git: 'ext::sh -c x', subdir: ../up}")
    for field in ("name:", "command:", "resources.nodes:", "resources.cpus:", "code.git:", "code.subdir:"):
        assert f"\n  {field}" in str(caught.value)


def test_a_setting_that_sets_nothing_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"'nodes' sets nothing\. Write FIELD=VALUE"):
        read(MNIST, settings=["nodes"])
    with pytest.raises(SpecError, match="datasets is a list"):
        read(MNIST, settings=["datasets.mount=x"])
    with pytest.raises(SpecError, match=r"cannot read the job in .*absent\.yaml"):
        read(Path("absent.yaml"))


def test_commands_with_a_shell_of_their_own_stay_as_they_are() -> None:
    for command in (
        "bash -c 'a && b\nc'",
        'bash -c "echo $HOME | cat"',
        "python t.py --tag '$5'",
        "python t.py --x=#1",
    ):
        assert read(flags={"name": "a", "command": command}).command == command


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (".", Code(path=".")),
        ("git+https://host/a.git@feature/x", Code(git="https://host/a.git", ref="feature/x")),
        ("git+https://user@host/a.git", Code(git="https://user@host/a.git")),
        ("git+ssh://git@host/a.git@v1", Code(git="ssh://git@host/a.git", ref="v1")),
        ("git+file:///a/b@main", Code(git="file:///a/b", ref="main")),
    ],
)
def test_code_may_be_one_word(said: str, code: Code) -> None:
    assert Code.model_validate(said) == code


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"git": "ext::sh -c touch% x"}, "runs a command"),
        ({"git": "--upload-pack=touch x"}, "begins with a dash"),
        ({"git": "ssh://-oProxyCommand=x/y"}, "names no host"),
        ({"git": "ftp://host/x"}, "ftp:// is no transport"),
        ({"git": "git://host/x"}, "git:// is no transport"),
        ({"git": "host:path"}, "no address of a repository"),
        ({"git": "https://host/x", "ref": "--all"}, "is no ref"),
        ({"git": "https://host/x", "ref": "a b"}, "is no ref"),
        ({"git": "https://host/x", "ref": "a..b"}, "is no ref"),
        ({"git": "https://host/x", "subdir": "../y"}, "leads out of its folder"),
        ({"git": "https://host/x", "subdir": "/etc"}, "leads out of its folder"),
        ({"git": "https://host/x", "path": "."}, "found git and path"),
        ({}, "found none"),
        ("ext::sh -c x", "runs a command"),
        ({"path": ""}, "is not a folder"),
        ({"path": ".", "commit": "0" * 40}, "commit belongs to git"),
        ({"git": "ssh://git@host/x", "secret": "T"}, "a secret is a token for https://"),
        ("https://host/x.git", r"write git\+https://host/x.git"),
    ],
)
def test_code_that_could_do_harm_or_nothing_is_refused(said: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate(Code, said)  # type: ignore[arg-type]


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    for model, said in (
        (Code, {"git": "https://me:hunter2@host/x"}),
        (Dataset, {"name": "a", "uri": "https://me:hunter2@host/x"}),
    ):
        with pytest.raises(SpecError, match="store a secret") as caught:
            validate(model, said)  # type: ignore[type-var]
        assert "hunter2" not in str(caught.value)


def test_the_kind_of_a_dataset_is_told_by_its_address() -> None:
    kinds = {uri: validate(Dataset, {"name": "a", "uri": uri}).kind for uri in ("/data", "s3://b/c", "https://h/f.zip")}
    assert kinds == {"/data": "local", "s3://b/c": "s3", "https://h/f.zip": "http"}
    assert Dataset.model_validate("mnist:/mnt/data") == Dataset(name="mnist", mount="/mnt/data")
    assert Dataset.model_validate("mnist").variable == "PHALANX_DATASET_MNIST"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"uri": "hdfs://x/y"}, "hdfs:// is no address of a dataset"),
        ({"uri": "s3:///x"}, "names no bucket"),
        ({"kind": "oss", "uri": "oss://b/x"}, "oss needs an endpoint"),
        ({"kind": "nas", "uri": "/mnt/x"}, "nas needs the id"),
        ({"kind": "nas", "uri": "nfs://host/x", "file_system": "f"}, "is no path"),
        ({"kind": "s3"}, "needs a uri"),
        ({"kind": "s3", "uri": "/x"}, "is not of kind s3"),
        ({"uri": "/x", "sha256": "0" * 64}, "sha256 is for http"),
        ({"uri": "/x", "sha256": "12"}, "write 64 hexadecimal digits"),
        ({"uri": "https://h/x", "secret": "T"}, "secret is for s3 and oss"),
        ({"uri": "https://h/x", "readonly": False}, "can only be read"),
        ({"mount": "../up"}, "is no place for a dataset"),
        ({"mount": "/etc/x"}, "the system's own"),
        ({"mount": "/"}, "the system's own"),
    ],
)
def test_datasets_that_cannot_be_are_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate(Dataset, {"name": "a", **said})


def test_datasets_that_lie_in_each_other_are_refused() -> None:
    with pytest.raises(SpecError, match="mounts data and data/x lie in each other"):
        read(flags={"name": "a", "command": "python t.py", "datasets": ["a:data", "b:data/x"]})
    with pytest.raises(SpecError, match="dataset a is there twice"):
        read(flags={"name": "a", "command": "python t.py", "datasets": ["a:data", "a:other"]})


def test_the_schema_takes_what_the_model_takes() -> None:
    checked = jsonschema.Draft202012Validator(TrainingJob.model_json_schema())
    checked.validate({"name": "a", "command": "x", "resources": {"memory": "8Gi"}, "max_runtime": "2h", "grace": 5})
    checked.validate(json.loads(read(MNIST).model_dump_json()))
    assert not checked.is_valid({"name": "a", "command": "x", "commnd": "y"})
    assert TrainingJob.model_json_schema()["properties"]["command"]["description"].startswith(
        "What starts the training"
    )
