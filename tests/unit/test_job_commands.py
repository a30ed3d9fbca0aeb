"""The commands of jobs: what they print, their exit codes, and that secrets pass through no argument."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from job_fakes import OWNER, VALUE, FakeBackend
from phalanx import ui
from phalanx.checkpoint.folder.marker import COMPLETE
from phalanx.cli import output
from phalanx.cli.group import phalanx
from phalanx.cli.jobs import exit_code
from phalanx.errors import ConfigError, PhalanxError, SpecError
from phalanx.i18n import wording
from phalanx.jobs import paths
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.usage import Sample
from phalanx.jobs.connect import open_jobs
from phalanx.jobs.models import Actor, Cause, Failure, JobState, MemberRole
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.service.service import JobService
from phalanx.jobs.store import JobDatabase
from phalanx.ui.i18n import WORDS

Phalanx = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobDatabase]:
    with JobDatabase(None, tmp_path / "home") as store:
        yield store


@pytest.fixture
def command(store: JobDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phalanx:
    """Run a command of ours in a folder with code, on a store with a backend that starts nothing."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("COLUMNS", "80")
    output.words.cache_clear()

    @contextmanager
    def here() -> Iterator[Jobs]:
        yield JobService(store, {"local": FakeBackend()}, OWNER, wake=lambda _: None)

    monkeypatch.setattr(output, "open_jobs", here)

    def run(*words: str, fails: bool = False, text: str | None = None) -> Result:
        result = CliRunner().invoke(phalanx, list(words), input=text, catch_exceptions=False)
        assert fails or result.exit_code == 0, result.output
        return result

    return run


def submitted(command: Phalanx, *flags: str) -> str:
    return command("job", "submit", "--name", "mnist", *flags, "--", "python", "train.py").stdout.strip()


def ended(store: JobDatabase, job: str, state: JobState, failure: Failure | None = None) -> str:
    store.jobs.begin_attempt(job)
    store.jobs.change(job, JobState.RUNNING, "on this machine")
    if state is JobState.STOPPED:
        store.jobs.change(job, JobState.STOPPING)
    return store.jobs.change(job, state, "it is over", failure=failure).id


def write_log(store: JobDatabase, job: str, text: str, rank: int = 0, attempt: int = 1) -> None:
    folder = paths.logs(paths.attempt_folder(store.home, job, attempt))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"workerlog.{rank}").write_text(text)


def test_a_command_is_submitted_with_flags_in_either_spelling(command, store):
    job = store.jobs.get(
        submitted(command, "--procs_per_node", "2", "--memory", "2Gi", "--env", "LR=0.1", "--max-runtime", "1h")
    )
    assert job.spec["command"] == "python train.py"
    assert job.spec["resources"]["procs_per_node"] == 2
    assert (job.spec["env"], job.spec["max_runtime"]) == ({"LR": "0.1"}, 3600.0)
    assert Path(job.spec["code"]["path"]) == Path.cwd()


def test_a_file_is_submitted_with_paths_from_its_folder_and_changed_by_flags(command, store, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "go.py").write_text("pass\n")
    file = folder / "job.yaml"
    file.write_text("name: mnist\ncommand: python go.py\nresources: {nodes: 1, cpu: 2}\n")
    made = json.loads(command("job", "submit", str(file), "--priority", "7", "--set", "retries.max=2", "--json").stdout)
    assert (made["priority"], made["spec"]["retries"]["max"], made["spec"]["resources"]["cpu"]) == (7, 2, 2.0)
    assert made["spec"]["code"]["path"] == str(folder)
    text = f"name: mnist\ncommand: python go.py\ncode: {folder}\n"
    assert command("job", "submit", "-", text=text).stdout.startswith("mnist-")


