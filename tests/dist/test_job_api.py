"""Jobs over HTTP: the same verbs, values and errors as the service; nothing for strangers; no input that breaks it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from certificates import make_certificate
from job_server import JobServer, job_server, report
from phalanx.errors import AccessError, BackendError, ConfigError, NotFoundError, SpecError, StateError
from phalanx.jobs import paths
from phalanx.jobs.api.app import make_app
from phalanx.jobs.api.serve import ListenOptions, bind, serve
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.usage import Sample, Usage
from phalanx.jobs.client import Client
from phalanx.jobs.models import Cause, Failure, JobState, MemberRole, QueueLength
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    with job_server(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def owner(server: JobServer) -> Iterator[Client]:
    with Client(server.url, server.owner_token()) as client:
        yield client


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "big.bin").write_bytes(b"left out")
    (folder / ".phalanxignore").write_text("*.bin\n")
    return folder


def test_a_job_goes_round_by_http(server, owner, tree):
    spec = TrainingJob(name="round", command="python train.py", code=Code(path="."), resources={"cpu": 0.5})
    job = owner.submit(spec, base=tree, request="once")
    assert owner.submit(spec, base=tree, request="once") == job == owner.job(job.id)
    assert job.state is JobState.QUEUED
    kept = server.home / "code" / job.spec["code"]["digest"]
    assert sorted(path.name for path in kept.iterdir()) == [".phalanxignore", "train.py"]
    assert job.id in [one.id for one in owner.jobs("default", states=[JobState.QUEUED])]
    with pytest.raises(StateError, match="Only a job that has ended"):
        owner.retry(job.id)

    folder = server.start(job)
    (paths.logs(folder) / "workerlog.0").write_text("one\ntwo\n")
    report(folder, 0, 3)
    assert owner.logs_of(job.id) == ["0"]
    part = owner.log(job.id, rank="0")
    assert (part.text, part.ended) == ("one\ntwo\n", False)
    assert owner.reporting(job.id) == ["worker.0"]
    assert [event["step"] for event in owner.reports(job.id, rank="worker.0").events] == [0, 1, 2]
    for number in range(2):
        usage.append(paths.attempt_folder(server.home, job.id, 1), 0, Sample(number, 5.0 * number, 0.5, 100, 200))
    assert owner.usage(job.id) == [Usage(0, [Sample(0, 0.0, 0.5, 100, 200), Sample(1, 5.0, 0.5, 100, 200)], 2)]
    assert owner.usage(job.id, offset=-1)[0].samples[0].number == 1
    assert owner.usage(job.id, node=7, attempt=1) == [Usage(7, [], 0)]
    with pytest.raises(NotFoundError, match="no attempt 2"):
        owner.usage(job.id, attempt=2)
    assert owner.attempts(job.id)[0].number == 1
    assert [event.number for event in owner.events(job.id)] == list(range(1, len(owner.events(job.id)) + 1))

    assert owner.hang(job.id) == ""
    record = paths.launcher_logs(folder, 0) / "hang.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps({"lines": ["rank 1 is at train.py:9 in load; rank 0 waits", "rank 1: it waits"]}))
    assert owner.hang(job.id) == "rank 1 is at train.py:9 in load; rank 0 waits\nrank 1: it waits"
    record.write_text("no JSON")
    assert owner.hang(job.id) == ""

    assert owner.slow(job.id) == ""
    paths.launcher_logs(folder, 0).joinpath("slow.json").write_text(json.dumps({"lines": ["rank 0 waited for rank 1"]}))
    assert owner.slow(job.id) == "rank 0 waited for rank 1"

    server.end(job)
    assert owner.slow(job.id) == "rank 0 waited for rank 1"
    assert owner.log(job.id, offset=part.next).ended
    assert owner.retry(job.id).spec == job.spec
    assert owner.plan(job.id) == ""
    assert owner.machine()["cpu"].total >= 1
    assert "phalanx.jobs.node" in owner.render(spec, base=tree)


def test_configurations_go_round_by_http(server, owner):
    owner.add_workspace("round-trip")
    owner.put_member("round-trip", "ada", MemberRole.DEVELOPER)
    assert {one.name: one.members for one in owner.workspaces()}["round-trip"] == {"ada": MemberRole.DEVELOPER}
    owner.put_code("round-trip", "net", Code(git="https://example.org/net.git"))
    owner.put_dataset("round-trip", Dataset(name="digits", kind="local", uri=str(server.home)))
    owner.put_secret("round-trip", "KEY", "very secret value")
    assert [one.name for one in owner.codes("round-trip")] == ["net"]
    assert [one.name for one in owner.datasets("round-trip")] == ["digits"]
    assert [one.name for one in owner.secrets("round-trip")] == ["KEY"]
    made = owner.add_token("laptop", owner="ada", lasts_s=60)
    with Client(server.url, made.text) as ada:
        assert ada.whoami().name == "ada"
        assert [one.name for one in ada.tokens()] == ["laptop"]
        ada.remove_secret("round-trip", "KEY")
        ada.remove_code("round-trip", "net")
        ada.remove_dataset("round-trip", "digits")
        with pytest.raises(AccessError, match="only the owner"):
            ada.add_workspace("another")
    owner.remove_token("laptop", owner="ada")
    with Client(server.url, made.text) as ada, pytest.raises(AccessError):
        ada.whoami()
    owner.remove_member("round-trip", "ada")
    owner.remove_workspace("round-trip")
    with pytest.raises(NotFoundError):
        owner.codes("round-trip")


def test_who_may_do_what(server, owner, tree):
    owner.add_workspace("theirs")
    mine, theirs = server.queue("mine"), server.queue("theirs", workspace="theirs")
    spec = TrainingJob(name="no", command="python train.py")
    with Client(server.url, server.token("vera", MemberRole.VIEWER)) as vera:
        assert vera.job(mine.id).id == mine.id
        with pytest.raises(AccessError, match="vera has role viewer"):
            vera.submit(spec, base=tree)
        with pytest.raises(AccessError, match="vera has role viewer"):
            vera.put_secret("default", "A", "b")
        with pytest.raises(AccessError):
            vera.stop(mine.id)
        assert theirs.id not in [one.id for one in vera.jobs()]
        for ask in (
            vera.job,
            vera.events,
            vera.attempts,
            vera.logs_of,
            vera.stop,
            vera.plan,
            vera.reporting,
            vera.usage,
        ):
            with pytest.raises(NotFoundError):
                ask(theirs.id)
        for ask in (vera.codes, vera.datasets, vera.secrets, vera.jobs):
            with pytest.raises(NotFoundError):
                ask("theirs")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic YTpi"},
        {"Cookie": "phalanx_session=x"},
    ):
        answer = httpx.get(f"{server.url}/api/v1/jobs", headers=headers)
        assert answer.status_code == 401
        assert mine.id not in answer.text


def test_a_developer_reads_no_folder_of_the_server(server, owner, tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "train.py").write_text("server secret")
    asked = {"authorization": f"Bearer {server.token('dev', MemberRole.DEVELOPER)}"}
    job = {"name": "no", "command": "env true", "launch": "env", "backend": "kubernetes", "kubernetes": {"image": "i"}}
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=asked) as dev:
        for verb in ("jobs", "jobs/render"):
            answers = [
                dev.post(verb, json={"spec": job | {"code": {"path": str(path)}}})
                for path in (private, tmp_path / "missing", server.home)
            ]
            assert [answer.status_code for answer in answers] == [422] * 3
            assert answers[0].text.replace("private", "missing") == answers[1].text
            assert "secret" not in answers[0].text
    assert owner.render(TrainingJob.model_validate(job | {"code": {"path": str(private)}})).count("code.tar.gz")


def test_archives_of_code_that_lead_out_are_refused(server, owner, tmp_path):
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../../escaped.py"), io.BytesIO(b""))
    with pytest.raises(SpecError, match="archive of code"):
        owner.put_tree("default", archive)
    assert not list(server.home.parent.rglob("escaped.py"))


def test_paths_in_names_find_nothing(server, owner):
    job = server.queue("paths")
    folder = server.start(job)
    (paths.logs(folder) / "workerlog.0").write_text("x")
    for rank in ("../../../../phalanx.db", "..%2f..%2fkey", "/etc/passwd", "0/../../attempt"):
        with pytest.raises((NotFoundError, ConfigError, BackendError)):
            owner.log(job.id, rank=rank)
        assert owner.reports(job.id, rank=rank.replace("/", "")).events == []
    with pytest.raises((NotFoundError, BackendError)):
        owner.job("../../etc")


def test_a_log_streams_until_the_attempt_has_ended(server, owner):
    job = server.queue("streamed")
    log = paths.logs(server.start(job)) / "workerlog.0"
    log.write_text("begin\n")
    headers = {"Authorization": f"Bearer {server.owner_token()}"}
    with httpx.stream("GET", f"{server.url}/api/v1/jobs/{job.id}/logs/0/stream", headers=headers, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data")) == 'data: "begin\\n"'
        with log.open("a") as file:
            file.write("end\n")
        server.end(job)
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest == ['data: "end\\n"', "event: end", "data: "]


def test_too_many_requests_are_refused(tmp_path):
    with job_server(tmp_path, per_second=0.5, burst=3) as small:
        with httpx.Client(headers={"Authorization": f"Bearer {small.owner_token()}"}) as client:
            found = [client.get(f"{small.url}/api/v1/whoami") for _ in range(5)]
        assert [one.status_code for one in found[:3]] == [200, 200, 200]
        assert found[-1].status_code == 429
        assert int(found[-1].headers["retry-after"]) >= 1


def test_too_large_requests_are_refused(server):
    headers = {"Authorization": f"Bearer {server.owner_token()}"}
    body = b'{"spec": "' + b"x" * (2 << 20) + b'"}'
    assert httpx.post(f"{server.url}/api/v1/jobs", headers=headers, content=body).status_code == 413
    # Archives of code may be larger; what else ends in that word may not.
    answer = httpx.put(f"{server.url}/api/v1/workspaces/default/codes/trees", headers=headers, content=body)
    assert answer.status_code == 413


def test_half_letters_get_an_answer(server):
    headers = {"Authorization": f"Bearer {server.owner_token()}"}
    for body in (b'{"spec": {"name": "a", "command": "python \\ud800"}}', b'{"spec": {"\\ud800": 1}}'):
        assert httpx.post(f"{server.url}/api/v1/jobs", headers=headers, content=body).status_code == 422


def test_off_loopback_only_with_a_certificate(tmp_path):
    with pytest.raises(ConfigError, match="in the clear"):
        bind(ListenOptions(host="0.0.0.0", port=0))
    with pytest.raises(ConfigError, match="https"):
        Client("http://train.example", "token")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"in use by pid \d+"):
            bind(ListenOptions(port=taken.getsockname()[1]))


def test_a_certificate_serves_https(tmp_path, monkeypatch):
    pem = tmp_path / "both.pem"
    make_certificate(pem)
    started: list[uvicorn.Server] = []
    run = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **said: (started.append(self), run(self, **said))[1])
    place = ListenOptions(host="0.0.0.0", port=0, certificate=pem)
    bound = bind(place)
    bound.listen()

    def refuse(_: str) -> None:
        raise AccessError("unknown token")

    thread = threading.Thread(target=serve, args=(make_app(refuse), bound, place))
    thread.start()
    try:
        port = bound.getsockname()[1]
        trust = ssl.create_default_context(cafile=str(pem))
        assert httpx.get(f"https://localhost:{port}/api/v1/whoami", verify=trust).status_code == 401
    finally:
        started[0].should_exit = True
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_console_answers_and_ends_as_soon_as_its_token_is_printed(tmp_path, number):
    """A shell that starts it in the background has Ctrl-C ignored until it asks for it."""
    command = [sys.executable, "-m", "phalanx", "ui", "--no-browser", "--port", "0"]
    with subprocess.Popen(
        command,
        env=os.environ | {"PHALANX_HOME": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = re.search(r"http://127\.0\.0\.1:(\d+)/ui", process.stderr.readline())
            token = process.stdout.readline().strip()
            with socket.create_connection(("127.0.0.1", int(address[1]))), Client(address[0][:-3], token) as client:
                assert client.whoami().owner
            process.send_signal(number)
            assert process.wait(timeout=30) == 0, process.stderr.read()
        finally:
            process.kill()


def test_a_signal_before_the_server_runs_ends_it():
    with bind(ListenOptions(port=0)) as bound:
        bound.listen()
        code = (
            "import os, signal, socket, sys, uvicorn\n"
            "from phalanx.jobs.api.serve import ListenOptions, serve\n"
            "run = uvicorn.Server.run\n"
            "uvicorn.Server.run = lambda *said, **more: (os.kill(os.getpid(), signal.SIGTERM), run(*said, **more))\n"
            "async def app(scope, receive, send): pass\n"
            "serve(app, socket.socket(fileno=int(sys.argv[1])), ListenOptions())\n"
        )
        run = [sys.executable, "-c", code, str(bound.fileno())]
        assert subprocess.run(run, pass_fds=[bound.fileno()], timeout=60, check=False).returncode == 0


@pytest.mark.timeout(300)
def test_whatever_the_description_allows_breaks_nothing(server, tmp_path):
    """Requests made from the OpenAPI description, valid and not: no answer is an error of the server's own.

    They ask about a workspace and a job that are there. Left out are a stream, which does not end, archives, and
    the ending of tokens, which would end the one they are made with.
    """
    job = server.queue("fuzzed")
    (paths.logs(server.start(job)) / "workerlog.0").write_text("hello\n")
    (tmp_path / "schemathesis.toml").write_text(
        f'headers = {{ Authorization = "Bearer {server.owner_token()}" }}\n'
        f'[parameters]\n"path.job" = "{job.id}"\n"path.workspace" = "default"\n"path.rank" = "0"\n'
    )
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/api/v1/openapi.json",
        "--checks", "not_a_server_error,content_type_conformance,response_schema_conformance",
        "--phases", "fuzzing", "--max-examples", "8", "--generation-deterministic", "--seed", "1",
        "--exclude-path-regex", "(stream|trees)$", "--exclude-path", "/api/v1/tokens/{name}",
        "--request-timeout", "20", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_a_proxy_and_prometheus_have_something_to_ask(server, owner):
    assert httpx.get(f"{server.url}/healthz").text == "ok\n"
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    server.queue("counted", queue="measured")
    running = server.queue("counted")
    status = {
        "time": 1.0, "server": 0, "lag": 0, "tables": {"items": {"rows": 7, "bytes": 900}}, "bytes": 900,
        "budget": 1 << 30, "log_bytes": 0, "requests": {"waiting": 1}, "rates": {"pulls_per_s": 2.5},
    }  # fmt: skip
    (paths.logs(server.start(running)) / "status.server.0.json").write_text(json.dumps(status))
    assert "items" in owner.tables(running.id)
    found = owner.counts()
    assert QueueLength("local", "measured", 1) in found.waiting
    assert found.jobs["running"] >= 1
    asked = {"Authorization": f"Bearer {server.owner_token()}"}
    answer = httpx.get(f"{server.url}/metrics", headers=asked)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'phalanx_queue_length{backend="local",queue="measured"} 1' in lines
    assert f'phalanx_jobs{{state="running"}} {found.jobs["running"]}' in lines
    assert f'phalanx_attempts{{state="running"}} {found.attempts["running"]}' in lines
    assert any(line.startswith('phalanx_http_requests_total{method="GET",status="200"}') for line in lines)
    assert any(line.startswith('phalanx_machine_total{resource="cpu"}') for line in lines)
    assert f'phalanx_table_rows{{job="{running.id}",server="0",table="items"}} 7' in lines
    assert all(
        re.fullmatch(r"# (HELP|TYPE) .*|[a-z_]+(\{[a-z]+=\"[^\"]*\"(,[a-z]+=\"[^\"]*\")*\})? \S+", one) for one in lines
    )
    with Client(server.url, server.token("counts", MemberRole.VIEWER, "default")) as viewer:
        assert QueueLength("local", "measured", 1) in viewer.counts().waiting
    server.store.workspaces.create("counted-apart")
    with Client(server.url, server.token("apart", MemberRole.VIEWER, "counted-apart")) as stranger:
        assert stranger.counts().jobs == {}


def test_head_is_get_without_a_body(server):
    for path in ("/healthz", "/api/v1", "/api/v1/openapi.json", "/ui/sign-in", "/ui/static/console.css"):
        got, head = httpx.get(server.url + path), httpx.head(server.url + path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(f"{server.url}/api/v1/jobs").status_code == 401


def test_mistakes_in_a_request_are_told_in_words(server):
    asked = {"Authorization": f"Bearer {server.owner_token()}"}

    def post(body: object, path: str = "jobs") -> str:
        answer = httpx.post(f"{server.url}/api/v1/{path}", json=body, headers=asked)
        assert answer.status_code == 422
        return str(answer.json()["message"])

    bare = post({"name": "mnist", "command": "python train.py"})
    assert bare == 'body: this is a job itself; put it under `spec`: {"spec": {...}}'
    told = post({"spec": {"name": "Not A Name", "comand": "x"}})
    assert 'body.spec.name: "Not A Name" cannot be; write small letters, digits and dashes, 40 at most' in told
    assert "body.spec.comand: there is no such field. Did you mean 'command'?" in told
    assert "^[a-z0-9]" not in told
    assert httpx.get(f"{server.url}/api/v1").json()["openapi"] == "/api/v1/openapi.json"


def _page(server: JobServer, token: str, path: str) -> httpx.Response:
    cookies = {"phalanx_session": token}
    return httpx.get(f"{server.url}/ui{path}", cookies=cookies, headers={"Accept": "text/html"})


def test_pages_offer_what_a_role_allows(server):
    job = server.queue("roles", owner="ada")
    done = server.queue("roles", owner="ada")
    server.start(done)
    server.end(done)
    for name, role, may in (("looks", MemberRole.VIEWER, False), ("submits", MemberRole.DEVELOPER, True)):
        token = server.token(name, role)
        texts = {
            path: _page(server, token, path).text for path in ("/w/default/", f"/jobs/{done.id}", "/w/default/codes")
        }
        offers = ("New job", "Run again", "Change and submit", "phalanx code add")
        for offer in offers:
            assert any(offer in text for text in texts.values()) == may, (name, offer)
        # Another's running job is for admins to stop.
        assert "/stop" not in _page(server, token, f"/jobs/{job.id}").text
    assert "/stop" in _page(server, server.token("boss", MemberRole.ADMIN), f"/jobs/{job.id}").text
    refused = _page(server, server.token("vera2", MemberRole.VIEWER), "/w/default/new")
    assert refused.status_code == 403
    assert "to submit jobs requires developer" in refused.text
    assert "sign-out" in refused.text
    assert 'href="/ui/queue"' in refused.text


def test_an_address_that_is_not_there_gets_a_page_that_is_one_of_ours(server):
    for path in ("/nothing", "/jobs/none-xyz", "/w/default/?page=x", "/nothing/deeper"):
        answer = _page(server, server.owner_token(), path)
        assert answer.status_code == 404, path
        assert "There is no such page" in answer.text
        assert "sign-out" in answer.text
    stranger = httpx.get(f"{server.url}/ui/nothing")
    assert stranger.status_code == 404
    assert "<main" in stranger.text
    assert httpx.get(f"{server.url}/api/v1/nothing").json()["error"] == "HTTPError"


def test_a_failed_job_opens_the_log_of_the_rank_that_failed(server):
    job = server.queue("blamed")
    folder = server.start(job)
    (paths.logs(folder) / "workerlog.0").touch()
    (paths.logs(folder) / "workerlog.1").write_text("the reason\n")
    server.end(job, Failure(Cause.USER_CODE, "rank 1 raised", rank=1, exit_code=1))
    token = server.owner_token()
    assert "the reason" in _page(server, token, f"/jobs/{job.id}?tab=logs").text
    other = _page(server, token, f"/jobs/{job.id}?tab=logs&rank=0").text
    assert "the reason" not in other
    assert 'data-empty="This rank wrote nothing."' in other


def test_everything_that_a_rank_reports_is_in_the_table(server):
    job = server.queue("reported")
    folder = server.start(job)
    event = {"time": 1.0, "step": 7, "loss": 0.5, "acc": 0.875, "phase": "<b>warm</b>"}
    (paths.logs(folder) / "events.worker.0.jsonl").write_text(json.dumps(event) + "\n")
    text = _page(server, server.owner_token(), f"/jobs/{job.id}").text
    for shown in (">acc</th>", ">0.875</td>", ">phase</th>", "&lt;b&gt;warm&lt;/b&gt;"):
        assert shown in text


def test_changing_a_job_begins_with_what_it_says(server, owner, tree):
    job = owner.submit(TrainingJob(name="sent", command="python train.py", resources={"cpu": 0.5}), base=tree)
    text = _page(server, server.owner_token(), f"/w/default/new?like={job.id}").text
    # The code was sent: only its digest names it. Groups that the job says nothing in stay folded.
    assert f'name="code.digest" value="{job.spec["code"]["digest"]}"' in text
    assert text.count("<details open") == 2
    form = {"name": "sent", "command": "python train.py --lr 1", "code.digest": job.spec["code"]["digest"]}
    cookies = {"phalanx_session": server.owner_token()}
    answer = httpx.post(f"{server.url}/ui/w/default/new", data=form, cookies=cookies)
    assert answer.status_code == 303
    made = owner.job(answer.headers["location"].rpartition("/")[2])
    assert made.spec["code"] == job.spec["code"]
