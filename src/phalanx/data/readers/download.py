"""`px.data.download`: download a file once per node, with checksum, resume and unpacking.

path = px.data.download("https://host/cifar-10-binary.tar.gz", "data", sha256="c4a38c50...", unpack=True)
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from phalanx.data.readers.archive import unpack_into
from phalanx.errors import ConfigError, DataError, PeerLostError
from phalanx.files import file_lock, sync_file
from phalanx.units import format_mb

logger = logging.getLogger("phalanx.data")

_PIECE_BYTES = 1 << 20
_SILENCE_S = 5.0
"""Seconds between two lines about progress."""


def download(
    url: str,
    folder: str | Path,
    *,
    sha256: str | None = None,
    unpack: bool = False,
    max_bytes: int = 50 * 2**30,
    timeout_s: float = 60.0,
) -> Path:
    """Return a file from the network, downloaded if it is not there yet.

    Any number of processes of a node may call it at once: one downloads while the others wait for it. An
    interrupted download is resumed if there is a checksum to verify the result. The file appears under its name only
    when it is complete. Not collective.

    Args:
        url: An address that begins with https:// or http://.
        folder: The target folder; created if missing. Ranks of several nodes may share it.
        sha256: Checksum of the file, 64 hexadecimal digits. Without one the file is not verified, and its
            checksum is logged.
        unpack: Whether to unpack the file, a zip or tar archive, into `folder`, once.
        max_bytes: Most bytes to accept, of the file and of what is unpacked from it.
        timeout_s: Longest wait for data from the server.

    Returns:
        The file's path, or `folder` when it was unpacked.

    Raises:
        ConfigError: If the address, checksum or folder cannot work, the server does not have the file, or it is larger
            than `max_bytes` or the free space.
        DataError: If the file has another checksum, or the archive is broken or would write outside `folder`.
        PeerLostError: If the server cannot be reached or breaks off; the next call resumes from there.
    """
    target = _Download(url, _name_of(url), Path(folder), _read_digest(sha256), max_bytes, timeout_s)
    try:
        target.folder.mkdir(parents=True, exist_ok=True)
        with _lock(target.folder / f".{target.name}.lock", target.name):
            is_new = not target.path.exists()
            if is_new:
                _fetch(target)
            if unpack:
                unpack_into(target.path, target.folder, max_bytes)
    except OSError as error:
        raise ConfigError(
            f"Asked to download {url} to {folder}, which failed: {error.strerror or error}. Give a folder on a disk "
            "with space that this process may write to."
        ) from None
    if not is_new and target.sha256 is not None:
        _check_present(target)
    return target.folder if unpack else target.path


@dataclass(frozen=True)
class _Download:
    url: str
    name: str
    folder: Path
    sha256: str | None
    max_bytes: int
    timeout_s: float

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def part(self) -> Path:
        return self.folder / f".{self.name}.part"

    @property
    def resumable(self) -> int:
        """Bytes of a broken-off download that can be kept: only a checksum tells whether the parts match."""
        return self.part.stat().st_size if self.sha256 is not None and self.part.exists() else 0


def _name_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"Asked to download {url!r}. Give an address that begins with https:// or http://.")
    name = unquote(parts.path).rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name:
        raise ConfigError(f"Asked to download {url!r}, which ends in no name of a file. Give the address of one file.")
    return name


def _read_digest(sha256: str | None) -> str | None:
    if sha256 is not None and (len(sha256) != 64 or set(sha256.lower()) - set("0123456789abcdef")):
        raise ConfigError(f"Got sha256={sha256!r}. Give 64 hexadecimal digits, as `sha256sum FILE` prints them.")
    return sha256 and sha256.lower()


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    with file_lock(path, lambda: logger.info("another process is downloading %s; waiting for it", name)):
        yield


def _check_present(target: _Download) -> None:
    with target.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != target.sha256:
        raise DataError(
            f"{target.path} has the checksum {digest}, asked for {target.sha256}. Delete it to download it again, or "
            "correct sha256."
        )


# -- one download ----------------------------------------------------------------------------------------------------


def _fetch(target: _Download) -> None:
    have = target.resumable
    with _request(target, have) as answer:
        start = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        _check_size(target, total, start)
        digest = _digest_of_part(target.part, start)
        with target.part.open("ab" if start else "wb") as file:
            size = _copy(target, answer, file, digest, start, total)
            sync_file(file)
    if total is not None and size < total:
        raise PeerLostError(_describe_failure(target, f"the answer ended after {size} of {total} bytes"))
    _check_digest(target, digest.hexdigest(), start)
    target.part.replace(target.path)
    logger.info("%s: %s", target.path, format_mb(size))


@contextmanager
def _request(target: _Download, have: int) -> Iterator[http.client.HTTPResponse]:
    """Request the file from byte `have` on; errors of server or network become ours."""
    request = urllib.request.Request(target.url, headers={"User-Agent": "phalanx", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _opener().open(request, timeout=target.timeout_s) as answer:
            if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise PeerLostError(
                    _describe_failure(target, "the server answered with another part than was asked for")
                )
            yield answer
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is as long as the file, or longer
            target.part.unlink()
        if error.code in (408, 416, 425, 429) or error.code >= 500:
            raise PeerLostError(_describe_failure(target, f"the server said {error.code} {error.reason}")) from None
        raise ConfigError(
            f"Asked to download {target.url}, the server said {error.code} {error.reason}. Check the address."
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise PeerLostError(_describe_failure(target, str(reason) or type(error).__name__)) from None


def _copy(target: _Download, answer: Any, file: Any, digest: Any, start: int, total: int | None) -> int:
    """Write the answer to `file` and return how many bytes the file has then."""
    size, logged_at = start, time.monotonic()
    while piece := answer.read1(_PIECE_BYTES):
        size += len(piece)
        if size > target.max_bytes:
            _check_size(target, size, start)
        digest.update(piece)
        file.write(piece)
        if time.monotonic() - logged_at > _SILENCE_S:
            logged_at = time.monotonic()
            logger.info("%s: %s of %s", target.name, format_mb(size), "?" if total is None else format_mb(total))
    return size


def _digest_of_part(part: Path, size: int) -> Any:
    if not size:
        return hashlib.sha256()
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def _check_size(target: _Download, total: int | None, start: int) -> None:
    if total is None:
        return
    if total > target.max_bytes:
        raise ConfigError(
            f"{target.url} has {total} bytes or more, above max_bytes={target.max_bytes}. Give a larger max_bytes, or "
            "check the address."
        )
    free = shutil.disk_usage(target.folder).free
    if total - start > free:
        raise ConfigError(f"{target.url} has {total} bytes, but {target.folder} has space for {free}. Make space.")


def _check_digest(target: _Download, digest: str, start: int) -> None:
    if target.sha256 is None:
        logger.warning('%s was downloaded unchecked; pass sha256="%s" to download()', target.name, digest)
    elif digest != target.sha256:
        target.part.unlink()
        again = " It was resumed; call again to download it from the start." if start else ""
        raise DataError(
            f"{target.url} has the checksum {digest}, asked for {target.sha256}.{again} Check the address and the "
            "checksum: the file may have been replaced."
        )


def _describe_failure(target: _Download, reason: str) -> str:
    resumable = target.resumable
    again = f"call again to resume after {resumable} bytes" if resumable else "call again"
    return (
        f"Asked to download {target.url}: {reason}. Check the network, then {again}, or put the file at {target.path}."
    )


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over the network only, and none from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before, after) == ("https", "http"):
            raise ConfigError(
                f"Asked to download {req.full_url}, which redirects to {newurl}. Only addresses with https://, or with "
                "http:// from one like it, are followed; give the address of the file itself."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    # Handlers one by one: the usual opener also reads file:// and ftp://.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _SafeRedirects(),
    ):
        opener.add_handler(handler)
    return opener
