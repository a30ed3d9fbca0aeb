"""The verbs on jobs, and who may use them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from job_fakes import OWNER, VALUE, FakeBackend
from phalanx.errors import AccessError, NotFoundError, SpecError, StateError
from phalanx.jobs import paths
from phalanx.jobs.models import Actor, Cause, Failure, JobState, MemberRole
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.routes import routes_of
from phalanx.jobs.service.service import JobService
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobDatabase]:
    with JobDatabase(None, tmp_path / "home") as store:
        yield store


@pytest.fixture
def woken() -> list[Path]:
    return []


@pytest.fixture
def acting(store: JobDatabase, woken: list[Path]) -> Callable[[Actor], Jobs]:
    return lambda actor: JobService(store, {"local": FakeBackend()}, actor, wake=woken.append, remote=False)


@pytest.fixture
def members(acting: Callable[[Actor], Jobs]) -> dict[MemberRole, Jobs]:
    """One member of `default` for each role."""
    owner = acting(OWNER)
    for role in MemberRole:
        owner.put_member("default", f"the-{role}", role)
    return {role: acting(Actor(f"the-{role}")) for role in MemberRole}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    return folder


def spec(**fields: object) -> TrainingJob:
    return TrainingJob.model_validate({"name": "mnist", "command": "python train.py", **fields})


def test_a_job_is_submitted_resolved_and_a_controller_woken(acting, tree, woken, store):
    job = acting(OWNER).submit(spec(), base=tree)
    assert job.state is JobState.QUEUED
    assert job.owner == "root"
    assert job.spec["code"]["digest"]
    assert woken == [store.home]
    assert acting(OWNER).jobs() == [job]
    assert [event.message for event in acting(OWNER).events(job.id)] == ["submitted by root"]
    assert acting(OWNER).attempts(job.id) == []
    assert acting(OWNER).logs_of(job.id) == []


def test_what_could_never_run_is_not_queued(acting, tree, woken):
    with pytest.raises(SpecError, match="2 nodes are asked"):
        acting(OWNER).submit(spec(resources={"nodes": 2}), base=tree)
    with pytest.raises(SpecError, match=r"trian\.py"):
        acting(OWNER).submit(spec(command="python trian.py"), base=tree)
    with pytest.raises(SpecError, match="relative"):
        acting(OWNER).submit(spec())
    assert acting(OWNER).jobs() == []
    assert woken == []


def test_the_same_request_is_not_resolved_again(acting, tree):
    first = acting(OWNER).submit(spec(), base=tree, request="r")
    assert acting(OWNER).submit(spec(command="python gone.py"), base=tree, request="r") == first


def test_a_stopped_job_is_tried_again_as_a_new_job_of_the_same_code(acting, tree):
    owner = acting(OWNER)
    job = owner.submit(spec(), base=tree)
    with pytest.raises(StateError, match="is queued"):
        owner.retry(job.id)
    assert owner.stop(job.id).reason == "stopped by root"
    (tree / "train.py").write_text("print('changed')\n")
    again = owner.retry(job.id)
    assert (again.retry_of, again.spec) == (job.id, job.spec)
    assert again.id != job.id


def test_each_role_may_do_what_it_should(members, acting, tree):
    job = acting(OWNER).submit(spec(), base=tree).id
    reads = [
        lambda jobs: jobs.job(job),
        lambda jobs: jobs.jobs("default"),
        lambda jobs: jobs.events(job),
        lambda jobs: jobs.attempts(job),
        lambda jobs: jobs.codes("default"),
        lambda jobs: jobs.datasets("default"),
        lambda jobs: jobs.secrets("default"),
        lambda jobs: jobs.log(job),
    ]
    writes = [
        lambda jobs: jobs.submit(spec(), base=tree),
        lambda jobs: jobs.render(spec(), base=tree),
        lambda jobs: jobs.put_code("default", "c", Code(path=str(tree))),
        lambda jobs: jobs.remove_code("default", "c"),
        lambda jobs: jobs.put_dataset("default", Dataset(name="d", kind="local", uri=str(tree))),
        lambda jobs: jobs.remove_dataset("default", "d"),
        lambda jobs: jobs.put_secret("default", "KEY", VALUE),
        lambda jobs: jobs.remove_secret("default", "KEY"),
    ]
    manages = [
        lambda jobs: jobs.stop(job),
        lambda jobs: jobs.put_member("default", "new", MemberRole.VIEWER),
        lambda jobs: jobs.remove_member("default", "new"),
    ]
    may = {MemberRole.VIEWER: reads, MemberRole.DEVELOPER: reads + writes, MemberRole.ADMIN: reads + writes + manages}
    for role, jobs in members.items():
        for verb in reads + writes + manages:
            if verb in may[role]:
                verb(jobs)
            else:
                with pytest.raises(AccessError, match=f"the-{role} has role {role} in workspace 'default'"):
                    verb(jobs)
        for verb in (lambda jobs: jobs.add_workspace("x"), lambda jobs: jobs.remove_workspace("default")):
            with pytest.raises(AccessError, match="only the owner of"):
                verb(jobs)


def test_a_developer_stops_and_retries_their_own_job(members, tree):
    developer = members[MemberRole.DEVELOPER]
    job = developer.submit(spec(), base=tree)
    assert developer.stop(job.id).state is JobState.STOPPED
    assert developer.retry(job.id).owner == "the-developer"


def test_a_member_of_one_workspace_sees_nothing_of_another(acting, store, tree):
    owner = acting(OWNER)
    owner.add_workspace("other")
    owner.put_member("other", "mallory", MemberRole.ADMIN)
    owner.put_secret("default", "KEY", VALUE)
    owner.put_code("default", "c", Code(path=str(tree)))
    job = owner.submit(spec(secrets=["KEY"]), base=tree).id
    mallory = acting(Actor("mallory"))
    assert mallory.jobs() == []
    assert [space.name for space in mallory.workspaces()] == ["other"]
    of_jobs = [
        "job",
        "attempts",
        "events",
        "stop",
        "retry",
        "logs_of",
        "log",
        "plan",
        "hang",
        "slow",
        "reporting",
        "usage",
        "checkpoints",
    ]
    for verb in of_jobs:
        with pytest.raises(NotFoundError) as hidden:
            getattr(mallory, verb)(job)
        with pytest.raises(NotFoundError) as missing:
            getattr(mallory, verb)("mnist-xxxxxx")
        assert str(hidden.value) == str(missing.value).replace("mnist-xxxxxx", job)
    for verb in (
        lambda: mallory.jobs("default"),
        lambda: mallory.submit(spec(), base=tree),
        lambda: mallory.codes("default"),
        lambda: mallory.secrets("default"),
        lambda: mallory.put_secret("default", "KEY", "mine"),
        lambda: mallory.put_member("default", "mallory", MemberRole.ADMIN),
    ):
        with pytest.raises(NotFoundError, match="There is no workspace 'default'"):
            verb()
    with pytest.raises(SpecError, match="KEY"):
        mallory.submit(spec(workspace="other", secrets=["KEY"]), base=tree)
    with pytest.raises((SpecError, NotFoundError), match="c"):
        mallory.submit(spec(workspace="other", code={"name": "c"}), base=tree)


def test_checkpoints_in_pods_are_not_looked_for_on_this_machine(store, acting, tree, tmp_path):
    (tmp_path / "step-3").mkdir()
    jobs = JobService(store, {"local": FakeBackend(), "kubernetes": FakeBackend()}, OWNER, wake=lambda _: None)
    here = jobs.submit(spec(checkpoint={"dir": str(tmp_path)}), base=tree).id
    there = jobs.submit(
        spec(
            name="pods",
            backend="kubernetes",
            kubernetes={"image": "phalanx"},
            checkpoint={"dir": str(tmp_path)},
        ),
        base=tree,
    ).id
    assert [one.step for one in jobs.checkpoints(here)] == [3]
    assert jobs.checkpoints(there) == []


def test_values_of_secrets_are_shown_nowhere(acting, store, tree, caplog):
    owner = acting(OWNER)
    owner.put_secret("default", "KEY", VALUE)
    wanted = spec(secrets=["KEY"])
    said = [owner.render(wanted, base=tree), repr(owner.secrets("default"))]
    job = owner.submit(wanted, base=tree)
    store.jobs.begin_attempt(job.id)
    store.jobs.change(job.id, JobState.RUNNING)
    folder = paths.logs(paths.attempt_folder(store.home, job.id, 1))
    folder.mkdir(parents=True)
    (folder / "workerlog.0").write_text(f"my key is {VALUE}!\n")
    failure = Failure(Cause.USER_CODE, f"bad key {VALUE}", detail=f"line 1\nline 2: {VALUE}")
    store.jobs.append_event(job.id, "note", f"saw {VALUE}", {"seen": [{"text": VALUE}]})
    store.jobs.change(job.id, JobState.FAILED, f"rank 0 said {VALUE}", failure=failure)
    assert owner.job(job.id).failure.detail == "line 1\nline 2: ***"
    part = owner.log(job.id)
    assert "my key is" in part.text
    said += [part.text, repr(owner.job(job.id)), repr(owner.events(job.id)), repr(owner.attempts(job.id)), caplog.text]
    assert VALUE not in "".join(said)
    assert "******" in said[0]
    kept = [path for path in store.home.rglob("*") if path.is_file() and path.parent != folder]
    assert not [path for path in kept if VALUE.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("name", "value"), [("1KEY", "v"), ("A-B", "v"), ("KEY", ""), ("KEY", "a\0b"), ("SCHLÜSSEL", "v")]
)
def test_a_secret_that_can_be_no_variable_is_refused(acting, name, value):
    with pytest.raises(SpecError, match="cannot be an environment variable"):
        acting(OWNER).put_secret("default", name, value)


@pytest.mark.parametrize("name", ["", "Vision", "a/b", "..", "a" * 41, "a\0"])
def test_names_are_those_that_a_job_can_say(acting, name, tree):
    with pytest.raises(SpecError, match="cannot be the name of a workspace"):
        acting(OWNER).add_workspace(name)
    with pytest.raises(SpecError, match="cannot be the name of a code configuration"):
        acting(OWNER).put_code("default", name, Code(path=str(tree)))


def test_configurations_say_where_things_are_and_nothing_of_a_job(acting):
    with pytest.raises(SpecError, match="name, commit and digest belong to a job"):
        acting(OWNER).put_code("default", "c", Code(name="d"))
    with pytest.raises(SpecError, match="Dataset 'd' has no uri"):
        acting(OWNER).put_dataset("default", Dataset(name="d"))


def test_tokens_stand_for_who_made_them(acting, store):
    owner, ann = acting(OWNER), acting(Actor("ann"))
    assert store.tokens.actor_of(owner.add_token("mine").text) == OWNER
    assert store.tokens.actor_of(owner.add_token("laptop", owner="ann").text) == Actor("ann")
    assert store.tokens.actor_of(ann.add_token("phone", lasts_s=60).text) == Actor("ann")
    assert {token.name for token in ann.tokens()} == {"laptop", "phone"}
    assert len(owner.tokens()) == 3
    for verb in (lambda: ann.add_token("x", owner="root"), lambda: ann.remove_token("mine", owner="root")):
        with pytest.raises(AccessError, match="only the owner"):
            verb()
    ann.remove_token("phone")
    owner.remove_token("laptop", owner="ann")
    assert ann.tokens() == []


def test_a_removed_workspace_takes_the_folders_of_its_jobs_along(acting, store, tree):
    owner = acting(OWNER)
    owner.add_workspace("other")
    job = owner.submit(spec(workspace="other"), base=tree)
    folder = paths.attempt_folder(store.home, job.id, 1)
    folder.mkdir(parents=True)
    owner.stop(job.id)
    owner.remove_workspace("other")
    assert not folder.parent.exists()
    with pytest.raises(StateError, match="Workspace 'default' stays"):
        owner.remove_workspace("default")


def test_a_tree_that_was_sent_is_kept_by_its_digest(acting, tmp_path, store):
    archive = tmp_path / "tree.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"pass"))
    digest = acting(OWNER).put_tree("default", archive)
    assert (store.home / "code" / digest / "train.py").read_text() == "pass"
    assert [path.name for path in store.home.glob("tree-*")] == []
    job = acting(OWNER).submit(spec(code={"digest": digest}))
    assert job.spec["code"]["digest"] == digest


def test_a_member_who_comes_from_elsewhere_names_no_folder_of_the_server_but_those_listed(acting, store, tree, woken):
    acting(OWNER).put_member("default", "ann", MemberRole.DEVELOPER)
    acting(OWNER).put_code("default", "ours", Code(path=str(tree)))
    ann = JobService(store, {"local": FakeBackend()}, Actor("ann"), wake=woken.append)
    absent, named = str(tree / "absent"), spec(code={"name": "ours"})
    for verb in (ann.submit, ann.render):
        for asked in (spec(code={"path": str(tree)}), spec(code={"path": absent}), named):
            with pytest.raises(SpecError, match=r"members of this server may not name .* on its machine"):
                verb(asked)
    with pytest.raises(SpecError, match="may not name"):
        ann.put_code("default", "mine", Code(path=str(tree)))
    with pytest.raises(SpecError, match="may not name"):
        ann.put_dataset("default", Dataset(name="d", kind="local", uri=str(tree)))
    assert ann.jobs() == []

    (store.home / "server.yaml").write_text(f"roots: [{tree}]")
    assert ann.submit(spec(code={"path": str(tree)})).spec["code"]["path"] == str(tree)
    assert ann.submit(named).state is JobState.QUEUED
    assert (
        ann.put_dataset("default", Dataset(name="d", kind="local", uri=str(tree), mount="/x")).config["mount"] == "/x"
    )
    with pytest.raises(SpecError, match=r"code: .* is no folder"):
        ann.submit(spec(code={"path": absent}))


def test_a_member_runs_no_job_of_anothers_again_that_reads_what_they_may_not(acting, store, tree, woken):
    acting(OWNER).put_member("default", "ann", MemberRole.DEVELOPER)
    ann = JobService(store, {"local": FakeBackend()}, Actor("ann"), wake=woken.append)
    data = [{"name": "d", "kind": "local", "uri": str(tree)}]
    for said, allowed in (({}, True), ({"datasets": data}, False), ({"checkpoint": {"dir": str(tree)}}, False)):
        job = acting(OWNER).submit(spec(**said), base=tree)
        acting(OWNER).stop(job.id)
        if allowed:
            assert ann.retry(job.id).state is JobState.QUEUED
        else:
            with pytest.raises(SpecError, match="may not name"):
                ann.retry(job.id)


def test_the_owner_of_the_store_names_what_they_like_over_a_server_too(store, tree, woken):
    owner = JobService(store, {"local": FakeBackend()}, OWNER, wake=woken.append)
    assert owner.submit(spec(code={"path": str(tree)})).state is JobState.QUEUED


def test_only_the_owner_at_the_command_line_gets_values_of_secrets_for_a_job_made_by_hand(acting, store, tree, woken):
    acting(OWNER).put_secret("default", "TOKEN", VALUE)
    acting(OWNER).put_member("default", "ann", MemberRole.DEVELOPER)
    asked = spec(secrets=["TOKEN"])
    assert VALUE in acting(OWNER).render(asked, base=tree, full=True)
    assert VALUE not in acting(OWNER).render(asked, base=tree)
    served = JobService(store, {"local": FakeBackend()}, OWNER, wake=woken.append)
    for who in (served, acting(Actor("ann"))):
        with pytest.raises(AccessError, match="No server gives values of secrets away"):
            who.render(spec(secrets=["TOKEN"], code={"path": str(tree)}), full=True)
        assert who.render(spec(code={"path": str(tree)}), full=True).startswith("python train.py")


def test_the_service_and_the_routes_have_every_verb():
    verbs = {name for name in vars(Jobs) if not name.startswith("_")}
    assert verbs <= vars(JobService).keys()
    assert verbs - {entry.verb.__name__ for entry in routes_of(Jobs)} == {"put_tree"}
    assert len({entry.operation for entry in routes_of(Jobs)}) == len(routes_of(Jobs))
