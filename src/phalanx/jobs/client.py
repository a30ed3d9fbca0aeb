"""Jobs on a server: the verbs of `Jobs` over HTTP, with the same arguments, values and errors.

with Client("https://train.example:8470", token) as jobs:
    job = jobs.submit(TrainingJob(name="mnist", command="python train.py"), base=Path("."))
    print(jobs.job(job.id).state)
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import TypeAdapter

from phalanx import errors
from phalanx.errors import BackendError, ConfigError, PhalanxError
from phalanx.jobs.attempt.metrics import Reports
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.models import Actor, Attempt, Counts, Event, Job, MemberRole, NamedConfig, Workspace
from phalanx.jobs.protocol import LogPart, NewToken, SecretName, Token
from phalanx.jobs.sources.archive import pack
from phalanx.jobs.spec import Code, Dataset, TrainingJob
from phalanx.jobs.states import JobState

T = TypeVar("T")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Client:
    """What the holder of a token may ask of a server of jobs. A context; thread-safe.

    Args:
        address: Of the server; https, or http on loopback.
        token: Made by `phalanx token add`.
        timeout_s: Seconds to wait for an answer.

    Raises:
        ConfigError: If `address` would send the token in the clear over a network.

    Every verb raises BackendError if the server does not answer, and else what the service would.
    """

    def __init__(self, address: str, token: str, *, timeout_s: float = 60.0) -> None:
        parts = urlsplit(address)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ConfigError(
                f"The server's address is {address!r}. Off this machine it must begin with https://, "
                "so that the token is not sent in the clear."
            )
        self._address = address.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self._address}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def whoami(self) -> Actor:
        """Return who asks."""
        return self._get(Actor, "whoami")

    def submit(self, spec: TrainingJob, *, base: Path | None = None, request: str | None = None) -> Job:
        """Send the code of `spec` if it is a path, then the job; see `Jobs.submit`."""
        body = {"spec": self._send_code(spec, base).model_dump(mode="json"), "request": request}
        return self._ask(Job, "POST", "jobs", json=body)

    def render(self, spec: TrainingJob, *, base: Path | None = None, full: bool = False) -> str:
        """Return what the server's backend would be handed; the code is sent, so that it can be checked."""
        body = {"spec": self._send_code(spec, base).model_dump(mode="json"), "full": full}
        return str(self._ask(dict[str, str], "POST", "jobs/render", json=body)["text"])

    def _send_code(self, spec: TrainingJob, base: Path | None) -> TrainingJob:
        """`spec` with the code at its path sent to the server, which cannot read this machine's."""
        if spec.code.path is None or spec.code.digest is not None:
            return spec
        tree = (base or Path.cwd()) / spec.code.path
        with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            archive = Path(folder) / "tree.tar.gz"
            pack(tree, archive)
            digest = self.put_tree(spec.workspace, archive)
        return spec.model_copy(update={"code": Code(digest=digest, subdir=spec.code.subdir)})

    def jobs(
        self,
        workspace: str | None = None,
        *,
        states: Collection[JobState] = (),
        owner: str | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Return jobs, newest first."""
        asked = {"workspace": workspace, "state": list(states), "owner": owner, "limit": limit}
        return self._get(list[Job], "jobs", **asked)

    def job(self, job: str) -> Job:
        """Return one job."""
        return self._get(Job, _path("jobs", job))

    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job."""
        return self._get(list[Attempt], _path("jobs", job, "attempts"))

    def events(self, job: str, *, after: int = 0) -> list[Event]:
        """Return what happened to a job since event number `after`."""
        return self._get(list[Event], _path("jobs", job, "events"), after=after)

    def stop(self, job: str) -> Job:
        """Ask a job to end."""
        return self._ask(Job, "POST", _path("jobs", job, "stop"))

    def retry(self, job: str) -> Job:
        """Submit the resolved spec of a job that has ended again."""
        return self._ask(Job, "POST", _path("jobs", job, "retry"))

    def logs_of(self, job: str, *, attempt: int | None = None) -> list[str]:
        """Return the names of the logs of an attempt."""
        return self._get(list[str], _path("jobs", job, "logs"), attempt=attempt)

    def log(
        self, job: str, *, rank: str = "0", attempt: int | None = None, offset: int = 0, limit: int = 65536
    ) -> LogPart:
        """Return some of one log."""
        return self._get(LogPart, _path("jobs", job, "logs", rank), attempt=attempt, offset=offset, limit=limit)

    def reporting(self, job: str, *, attempt: int | None = None) -> list[str]:
        """Return the ranks of an attempt that report their steps."""
        return self._get(list[str], _path("jobs", job, "reports"), attempt=attempt)

    def reports(self, job: str, *, rank: str, attempt: int | None = None, offset: int = 0) -> Reports:
        """Return what one rank reported."""
        return self._get(Reports, _path("jobs", job, "reports", rank), attempt=attempt, offset=offset)

    def usage(self, job: str, *, node: int | None = None, attempt: int | None = None, offset: int = 0) -> list[Usage]:
        """Return what the processes of an attempt used, node by node."""
        return self._get(list[Usage], _path("jobs", job, "usage"), node=node, attempt=attempt, offset=offset)

    def plan(self, job: str) -> str:
        """Return the picture of the Plan a job trains by, as SVG; empty if it left none."""
        return self._answer("GET", _path("jobs", job, "plan")).text

    def counts(self) -> Counts:
        """Return how many jobs and attempts there are of those that the caller sees."""
        answer = self._get(dict[str, Any], "counts")
        waiting = {(row["backend"], row["queue"]): row["jobs"] for row in answer["waiting"]}
        return Counts(answer["jobs"], answer["attempts"], waiting)

    def machine(self) -> dict[str, tuple[float, float]]:
        """Return what of the server's machine is given to jobs and what it has."""
        found = self._get(dict[str, dict[str, float]], "machine")
        return {name: (one["used"], one["total"]) for name, one in found.items()}

    def workspaces(self) -> list[Workspace]:
        """Return the workspaces the holder of the token is in."""
        return self._get(list[Workspace], "workspaces")

    def add_workspace(self, workspace: str) -> Workspace:
        """Make a workspace."""
        return self._ask(Workspace, "PUT", _path("workspaces", workspace))

    def remove_workspace(self, workspace: str) -> None:
        """Remove a workspace with everything in it."""
        self._answer("DELETE", _path("workspaces", workspace))

    def put_member(self, workspace: str, name: str, role: MemberRole) -> None:
        """Make someone a member, or give a member another role."""
        self._answer("PUT", _path("workspaces", workspace, "members", name), json={"role": role})

    def remove_member(self, workspace: str, name: str) -> None:
        """End a membership."""
        self._answer("DELETE", _path("workspaces", workspace, "members", name))

    def put_tree(self, workspace: str, archive: Path) -> str:
        """Send a tar.gz archive of code; return its digest."""
        with archive.open("rb") as file:
            headers = {"Content-Length": str(archive.stat().st_size), "Content-Type": "application/gzip"}
            path = _path("workspaces", workspace, "trees")
            return str(self._ask(dict[str, str], "POST", path, content=file, headers=headers)["digest"])

    def codes(self, workspace: str) -> list[NamedConfig]:
        """Return the code configurations of a workspace."""
        return self._get(list[NamedConfig], _path("workspaces", workspace, "codes"))

    def put_code(self, workspace: str, name: str, code: Code) -> NamedConfig:
        """Keep where code comes from under a name."""
        body = code.model_dump(mode="json")
        return self._ask(NamedConfig, "PUT", _path("workspaces", workspace, "codes", name), json=body)

    def remove_code(self, workspace: str, name: str) -> None:
        """Remove a code configuration."""
        self._answer("DELETE", _path("workspaces", workspace, "codes", name))

    def datasets(self, workspace: str) -> list[NamedConfig]:
        """Return the dataset configurations of a workspace."""
        return self._get(list[NamedConfig], _path("workspaces", workspace, "datasets"))

    def put_dataset(self, workspace: str, dataset: Dataset) -> NamedConfig:
        """Keep where a dataset lies under its name."""
        body = dataset.model_dump(mode="json")
        return self._ask(NamedConfig, "PUT", _path("workspaces", workspace, "datasets"), json=body)

    def remove_dataset(self, workspace: str, name: str) -> None:
        """Remove a dataset configuration."""
        self._answer("DELETE", _path("workspaces", workspace, "datasets", name))

    def secrets(self, workspace: str) -> list[SecretName]:
        """Return the names of the secrets of a workspace."""
        return self._get(list[SecretName], _path("workspaces", workspace, "secrets"))

    def put_secret(self, workspace: str, name: str, value: str) -> SecretName:
        """Keep a value under a name."""
        path = _path("workspaces", workspace, "secrets", name)
        return self._ask(SecretName, "PUT", path, json={"value": value})

    def remove_secret(self, workspace: str, name: str) -> None:
        """Remove a secret."""
        self._answer("DELETE", _path("workspaces", workspace, "secrets", name))

    def tokens(self) -> list[Token]:
        """Return the tokens of this one's owner, without their text."""
        return self._get(list[Token], "tokens")

    def add_token(self, name: str, *, owner: str | None = None, lasts_s: float | None = None) -> NewToken:
        """Make a token."""
        return self._ask(NewToken, "POST", "tokens", json={"name": name, "owner": owner, "lasts_s": lasts_s})

    def remove_token(self, name: str, *, owner: str | None = None) -> None:
        """End a token."""
        self._answer("DELETE", _path("tokens", name), params={} if owner is None else {"owner": owner})

    def _get(self, kind: type[T], path: str, **asked: Any) -> T:
        return self._ask(kind, "GET", path, params={name: one for name, one in asked.items() if one is not None})

    def _ask(self, kind: type[T], method: str, path: str, **sent: Any) -> T:
        return TypeAdapter(kind).validate_json(self._answer(method, path, **sent).content)

    def _answer(self, method: str, path: str, **sent: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **sent)
        except httpx.TransportError as error:
            raise BackendError(
                f"The server of jobs at {self._address} does not answer ({error}). Is it running (phalanx serve)?"
            ) from None
        if answer.is_success:
            return answer
        raise _parse_error(answer)


def _path(*parts: str) -> str:
    return "/".join(quote(part, safe="") for part in parts)


def _parse_error(answer: httpx.Response) -> PhalanxError:
    """The error that the server's answer tells of, as the service would have raised it."""
    try:
        body = answer.json()
        kind, message = str(body["error"]), str(body["message"])
    except (ValueError, KeyError, TypeError):
        return BackendError(f"The server answered {answer.status_code} {answer.reason_phrase} and no reason.")
    error_class = getattr(errors, kind, errors.AccessError if answer.status_code == 401 else BackendError)
    return (
        error_class(message)
        if isinstance(error_class, type) and issubclass(error_class, PhalanxError)
        else BackendError(message)
    )