def test_code_of_a_flag_takes_the_place_of_the_files_and_settings_add_to_it(command, store, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("name: mnist\ncommand: python train.py\ncode: {path: gone, subdir: x}\n")
    (Path.cwd() / "inner").mkdir()
    (Path.cwd() / "inner" / "train.py").write_text("pass\n")
    job = command("job", "submit", str(file), "--code", ".", "--set", "code.subdir=inner").stdout.strip()
    code = store.jobs.get(job).spec["code"]
    assert (code["path"], code["subdir"]) == (str(Path.cwd()), "inner")
    command("code", "add", "here", ".")
    assert store.jobs.get(submitted(command, "--code", "here")).spec["code"]["path"] == str(Path.cwd())


def test_a_dry_run_prints_what_would_be_handed_over_and_keeps_nothing(command, store):
    command("secret", "add", "KEY", text=VALUE)
    said = ["--name", "mnist", "--secret", "KEY", "--", "python", "train.py"]
    dry, rendered = command("job", "submit", "--dry-run", *said), command("job", "render", *said)
    assert dry.stdout == rendered.stdout == "python train.py {'KEY': '******'}\n"
    assert store.jobs.find() == []


def test_nothing_to_submit_says_what_to_write(command):
    with pytest.raises(SpecError, match=r"Give a file, `phalanx job submit job.yaml`"):
        command("job", "submit")
    with pytest.raises(SpecError, match="--env 'LR' has no value"):
        submitted(command, "--env", "LR")


def test_jobs_are_listed_within_80_columns_with_reasons(command, store):
    queued, running, failed = (submitted(command) for _ in range(3))
    store.jobs.explain({queued: "needs 4 cpu, 2 are free; 3rd in line"})
    store.jobs.begin_attempt(running)
    store.jobs.change(running, JobState.RUNNING)
    ended(store, failed, JobState.FAILED, Failure(Cause.OOM, "rank 1 ran out of memory", rank=1))
    listed = command("job", "list").stdout
    assert max(map(len, listed.splitlines())) <= 80
    assert "3rd in line" in " ".join(listed.split())
    assert "out of memory: rank 1 ran out of memory" in " ".join(listed.replace("\n", " ").split())
    assert [job["id"] for job in json.loads(command("job", "list", "--state", "failed", "--json").stdout)] == [failed]
    few = command("job", "list", "--limit", "1")
    assert failed in few.stdout
    assert queued not in few.stdout
    assert "The newest 1." in few.stderr


def test_a_job_is_shown_with_phases_attempts_and_why_it_failed(command, store):
    job = submitted(command)
    failure = Failure(Cause.USER_CODE, "ValueError: x", node=0, rank=1, exit_code=1, detail="Traceback\n  line 3")
    ended(store, job, JobState.FAILED, failure)
    text = command("job", "show", job).stdout
    for part in (
        "python train.py",
        "ValueError: x",
        "rank 1, exit code 1",
        "  line 3",
        "queued",
        "running",
        "it is over",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(command("job", "show", job, "--json").stdout)
    assert found["attempts"][0]["failure"]["cause"] == "user_code"
    assert len(found["events"]) == 4
    assert "failed: it is over" in command("job", "events", job).stdout


def test_what_a_job_uses_is_shown(command, store):
    job = submitted(command)
    assert json.loads(command("job", "show", job, "--json").stdout)["usage"] == []
    store.jobs.begin_attempt(job)
    assert "Peak" not in command("job", "show", job).stdout
    folder = paths.attempt_folder(store.home, job, 1)
    folder.mkdir(parents=True)
    for number, memory in enumerate((3 * 2**30, 2**30)):
        usage.append(folder, 0, Sample(number, 1.7e9, 1.25, memory, 3 * 2**30, 0.5, 2**29))
    text = command("job", "show", job).stdout
    assert all(part in text for part in ("Peak", "1.2", "1.0 GiB", "3.0 GiB", "0.5, 0.5 GiB"))
    assert max(map(len, text.splitlines())) <= 80
    (node,) = json.loads(command("job", "show", job, "--json").stdout)["usage"]
    assert (node["node"], [one["number"] for one in node["samples"]]) == (0, [1])


def _save(folder: Path, step: int, bytes_: int, marker: dict[str, object] | None = None) -> None:
    """Write what stands for a checkpoint; one without a marker did not end."""
    (folder / f"step-{step}").mkdir(parents=True)
    (folder / f"step-{step}" / "rank-0-5f0c1b2a.safetensors").write_bytes(bytes(bytes_))
    if marker is not None:
        named = {"save": "5f0c1b2a", "sequence": step, "step": step, "manifest": "manifest-5f0c1b2a.json", "sha256": ""}
        (folder / f"step-{step}" / COMPLETE).write_text(json.dumps(named | {"version": 1} | marker))


def test_the_checkpoints_that_a_job_saved_are_listed(command, store):
    job = submitted(command)
    assert json.loads(command("job", "checkpoints", job, "--json").stdout) == []
    assert "PHALANX_CHECKPOINT_DIR" in command("job", "checkpoints", job).stderr
    shared = paths.checkpoints(paths.job_folder(store.home, job), None)
    _save(shared, 100, 3 << 20, {})
    _save(shared / "best", 90, 1 << 20, {"version": 99})
    _save(shared, 200, 100)
    found = json.loads(command("job", "checkpoints", job, "--json").stdout)
    states = {one["folder"]: (one["step"], one["state"]) for one in found}
    assert states == {
        "step-100": (100, "complete"), "best/step-90": (90, "unreadable"), "step-200": (200, "unfinished"),
    }  # fmt: skip
    assert next(one["bytes"] for one in found if one["step"] == 100) > 3 << 20
    text = command("job", "checkpoints", job).stdout
    assert all(part in text for part in ("step-100", "3 MiB", "complete", "not finished", "version 99"))
    assert max(map(len, text.splitlines())) <= 80


def test_a_log_that_is_not_there_is_told_from_an_empty_one(command, store):
    job = submitted(command)
    ended(store, job, JobState.SUCCEEDED)
    write_log(store, job, "")
    assert f"{job} wrote nothing to the log of 0." in command("job", "logs", job).stderr
    assert f"{job} has no log of 7." in command("job", "logs", job, "--rank", "7").stderr


def test_ctrl_c_while_a_log_is_followed_leaves_the_job_running(command, store, monkeypatch):
    job = submitted(command)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.job_logs.follow", interrupted)
    result = command("job", "logs", "-f", job, fails=True)
    assert result.exit_code == 130
    assert f"{job} continues" in result.stderr
    assert store.jobs.get(job).state is JobState.QUEUED


def test_a_token_says_whose_it_is(command):
    assert "token of ann" in command("token", "add", "laptop", "--owner", "ann").stderr
    assert "--owner ann" in command("workspace", "member", "add", "ann", "viewer").stderr


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ((), "没有要提交的作业"),
        (("nothing.yaml",), "无法读取 nothing.yaml 中的作业：No such file or directory。"),
        (("--name", "x", "--", "python", "trian.py"), "代码中没有文件 trian.py。 Did you mean 'train.py'"),
        (("--name", "x", "-w", "vison", "--", "python", "train.py"), "没有工作空间 'vison'"),
    ],
)
def test_what_must_be_corrected_is_said_in_chinese(command, monkeypatch, said, match):
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(PhalanxError, match=match):
        command("job", "submit", *said)


