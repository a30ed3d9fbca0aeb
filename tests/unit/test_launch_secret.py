"""Where a job's secret comes from, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.runtime_folder import own_secret
from phalanx.errors import LaunchError, RoleError
from phalanx.launch.job.attempt_resources import AttemptResources, job_secret
from phalanx.launch.request.nodes import Nodes
from phalanx.launch.request.options import Options
from phalanx.launch.request.request import LaunchRequest

SECRET = "0123456789abcdef" * 4


def job(mode: Any, *hosts: str) -> LaunchRequest:
    return LaunchRequest(mode=mode, nodes=Nodes(hosts, len(hosts), 0, hosts[0]), port=None, counts={"worker": 1})


def test_one_host_makes_a_new_secret_for_every_job() -> None:
    made = {job_secret(job(mode, "127.0.0.1"), {}) for mode in ("ps", "ps", "collective")}
    assert len(made) == 3
    assert all(len(bytes.fromhex(secret)) == 32 for secret in made)


def test_the_users_secret_is_taken() -> None:
    for request in (job("ps", "127.0.0.1"), job("ps", "10.0.0.1", "10.0.0.2"), job("collective", "a", "b")):
        assert job_secret(request, {"PHALANX_JOB_SECRET": SECRET}) == SECRET
    with pytest.raises(RoleError, match=r"PHALANX_JOB_SECRET must be 64 hexadecimal digits, found 4 characters"):
        job_secret(job("ps", "127.0.0.1"), {"PHALANX_JOB_SECRET": "hush"})


def test_servers_on_several_hosts_need_the_users_secret() -> None:
    with pytest.raises(LaunchError, match=r"on 2 hosts need a secret .*openssl rand -hex 32.* same value on every"):
        job_secret(job("ps", "10.0.0.1", "10.0.0.2"), {})
    assert job_secret(job("collective", "10.0.0.1", "10.0.0.2"), {}) == ""


def test_launchers_on_loopback_share_a_secret_only_this_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    request = job("ps", "127.0.0.1", "127.0.0.2")
    assert job_secret(request, {}) == job_secret(request, {}) == own_secret()
    assert [p.name for p in (tmp_path / "phalanx").iterdir()] == ["secret"]
    assert (tmp_path / "phalanx" / "secret").stat().st_mode & 0o777 == 0o600


def test_hosts_compare_secrets_without_telling_them() -> None:
    terms = AttemptResources(job("ps", "10.0.0.1", "10.0.0.2")).offer("job", Options(training_script="x"), SECRET).terms
    assert SECRET[:8] not in str(terms)
    assert "sha256" in terms["PHALANX_JOB_SECRET"]
