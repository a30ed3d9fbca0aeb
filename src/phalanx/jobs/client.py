"""`Client`: the jobs API over HTTP, with the same methods as `Jobs`.

with Client("https://train.example:8470", token) as jobs:
    job = jobs.submit(TrainingJob(name="mnist", command="python train.py"), base=Path("."))
    print(jobs.job(job.id).state)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from phalanx import errors
from phalanx.errors import BackendError, ConfigError, PhalanxError
from phalanx.jobs.models import Job
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.routes import VerbRoute
from phalanx.jobs.sources.archive import pack
from phalanx.jobs.spec.code_and_data import Code
from phalanx.jobs.spec.training_job import TrainingJob

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Client(Jobs):
    """What the holder of a token may ask of a server of jobs. A context; thread-safe.

    Args:
        address: Of the server; https, or http on loopback.
        token: Made by `phalanx token add`.
        timeout_s: Seconds to wait for an answer.

    Raises:
        ConfigError: If `address` would send the token in the clear over a network.

    Every verb raises BackendError if the server does not answer, and else what the service would. Verbs that are not
    defined here are sent as their routes say.
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

    def submit(self, spec: TrainingJob, *, base: Path | None = None, request: str | None = None) -> Job:
        """Send the code of `spec` if it is a path, then the job; see `Jobs.submit`."""
        return super().submit(self._send_code(spec, base), request=request)

    def render(self, spec: TrainingJob, *, base: Path | None = None, full: bool = False) -> str:
        """Return what the server's backend would be given; the code is sent, so that it can be checked."""
        return super().render(self._send_code(spec, base), full=full)

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

    def put_tree(self, workspace: str, archive: Path) -> str:
        """Send a tar.gz archive of code; return its digest."""
        with archive.open("rb") as file:
            headers = {"Content-Length": str(archive.stat().st_size), "Content-Type": "application/gzip"}
            path = f"workspaces/{_quote(workspace)}/trees"
            return str(self._request("POST", path, content=file, headers=headers).json()["digest"])

    def _send(self, route: VerbRoute, arguments: dict[str, Any]) -> Any:
        """Send a verb to the server, and return its result."""
        path = route.path.format_map({name: _quote(str(value)) for name, value in arguments.items()}).lstrip("/")
        others = {name: value for name, value in arguments.items() if not route.in_path(name)}
        if route.has_query:
            query = {route.names.get(name, name): value for name, value in others.items() if value is not None}
            response = self._request(route.method, path, params=query)
        elif others:
            response = self._request(route.method, path, json=to_jsonable_python(others.get(route.body or "", others)))
        else:
            response = self._request(route.method, path)
        if route.result_type is None:
            return None
        if route.is_text:
            return response.text
        if route.result_key is None:
            return TypeAdapter(route.result_type).validate_json(response.content)
        return TypeAdapter(route.result_type).validate_python(response.json()[route.result_key])

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise BackendError(
                f"The server of jobs at {self._address} does not answer ({error}). Is it running (phalanx serve)?"
            ) from None
        if response.is_success:
            return response
        raise _parse_error(response)


def _quote(part: str) -> str:
    return quote(part, safe="")


def _parse_error(response: httpx.Response) -> PhalanxError:
    """The error in the server's answer, as the service raised it."""
    try:
        body = response.json()
        kind, message = str(body["error"]), str(body["message"])
    except (ValueError, KeyError, TypeError):
        return BackendError(f"The server answered {response.status_code} {response.reason_phrase} and no reason.")
    error_class = getattr(errors, kind, errors.AccessError if response.status_code == 401 else BackendError)
    return (
        error_class(message)
        if isinstance(error_class, type) and issubclass(error_class, PhalanxError)
        else BackendError(message)
    )
