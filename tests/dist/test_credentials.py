"""Credentials that are wrong, missing, expired or sent again: one named error each, and secrets are written nowhere."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from job_server import JobServer, job_server
from launching import SPARSE_MODEL, Launch
from phalanx.errors import AccessError, ConfigError
from phalanx.jobs.client import Client
from phalanx.jobs.models import Actor, MemberRole
from phalanx.ps.wire import Connection, RpcReply, RpcRequest, frame
from phalanx.ps.wire import secret as handshake
from phalanx.ps.wire.channel import Channel, Part
from phalanx.ps.wire.frame import FrameKind
from wiring import SECRET, connected, serving, tcp_only

pytestmark = pytest.mark.dist

# --- parameter server -------------------------------------------------------------------------------------------------


class RecordingChannel(Channel):
    """Keeps what it sends, as who listens on the network would."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.sent = b""

    def send(self, parts: list[Part], **options: object) -> None:  # type: ignore[override]
        self.sent += b"".join(bytes(part) for part in parts)
        super().send(parts, **options)  # type: ignore[arg-type]


def dial(endpoint: str) -> socket.socket:
    host, port = endpoint.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def request(seq: int) -> bytes:
    layout = frame.layout_of([np.arange(3)])
    content = {"op": "push", "meta": {}, "arrays": layout.describe()}
    head = frame.encode(FrameKind.REQUEST, 0, 1, seq, content, layout.payload_bytes)
    return head + b"".join(frame.chunks(layout, [np.arange(3)]))


def test_a_conversation_that_is_sent_again_is_refused(caplog, phalanx_propagates):
    """Who has recorded a client's handshake and its pushes cannot say them again: the server's nonce is another."""
    taken: list[RpcRequest] = []

    def take(request: RpcRequest) -> RpcReply:
        taken.append(request)
        return RpcReply()

    with serving(take) as listener:
        channel = RecordingChannel(dial(listener.endpoint))
        mine, deadline = handshake.greeting("worker 1", 1), time.monotonic() + 10
        handshake.greet(channel, mine, secret=SECRET, peer="server 0", binding=b"", deadline=deadline)
        channel.send([request(1)])
        assert channel.read_head(deadline)[0].kind == FrameKind.REPLY
        channel.close()
        assert len(taken) == 1
        with dial(listener.endpoint) as replay:
            replay.sendall(channel.sent)
            received = b"".join(iter(lambda: replay.recv(1 << 16), b""))
        # The server's greeting and 32 zeros: nothing that depends on the secret.
        assert received[len(mine.raw) :] in (b"", bytes(32))
        with connected(listener) as connection:
            connection.call("push", {}, [np.arange(3)])
    assert len(taken) == 2
    assert "refuses a client from 127.0.0.1" in caplog.text
    assert "the secrets differ" in caplog.text


@pytest.mark.parametrize("over_network", [False, True], ids=["this host", "tls"])
@pytest.mark.parametrize("secret", [b"", SECRET[:-1], SECRET + b"0", SECRET.upper(), b"\0" * 32])
def test_a_secret_that_is_missing_or_wrong_is_named_and_not_told(
    secret: bytes, over_network: bool, monkeypatch, caplog, phalanx_propagates
):
    if over_network:
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
        monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)
    with serving(lambda request: RpcReply()) as listener:
        with pytest.raises(ConfigError, match="the secrets differ") as caught:
            Connection(listener.endpoint, secret=secret, me="worker 1", peer="server 0", connect_s=10)
        with connected(listener) as connection:
            connection.call("echo", {})
        shown = repr(listener.__dict__) + repr(connection.__dict__)
    said = str(caught.value) + caplog.text + shown
    for text in (SECRET.decode(), SECRET.hex(), repr(SECRET)):
        assert text not in said


# --- jobs API ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with job_server(tmp_path_factory.mktemp("home")) as running:
        yield running


def expired(server: JobServer) -> str:
    text = server.store.tokens.create("short", Actor("ann"), lasts_s=0.01).text
    time.sleep(0.05)
    return text


def removed(server: JobServer) -> str:
    text = server.store.tokens.create("gone", Actor("ann")).text
    with Client(server.url, text) as client:
        assert client.whoami().name == "ann"
    server.store.tokens.remove("gone", "ann")
    return text


def of_two(server: JobServer) -> str:
    """Return a token that begins as one and ends as another."""
    one, other = server.token("ann", MemberRole.VIEWER), server.store.tokens.create("two", Actor("ann")).text
    return "_".join([*one.split("_")[:2], other.split("_", 2)[2]])