def test_messages_are_chinese_for_a_chinese_user(command, store, monkeypatch):
    monkeypatch.setenv("PHALANX_LANG", "zh")
    job = submitted(command)
    store.jobs.stop(job, "")
    assert "已停止" in command("job", "list").stdout
    assert f"{job}：已停止" in command("job", "wait", job, fails=True).stderr
    failed = submitted(command)
    ended(store, failed, JobState.FAILED, Failure(Cause.USER_CODE, "rank 1 raised ValueError: x", node=0, rank=1))
    for words in (("job", "list"), ("job", "show", failed)):
        assert "进程 1 抛出 ValueError: x" in command(*words).stdout.replace("\n", "")


def test_logs_of_a_rank_are_printed_with_secrets_struck_out(command, store):
    command("secret", "add", "KEY", text=VALUE)
    job = submitted(command, "--secret", "KEY")
    assert "has written nothing there yet" in command("job", "logs", job).stderr
    ended(store, job, JobState.SUCCEEDED)
    write_log(store, job, f"zero {VALUE}\n")
    write_log(store, job, "one\n", rank=1)
    assert command("job", "logs", job).stdout.startswith("zero ")
    assert VALUE not in command("job", "logs", job).output
    assert command("job", "logs", job, "--rank", "1").stdout == "one\n"
    assert command("job", "logs", job, "--list").stdout == "0\n1\n"
    assert "Its logs: 0, 1." in command("job", "logs", job, "--rank", "node-0").stderr


