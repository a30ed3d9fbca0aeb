"""`look`, `fetch`: look up and download remote datasets: S3, OSS, HTTP."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import DataError, SpecError
from phalanx.jobs.sources.build_once import Progress
from phalanx.jobs.sources.egress import EgressPolicy
from phalanx.jobs.spec.addresses import bucket_and_key, inner_path
from phalanx.jobs.spec.code_and_data import Dataset

logger = logging.getLogger("phalanx.jobs")

_ANSWER_S = 30


@dataclass(frozen=True)
class RemoteObject:
    """What lies at an address now. `version` changes with the content; None if the server does not tell."""

    version: str | None
    size: int | None


def look(dataset: Dataset, secret: str | None = None, egress: EgressPolicy | None = None) -> RemoteObject:
    """Return what lies at the address of an s3, oss or http dataset, whose content is not read.

    Args:
        dataset: The dataset.
        secret: Value of `dataset.secret`.
        egress: Which hosts may be asked; None is no limit.

    Raises:
        SpecError: If it cannot be reached or read, or is not there, or its host may not be asked.
    """
    if dataset.kind == "http":
        return _look_at_page(dataset, egress)
    if egress is not None and dataset.endpoint is not None:
        egress.check(dataset.endpoint)
    objects = _objects(dataset, secret)[1]
    listing = "".join(f"{name}\0{item['size']}\0{item['ETag']}\n" for name, item in sorted(objects.items()))
    return RemoteObject(hashlib.sha256(listing.encode()).hexdigest(), sum(item["size"] for item in objects.values()))


def fetch(dataset: Dataset, into: Path, secret: str | None = None) -> None:
    """Copy the objects of an s3 or oss dataset: into the folder `into`, or to the file `into` if it is one object.

    Raises:
        SpecError: As `look`.
        DataError: If an object has a name that leads out of `into`, or changes while it is read.
    """
    store, objects = _objects(dataset, secret)
    _, key = bucket_and_key(str(dataset.uri))
    targets = {path: into / _inner(dataset, name) if name else into for path, name in _names(objects, key).items()}
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(f"fetching dataset {dataset.name}", sum(item["size"] for item in objects.values()))
    with _explained(dataset):
        store.get(list(targets), [str(target) for target in targets.values()], callback=_counter(progress))
    for path, target in targets.items():
        if target.stat().st_size != objects[path]["size"]:
            raise DataError(
                f"dataset {dataset.name}: {path} changed while it was read. Submit when nothing writes to it."
            )
        target.chmod(0o444)


def _look_at_page(dataset: Dataset, egress: EgressPolicy | None) -> RemoteObject:
    import httpx  # slow to import, as s3fs is

    request_headers = {"Accept-Encoding": "identity"}  # the size of the file, not of how it travels
    options: dict[str, Any] = {"headers": request_headers, "follow_redirects": True, "timeout": _ANSWER_S}
    try:
        # Some servers answer HEAD with an error, all of them GET; the body is not read.
        with (
            httpx.Client(**options) if egress is None else egress.client(**options) as client,
            client.stream("GET", str(dataset.uri)) as response,
        ):
            status, headers = response.status_code, response.headers
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise SpecError(f"{dataset.uri} cannot be reached: {reason}. Check the address and the network.") from None
    if status >= 400:
        raise SpecError(f"{dataset.uri}: the server said {status} {httpx.codes.get_reason_phrase(status)}. Correct it.")
    length = headers.get("Content-Length")
    return RemoteObject(headers.get("ETag") or headers.get("Last-Modified"), None if length is None else int(length))


def _objects(dataset: Dataset, secret: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the file system of a bucket, and its objects under the dataset's address by path."""
    bucket, key = bucket_and_key(str(dataset.uri))
    store = _file_system(dataset, secret)
    with _explained(dataset):
        listing = store.find(f"{bucket}/{key}" if key else bucket, detail=True)
    objects = {path: item for path, item in listing.items() if item["type"] == "file" and not path.endswith("/")}
    if not objects:
        raise SpecError(f"{dataset.uri} holds nothing. Check bucket and path, which are case-sensitive.")
    return store, objects


def _file_system(dataset: Dataset, secret: str | None) -> Any:
    try:
        import s3fs  # also speaks to OSS; slow to import
    except ImportError:
        raise SpecError(f"{dataset.uri} needs s3fs. Install it: pip install 'phalanx[s3]'") from None
    identity, _, rest = (secret or "").partition(":")
    key, _, token = rest.partition(":")
    if secret is not None and not (identity and key):
        raise SpecError(f"secret {dataset.secret} is no key of a bucket. Store it as ACCESS_KEY_ID:ACCESS_KEY_SECRET.")
    login = {"key": identity, "secret": key, "token": token or None} if secret is not None else {"anon": True}
    return s3fs.S3FileSystem(
        **login,
        endpoint_url=dataset.endpoint,
        # OSS knows buckets as host names only. s3fs itself tries again what may pass.
        config_kwargs={
            "s3": {"addressing_style": "virtual" if dataset.kind == "oss" else "auto"},
            "retries": {"max_attempts": 1},
            "connect_timeout": _ANSWER_S,
        },
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@contextmanager
def _explained(dataset: Dataset) -> Iterator[None]:
    """Turn what s3fs and botocore raise into our errors."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (OSError, BotoCoreError, ClientError) as error:
        who = f"with secret {dataset.secret}" if dataset.secret else "without a secret"
        reason = str(error) or type(error).__name__
        raise SpecError(f"{dataset.uri} cannot be read {who}: {reason}. Check address, endpoint and secret.") from None


def _names(objects: dict[str, Any], key: str) -> dict[str, str]:
    """Return each object's path below `key`, empty for the object that `key` itself is."""
    return {path: path.partition("/")[2].removeprefix(key).lstrip("/") for path in objects}


def _inner(dataset: Dataset, name: str) -> str:
    try:
        return inner_path(name)
    except ValueError:
        raise DataError(f"dataset {dataset.name} holds an object {name!r}, which is no path. Rename it.") from None


def _counter(progress: Progress) -> Any:
    from fsspec.callbacks import Callback

    class Counter(Callback):  # type: ignore[misc]
        """Counts the bytes of the files, not the files."""

        def branched(self, path_1: str, path_2: str, **_: Any) -> Any:
            child = Callback()
            child.relative_update = progress.add
            return child

    return Counter()
