"""What the store promises, on SQLite and on a real PostgreSQL alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

import postgres as postgresql
from phalanx.errors import AccessError, ConfigError, NotFoundError, StateError
from phalanx.jobs.models import Actor, Cause, Failure, JobState, MemberRole
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase, tables, upgrade

pytestmark = pytest.mark.dist
_SCHEMAS = count()


class Clock:
    def __init__(self) -> None:
        self.moment = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment

    def pass_s(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return postgresql.url(request.getfixturevalue("postgres"), f"test_{next(_SCHEMAS)}")


@pytest.fixture
def opened(url: str, tmp_path: Path, clock: Clock) -> Iterator[Callable[[], JobDatabase]]:
    stores = []

    def another() -> JobDatabase:
        stores.append(JobDatabase(url, tmp_path, clock=clock))
        return stores[-1]

    yield another
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[[], JobDatabase]) -> JobDatabase:
    return opened()


def spec(name: str = "mnist", workspace: str = "default") -> TrainingJob:
    return TrainingJob(name=name, workspace=workspace, command="python train.py")


def test_a_new_store_has_the_tables_that_the_code_describes(store):
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    with store.database.reads() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, tables.metadata) == []
    assert upgrade.scripts().get_heads() == [tables.REVISION]


def test_the_file_of_a_store_is_its_owners_alone(tmp_path):
    home = tmp_path / "shared"
    home.mkdir(mode=0o755)
    with JobDatabase(f"sqlite:///{home}/jobs.db", home) as store:
        store.jobs.create(spec(), owner="ada")
        assert {path.name: path.stat().st_mode & 0o777 for path in home.glob("jobs.db*")} == {
            "jobs.db": 0o600,
            "jobs.db-shm": 0o600,
            "jobs.db-wal": 0o600,
        }


def test_an_older_database_is_upgraded_once_and_keeps_its_rows(url, tmp_path, opened, monkeypatch):
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg") if "postgres" in url else url)
    known = upgrade.scripts()
    monkeypatch.setattr(upgrade, "scripts", lambda: known)
    steps = known._upgrade_revs
    monkeypatch.setattr(known, "_upgrade_revs", lambda head, found: steps("0001", found))
    with engine.begin() as connection:
        upgrade.upgrade(connection, "here")
        connection.execute(sa.text("INSERT INTO workspaces VALUES ('old', '2025-01-01 00:00:00')"))
    engine.dispose()
    monkeypatch.undo()
    with ThreadPoolExecutor(4) as pool:
        names = {tuple(w.name for w in s.workspaces.find()) for s in pool.map(lambda _: opened(), range(4))}
    assert names == {("default", "old")}


def test_a_database_of_a_newer_version_is_refused(store, opened):
    with store.database.writes() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"newer version of Phalanx: it is at revision 9999.*Upgrade Phalanx"):
        opened()


def test_a_job_goes_through_its_states_and_its_history_says_so(store, clock):
    job = store.jobs.create(spec(), owner="ann")
    assert job.id.startswith("mnist-")
    assert job.state is JobState.QUEUED
    assert TrainingJob.model_validate(job.spec) == spec()
    attempt = store.jobs.begin_attempt(job.id)
    store.jobs.set_handle(job.id, attempt.number, "pid 7")
    clock.pass_s(5)
    store.jobs.change(job.id, JobState.PREPARING, "fetching code")
    store.jobs.change(job.id, JobState.RUNNING)
    clock.pass_s(60)
    failure = Failure(Cause.NODE_FAILURE, "node 1 is gone", node=1)
    store.jobs.change(job.id, JobState.RESTARTING, "node 1 is gone", failure=failure)
    store.jobs.begin_attempt(job.id)
    store.jobs.change(job.id, JobState.PREPARING)
    store.jobs.change(job.id, JobState.RUNNING)
    done = store.jobs.change(job.id, JobState.SUCCEEDED)
    assert (done.attempt, done.failure) == (2, None)
    assert (done.ended - done.created).total_seconds() == 65
    first, second = store.jobs.attempts(job.id)
    assert (first.state, first.handle, first.failure) == (JobState.FAILED, "pid 7", failure)
    assert (first.ended - first.started).total_seconds() == 60
    assert (second.state, second.failure) == (JobState.SUCCEEDED, None)
    events = store.jobs.events(job.id)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert [event.data["to"] for event in events if event.kind == "state"] == [
        "queued", "preparing", "running", "restarting", "preparing", "running", "succeeded",
    ]  # fmt: skip
    assert store.jobs.events(job.id, after=len(events) - 1) == events[-1:]


def test_an_attempt_that_nobody_saw_running_began_when_its_nodes_say(store, clock):
    quick, broken = store.jobs.create(spec("quick"), owner="ada"), store.jobs.create(spec("broken"), owner="ada")
    for job in (quick, broken):
        store.jobs.begin_attempt(job.id)
        store.jobs.change(job.id, JobState.PREPARING)
    clock.pass_s(3)
    done = store.jobs.change(quick.id, JobState.SUCCEEDED, started=clock() - timedelta(seconds=2))
    assert (done.ended - done.started).total_seconds() == 2
    assert store.jobs.attempts(quick.id)[0].started == done.started
    failed = store.jobs.change(broken.id, JobState.FAILED, failure=Failure(Cause.SETUP, "no code"))
    assert failed.started is None


def test_a_state_that_may_not_follow_is_refused_and_leaves_no_trace(store):
    job = store.jobs.create(spec(), owner="ann")
    store.jobs.stop(job.id, "stopped by ann")
    before = store.jobs.events(job.id)
    with pytest.raises(StateError, match=f"Job {job.id} is stopped; it cannot become running"):
        store.jobs.change(job.id, JobState.RUNNING)
    with pytest.raises(StateError, match="is stopped at attempt 0: it can have no new attempt"):
        store.jobs.begin_attempt(job.id)
    assert store.jobs.events(job.id) == before
    with pytest.raises(NotFoundError, match="There is no job 'nope'"):
        store.jobs.change("nope", JobState.RUNNING)


def test_an_attempt_begins_once_however_many_ask(store):
    job = store.jobs.create(spec(), owner="ann")
    ready = threading.Barrier(4)

    def begin(_: int) -> int:
        ready.wait()
        try:
            return store.jobs.begin_attempt(job.id).number
        except StateError:
            return 0

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(begin, range(4))) == [0, 0, 0, 1]


def test_stop_ends_at_once_what_was_not_started_and_asks_what_was(store):
    idle, live = (store.jobs.create(spec(), owner="ann") for _ in range(2))
    store.jobs.begin_attempt(live.id)
    assert store.jobs.last_change() == 2
    assert store.jobs.stop(idle.id, "stopped by ann").state is JobState.STOPPED
    assert store.jobs.last_change() == 3
    assert store.jobs.stop(live.id, "stopped by ann").state is JobState.STOPPING
    assert store.jobs.stop(live.id, "again").reason == "stopped by ann"
    assert store.jobs.change(live.id, JobState.STOPPED, "ended").ended is not None
    assert store.jobs.attempts(live.id)[0].state is JobState.STOPPED


def test_jobs_are_listed_newest_first_and_by_what_is_asked(store, clock):
    store.workspaces.create("vision")
    made = []
    for name, workspace, owner in [("a", "default", "ann"), ("b", "vision", "ann"), ("c", "default", "bob")]:
        made.append(store.jobs.create(spec(name, workspace), owner=owner))
        clock.pass_s(1)
    store.jobs.stop(made[0].id, "")
    assert [job.name for job in store.jobs.find()] == ["c", "b", "a"]
    assert [job.name for job in store.jobs.find(workspaces=["default"])] == ["c", "a"]
    assert store.jobs.find(workspaces=[]) == []
    assert [job.name for job in store.jobs.find(states=[JobState.QUEUED], limit=1)] == ["c"]
    assert [job.name for job in store.jobs.find(owner="ann")] == ["b", "a"]
    assert [job.name for job in store.jobs.find(ended_after=made[0].created)] == ["a"]


def test_what_scripts_and_engines_say_is_kept_whatever_it_holds(store):
    job = store.jobs.create(spec(), owner="ann")
    store.jobs.explain({job.id: "a\0b"})
    store.jobs.append_event(job.id, "note", "half a letter \ud800", {"text": "\0"})
    store.jobs.begin_attempt(job.id)
    failed = store.jobs.change(job.id, JobState.FAILED, "\0", failure=Failure(Cause.SETUP, "a\0", detail="\0"))
    assert (failed.reason, failed.failure.message) == ("\ufffd", "a\0")
    assert [event.message for event in store.jobs.events(job.id)] == [
        "submitted by ann", "half a letter ?", "attempt 1", "\ufffd",
    ]  # fmt: skip


def test_a_text_that_the_database_cannot_look_for_is_an_error_of_ours(store):
    with pytest.raises((NotFoundError, ConfigError), match=r"There is no job|The store cannot keep that"):
        store.jobs.get("a\0b")


def test_a_reason_is_explained_without_an_event(store):
    job = store.jobs.create(spec(), owner="ann")
    store.jobs.explain({job.id: "2nd in line"})
    assert store.jobs.get(job.id).reason == "2nd in line"
    assert store.jobs.last_change() == 1
    assert len(store.jobs.events(job.id)) == 1


def test_the_same_request_gives_the_same_job_also_at_once(store):
    ready = threading.Barrier(4)

    def submit(_: int) -> str:
        ready.wait()
        return store.jobs.create(spec(), owner="ann", request="r1").id

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(submit, range(4)))) == 1
    assert store.jobs.create(spec(), owner="bob", request="r1").owner == "bob"
    assert len(store.jobs.find()) == 2


def test_writers_in_many_threads_lose_nothing(store):
    job = store.jobs.create(spec(), owner="ann")

    def note(number: int) -> None:
        for part in range(5):
            store.jobs.append_event(job.id, "note", f"{number}.{part}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    events = store.jobs.events(job.id)
    assert [event.number for event in events] == list(range(1, 22))
    assert len({event.message for event in events}) == 21


def test_a_lease_has_one_holder_until_it_runs_out(store, clock):
    ready = threading.Barrier(4)

    def take(number: int) -> bool:
        ready.wait()
        return store.leases.take("keeper", f"holder {number}", 10)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(take, range(4))) == 1
    holder = store.leases.holder("keeper")
    clock.pass_s(9)
    assert store.leases.take("keeper", holder, 10)
    clock.pass_s(9)
    assert not store.leases.take("keeper", "another", 10)
    clock.pass_s(2)
    assert store.leases.take("keeper", "another", 10)
    assert not store.leases.take("keeper", holder, 10)
    store.leases.release("keeper", "another")
    assert store.leases.holder("keeper") is None


def test_workspaces_hold_members_and_configurations(store):
    store.workspaces.create("vision")
    with pytest.raises(StateError, match="There is a workspace 'vision' already"):
        store.workspaces.create("vision")
    store.workspaces.put_member("vision", "ann", MemberRole.VIEWER)
    store.workspaces.put_member("vision", "ann", MemberRole.ADMIN)
    assert [w.name for w in store.workspaces.find("ann")] == ["vision"]
    assert store.workspaces.get("vision").members == {"ann": MemberRole.ADMIN}
    store.configs.save("vision", "code", "resnet", {"git": "g"})
    store.configs.save("vision", "code", "resnet", {"git": "h"})
    assert [one.config for one in store.configs.find("vision", "code")] == [{"git": "h"}]
    with pytest.raises(NotFoundError, match=r"Workspace 'vision' has no code 'resnt'.*Did you mean 'resnet'\?"):
        store.configs.get("vision", "code", "resnt")
    store.configs.remove("vision", "code", "resnet")
    store.workspaces.remove_member("vision", "ann")
    for missing in (
        lambda: store.configs.remove("vision", "code", "resnet"),
        lambda: store.workspaces.remove_member("vision", "ann"),
        lambda: store.configs.save("nope", "code", "resnet", {}),
        lambda: store.jobs.create(spec(workspace="nope"), owner="ann"),
    ):
        with pytest.raises(NotFoundError):
            missing()


def test_a_workspace_goes_with_all_that_is_in_it_once_its_jobs_have_ended(store):
    store.workspaces.create("vision")
    store.secrets.save("vision", "KEY", "v")
    job = store.jobs.create(spec(workspace="vision"), owner="ann")
    with pytest.raises(StateError, match=f"1 jobs that have not ended, such as {job.id}"):
        store.workspaces.remove("vision")
    store.jobs.stop(job.id, "")
    assert store.workspaces.remove("vision") == [job.id]
    assert store.jobs.events(job.id) == []
    assert store.secrets.names("vision") == []


def test_secrets_are_kept_encrypted(store, tmp_path, monkeypatch, opened):
    store.secrets.save("default", "KEY", "hunter2-of-the-test")
    assert store.secrets.value("default", "KEY") == "hunter2-of-the-test"
    assert [secret.name for secret in store.secrets.names("default")] == ["KEY"]
    assert store.secrets.values("default", ["KEY"]) == {"KEY": "hunter2-of-the-test"}
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with store.database.reads() as connection:
        assert "hunter2" not in str(connection.execute(sa.select(tables.secrets)).all())
    assert not any(b"hunter2" in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    monkeypatch.setenv("PHALANX_SECRET_KEY", Fernet.generate_key().decode())
    with pytest.raises(ConfigError, match="encrypted with another key than the one in PHALANX_SECRET_KEY"):
        opened().secrets.value("default", "KEY")
    monkeypatch.setenv("PHALANX_SECRET_KEY", "short")
    with pytest.raises(ConfigError, match="PHALANX_SECRET_KEY holds no key: it takes 32 bytes"):
        opened().secrets.save("default", "KEY", "v")
    monkeypatch.delenv("PHALANX_SECRET_KEY")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        opened().secrets.value("default", "KEY")


def test_a_token_is_known_until_it_expires_or_is_removed(store, clock):
    made = store.tokens.create("laptop", Actor("ann"), lasts_s=60)
    assert store.tokens.actor_of(made.text) == Actor("ann")
    assert store.tokens.actor_of(store.tokens.create("console", Actor("root", owner=True)).text).owner
    with pytest.raises(StateError, match="ann has a token 'laptop' already"):
        store.tokens.create("laptop", Actor("ann"))
    with store.database.reads() as connection:
        assert made.text.split("_", 2)[2] not in str(connection.execute(sa.select(tables.tokens)).all())
    for wrong in ("", "phx", "phx_00000000_x", made.text[:-1], made.text + "x"):
        with pytest.raises(AccessError, match="unknown or has expired"):
            store.tokens.actor_of(wrong)
    clock.pass_s(60)
    with pytest.raises(AccessError, match="unknown or has expired"):
        store.tokens.actor_of(made.text)
    store.tokens.remove("laptop", "ann")
    assert [token.name for token in store.tokens.find()] == ["console"]
    with pytest.raises(NotFoundError, match="ann has no token 'laptop'"):
        store.tokens.remove("laptop", "ann")


@pytest.mark.parametrize("wrong", ["mysql://h/d", "nonsense", "sqlite://"])
def test_an_address_of_no_known_database_is_refused(wrong, tmp_path):
    with pytest.raises(ConfigError, match=r"neither SQLite's nor PostgreSQL's. Write sqlite:////"):
        JobDatabase(wrong, tmp_path)