def test_following_goes_on_with_the_next_attempt_and_ends_with_the_job(command, store):
    job = submitted(command)
    store.jobs.begin_attempt(job)
    store.jobs.change(job, JobState.RUNNING)
    write_log(store, job, "first\n")
    store.jobs.change(job, JobState.RESTARTING, failure=Failure(Cause.NODE_FAILURE, "gone"))
    ended(store, job, JobState.SUCCEEDED)
    write_log(store, job, "second\n", attempt=2)
    assert command("job", "logs", "-f", job).stdout == "second\n"
    assert command("job", "logs", "-f", "--attempt", "1", job).stdout == "first\n"


def test_run_ends_with_the_code_of_the_job(command, store, monkeypatch):
    created = JobService.submit

    def submit(self: JobService, *args: object, **named: object) -> object:
        made = created(self, *args, **named)  # type: ignore[arg-type]
        ended(store, made.id, JobState.FAILED, Failure(Cause.USER_CODE, "exit code 7", rank=0, exit_code=7))
        write_log(store, made.id, "training\n")
        return store.jobs.get(made.id)

    monkeypatch.setattr(JobService, "submit", submit)
    result = command("job", "run", "--name", "mnist", "--", "python", "train.py", fails=True)
    assert (result.exit_code, result.stdout) == (7, "training\n")
    assert "error in the training code: exit code 7" in result.stderr


@pytest.mark.parametrize(
    ("state", "failure", "code"),
    [
        (JobState.SUCCEEDED, None, 0),
        (JobState.STOPPED, None, 130),
        (JobState.FAILED, Failure(Cause.OOM, "", exit_code=-9), 137),
        (JobState.FAILED, Failure(Cause.SETUP, ""), 1),
        (JobState.FAILED, Failure(Cause.TIMEOUT, "", exit_code=0), 1),
    ],
)
def test_exit_codes(command, store, state, failure, code):
    assert exit_code(store.jobs.get(ended(store, submitted(command), state, failure))) == code


def test_wait_gives_up_after_its_time(command):
    job = submitted(command)
    result = command("job", "wait", job, "--timeout", "0", fails=True)
    assert result.exit_code == 124
    assert f"{job} has not ended after 0 s; it is queued." in result.stderr


def test_logs_waits_and_renderings_are_printed_as_json(command, store):
    job = submitted(command)
    ended(store, job, JobState.FAILED, Failure(Cause.USER_CODE, "", rank=0, exit_code=3))
    write_log(store, job, "one\ntwo\n")
    (part,) = map(json.loads, command("job", "logs", job, "--json").stdout.splitlines())
    assert (part["job"], part["rank"], part["text"], part["ended"]) == (job, "0", "one\ntwo\n", True)
    assert [json.loads(line) for line in command("job", "logs", "-f", job, "--json").stdout.splitlines()] == [
        part | {"attempt": 1}
    ]
    assert json.loads(command("job", "logs", job, "--list", "--json").stdout) == ["0"]
    waited = command("job", "wait", job, "--json", fails=True)
    assert waited.exit_code == 3
    assert [record["state"] for record in json.loads(waited.stdout)] == ["failed"]
    # The time is up for the second, whatever became of the first.
    late = command("job", "wait", job, submitted(command), "--timeout", "0", "--json", fails=True)
    assert (late.exit_code, [record["state"] for record in json.loads(late.stdout)]) == (124, ["failed", "queued"])
    words = ("--name", "mnist", "--", "python", "train.py")
    text = command("job", "render", *words).stdout.rstrip("\n")
    for verb in (("render",), ("submit", "--dry-run")):
        assert json.loads(command("job", *verb, "--json", *words).stdout) == {"text": text}