BAD_TOKENS: dict[str, Callable[[JobServer], str]] = {
    "expired": expired,
    "removed": removed,
    "cut": lambda server: server.owner_token()[:-1],
    "longer": lambda server: server.owner_token() + "x",
    "of two": of_two,
    "identity alone": lambda server: "_".join(server.owner_token().split("_")[:2]),
    "no token": lambda server: "x",
    "long": lambda server: "phx_" + "x" * 8000,
    "sql": lambda server: "phx_' OR '1'='1_x",
}


@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_no_token_but_a_valid_one_is_let_in_and_all_others_hear_the_same(server: JobServer, kind: str, caplog):
    job, text = server.queue("mine"), BAD_TOKENS[kind](server)
    answers = []
    for path in ("jobs", f"jobs/{job.id}", "jobs/nothing", "workspaces", "whoami"):
        answer = httpx.get(f"{server.url}/api/v1/{path}", headers={"Authorization": f"Bearer {text}"})
        answers.append(answer)
        assert answer.status_code in (401, 404), answer.text
        if answer.status_code == 401:
            assert answer.json()["error"] == "TokenError"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert {answer.status_code for answer in answers[:2]} == {401}
    assert len({answer.text for answer in answers if answer.status_code == 401}) == 1
    page = httpx.get(f"{server.url}/ui/", cookies={"phalanx_session": text}, follow_redirects=False)
    assert page.status_code in (302, 303, 401)
    said = "".join(f"{answer.text}{answer.headers}" for answer in [*answers, page]) + caplog.text
    assert job.id not in answers[0].text + answers[1].text
    assert text not in said or kind == "no token"
    with Client(server.url, text) as client, pytest.raises(AccessError, match="unknown or has expired"):
        client.jobs()


def test_tokens_are_in_no_file_of_the_store(server: JobServer):
    text = server.owner_token()
    with Client(server.url, text) as client:
        client.jobs()
    files = [path for path in server.home.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if text.encode() in path.read_bytes()]


# --- what a job that fails leaves behind ------------------------------------------------------------------------------

SECRETS = {
    "PHALANX_JOB_SECRET": "5ec4e7" * 10 + "abcd",
    "AWS_SECRET_ACCESS_KEY": "of-the-cloud-17c1",
    "WANDB_API_KEY": "of-the-tracker-88d2",
    "HF_APIKEY": "of-the-hub-4b1f",
    "MYSQL_PWD": "of-the-base-93aa",
    "DATABASE_URL": "postgresql://me:of-the-address-03ef@host/base",
}
VALUES = [*list(SECRETS.values())[:-1], "of-the-address-03ef"]

FAILING = (
    SPARSE_MODEL
    + """
import os, pathlib, signal, sys
model = Model()
model, optimizer, _ = px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
ctx = px.init()
for step in range(3):
    ids = torch.randint(50, (8, 2))
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()
lines = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_bytes())
    except OSError:
        continue
print("in a command line:", any(value.encode() in line for value in VALUES for line in lines), flush=True)
if sys.argv[1] == "raise" and ctx.rank == 0:
    raise RuntimeError("as asked")
if sys.argv[1] == "kill" and ctx.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "abort" and ctx.rank == 0:
    os.abort()
while True:
    pass
"""
)


@pytest.mark.parametrize("end", ["raise", "kill", "abort"])
def test_a_job_that_fails_writes_its_secrets_nowhere(tmp_path: Path, end: str):
    (tmp_path / "train.py").write_text(f"VALUES = {[value[::-1] for value in VALUES]}\n" + UNREVERSE + FAILING)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    before = set(os.listdir("/dev/shm"))
    job = Launch(
        ("--server-num", "1", "--worker-num", "2", "--per-rank-dir", "train.py", end),
        tmp_path,
        environment={**SECRETS, "XDG_RUNTIME_DIR": str(runtime)},
    ).wait()
    job.gone_within(2)
    assert job.code != 0
    assert "failed first" in job.err + job.out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "in a command line: False" in "".join(path.read_text() for path in files if path.suffix == ".log")
    files += [Path("/dev/shm", name) for name in set(os.listdir("/dev/shm")) - before]
    written = {str(path): path.read_bytes() for path in files} | {"console": (job.out + job.err).encode()}
    assert any(path.endswith("env.log") for path in written)
    assert not [(path, value) for path, text in written.items() for value in VALUES if value.encode() in text]


UNREVERSE = "VALUES = [value[::-1] for value in VALUES]\n"