def test_what_is_added_and_removed_is_printed_as_json(command, store, tmp_path):
    added = (
        ("code", "here", ".", ()),
        ("dataset", "digits", str(tmp_path), ()),
        ("secret", "KEY", None, ()),
        ("workspace", "vision", None, ("--yes",)),
        ("token", "laptop", None, ()),
    )
    for kind, name, value, sure in added:
        words = [name] if value is None else [name, value]
        entry = json.loads(command(kind, "add", *words, "--json", text="abc" if kind == "secret" else None).stdout)
        assert entry.get("token", entry)["name"] == name
        removed = json.loads(command(kind, "rm", name, *sure, "--json").stdout)
        assert removed.pop("removed") == name
        assert removed == ({} if kind in ("workspace", "token") else {"workspace": "default"})
    member = ("workspace", "member")
    assert json.loads(command(*member, "add", "ann", "viewer", "--json").stdout)["role"] == "viewer"
    assert json.loads(command(*member, "rm", "ann", "--json").stdout) == {"removed": "ann", "workspace": "default"}


def test_jobs_are_stopped_and_tried_again(command, store):
    job = submitted(command)
    assert f"{job}: stopped" in command("job", "stop", job).stderr
    again = command("job", "retry", job).stdout.strip()
    assert store.jobs.get(again).retry_of == job
    assert f"Retry of {job}" in " ".join(command("job", "show", again).stdout.split())


def test_configurations_are_kept_listed_and_removed(command, store, tmp_path):
    command("code", "add", "resnet", "git+https://git.example/resnet.git@v1", "--subdir", "src")
    command("code", "add", "here", ".")
    command("dataset", "add", "digits", str(tmp_path), "--mount", "data")
    command("dataset", "add", "pictures", "s3://bucket/pictures", "--endpoint", "https://s3.example")
    code, here = (one.config for one in (store.configs.get("default", "code", name) for name in ("resnet", "here")))
    assert (code["git"], code["ref"], code["subdir"]) == ("https://git.example/resnet.git", "v1", "src")
    assert here["path"] == str(Path.cwd())
    assert store.configs.get("default", "dataset", "digits").config["kind"] == "local"
    assert "pictures" in command("dataset", "list").stdout
    for kind, name in (("code", "resnet"), ("dataset", "digits")):
        assert name in command(kind, "list").stdout
        command(kind, "rm", name)
        assert name not in [one["name"] for one in json.loads(command(kind, "list", "--json").stdout)]


def test_workspaces_and_members(command, store):
    command("workspace", "add", "vision")
    command("workspace", "member", "add", "ann", "developer", "-w", "vision")
    assert "ann (developer)" in command("workspace", "list").stdout
    command("workspace", "member", "rm", "ann", "-w", "vision")
    assert command("workspace", "rm", "vision", text="n\n", fails=True).exit_code == 1
    command("workspace", "rm", "vision", "--yes")
    assert [one.name for one in store.workspaces.find()] == ["default"]


def test_the_value_of_a_secret_comes_from_input_or_a_variable_never_an_argument(command, store, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "from the environment")
    outputs = [
        command("secret", "add", "KEY", text=VALUE + "\n"),
        command("secret", "add", "B", "--from-env", "MY_TOKEN"),
    ]
    assert store.secrets.values("default", ["KEY", "B"]) == {"KEY": VALUE, "B": "from the environment"}
    assert command("secret", "add", "KEY", VALUE, fails=True).exit_code == 2
    outputs.append(command("secret", "list"))
    assert VALUE not in "".join(result.output for result in outputs)
    with pytest.raises(SpecError, match="--from-env GONE"):
        command("secret", "add", "C", "--from-env", "GONE")
    command("secret", "rm", "B")
    assert [one.name for one in store.secrets.names("default")] == ["KEY"]


def test_a_token_is_printed_once(command, store):
    text = command("token", "add", "laptop", "--lasts", "30d").stdout.strip()
    assert store.tokens.actor_of(text) == OWNER
    assert text not in command("token", "list").output
    assert command("token", "add", "x", "--lasts", "soon", fails=True).exit_code == 2
    command("token", "rm", "laptop")
    assert store.tokens.find() == []


def test_an_address_of_a_server_needs_a_token(monkeypatch):
    monkeypatch.setenv("PHALANX_API", "https://jobs.example")
    with pytest.raises(ConfigError, match="PHALANX_TOKEN is not set"), open_jobs():
        pass


@pytest.mark.parametrize("page", ["README.md", "docs/jobs.md"])
def test_every_command_of_jobs_on_a_page_is_there(page):
    text = (Path(__file__).parents[2] / page).read_text()
    named = set(re.findall(r"phalanx (job|workspace|code|dataset|secret|token) ([a-z]+)", text))
    for first, name in named:
        found = phalanx.get_command(None, first)
        assert name in found.commands, f"phalanx {first} {name}"
    assert len(named) > 2


def test_listing_jobs_imports_neither_torch_nor_what_migrates_and_serves():
    program = "import sys, phalanx.cli.jobs, phalanx.jobs.service.service; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"torch", "alembic", "fastapi", "httpx", "numpy"}


def test_names_that_other_tools_give_commands_work_and_the_rest_is_told_the_nearest(command):
    assert "workspace vision is made" in command("workspace", "create", "vision").output
    assert "workspace speech is made" in command("job", "workspace", "create", "speech").output
    job = submitted(command)
    assert job in command("job", "status", job).output
    assert "no command 'phalanx job sbumit'. Did you mean 'submit'?" in command("job", "sbumit", fails=True).output
    assert (
        "no command 'phalanx workspace member ad'. Did you mean 'add'"
        in command(*("workspace", "member", "ad"), fails=True).output
    )


def test_a_member_of_one_workspace_need_not_name_it(command, store, monkeypatch):
    store.workspaces.create("vision")
    store.workspaces.put_member("vision", "ann", MemberRole.DEVELOPER)

    @contextmanager
    def as_ann() -> Iterator[Jobs]:
        yield JobService(store, {"local": FakeBackend()}, Actor("ann"), wake=lambda _: None, remote=False)

    monkeypatch.setattr(output, "open_jobs", as_ann)
    made = command("job", "submit", "--name", "mnist", "--", "python", "train.py")
    assert "in workspace vision, your only one" in made.stderr
    assert store.jobs.get(made.stdout.strip()).workspace == "vision"
    command("code", "add", "net", "git+https://example.org/net.git@main")
    assert [one.name for one in store.configs.find("vision", "code")] == ["net"]
    store.workspaces.create("speech")
    store.workspaces.put_member("speech", "ann", MemberRole.VIEWER)
    with pytest.raises(SpecError, match=r"in several workspaces: speech, vision. Say which: -w NAME"):
        command("secret", "list")


def test_the_log_of_a_failed_job_is_that_of_the_rank_that_failed(command, store):
    job = submitted(command)
    store.jobs.begin_attempt(job)
    write_log(store, job, "", rank=0)
    write_log(store, job, "the reason\n", rank=1)
    store.jobs.change(job, JobState.RUNNING)
    store.jobs.change(job, JobState.FAILED, "x", failure=Failure(Cause.USER_CODE, "rank 1 raised", rank=1, exit_code=1))
    found = command("job", "logs", job)
    assert found.stdout == "the reason\n"
    assert "The log of rank 1, which failed" in found.stderr
    assert "wrote nothing" in command("job", "logs", job, "--rank", "0").stderr


def commands_of_the_console() -> list[str]:
    """Every command that a page of the console shows, with what stands for a value left as it is."""
    texts = " ".join([*WORDS.values(), *(wording(words, "zh") for words in WORDS.values())])
    source = "".join(path.read_text() for path in Path(ui.__file__).parent.rglob("*.py"))
    quoted = re.findall(r'f?"(phalanx [^"]*)"', source)
    return [*re.findall(r"`(phalanx [^`]+)`", texts), *(re.sub(r"\{\w+\}", "default", one) for one in quoted)]


@pytest.mark.parametrize("line", commands_of_the_console())
def test_every_command_that_the_console_shows_is_one(line):
    words = line.split()[1:]
    found, context = phalanx, click.Context(phalanx, info_name="phalanx")
    while isinstance(found, click.Group) and words:
        _, found, words = found.resolve_command(context, words)
        context = click.Context(found, parent=context, info_name=found.name)
    assert not isinstance(found, click.Group), line
    # Options, numbers of arguments and choices are checked here.
    found.make_context(found.name, list(words), parent=context.parent)


def test_the_console_shows_commands():
    assert len(commands_of_the_console()) > 4
