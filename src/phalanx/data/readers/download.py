"""Files from the network: once per node, checked, and only when asked. Nothing else in this package downloads.

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

    Any number of processes of a node may call it at once: one downloads while the others wait for it. A download that
    was broken off is gone on with, if there is a checksum to tell that the parts fit. The file appears under its name
    only when it is whole. Not collective.

    Args:
        url: An address that begins with https:// or http://.
        folder: Where the file is to lie; made if need be. Ranks of several nodes may share it.
        sha256: Checksum of the file, 64 hexadecimal digits. Without one the file is taken as it comes, and the
            checksum it has is logged.
        unpack: Whether to unpack the file, a zip or tar archive, into `folder`, once.
        max_bytes: Most bytes to accept, of the file and of what is unpacked from it.
        timeout_s: Longest wait for a sign of the server.

    Returns:
        The file's path, or `folder` when it was unpacked.

    Raises:
        ConfigError: If the address, checksum or folder cannot work, the server does not have the file, or it is larger
            than `max_bytes` or the free space.
        DataError: If the file has another checksum, or the archive is broken or would write outside `folder`.
        PeerLostError: If the server cannot be reached or breaks off; the next call goes on from there.
    """
    wanted = _Wanted(url, _name_of(url), Path(folder), _checked_digest(sha256), max_bytes, timeout_s)
    try:
        wanted.folder.mkdir(parents=True, exist_ok=True)
        with _locked(wanted.folder / f".{wanted.name}.lock", wanted.name):
            is_new = not wanted.path.exists()
            if is_new:
                _fetch(wanted)
            if unpack:
                unpack_into(wanted.path, wanted.folder, max_bytes)
    except OSError as error:
        raise ConfigError(
            f"Asked to download {url} to {folder}, which failed: {error.strerror or error}. Give a folder on a disk "
            "with space that this process may write to."
        ) from None
    if not is_new and wanted.sha256 is not None:
        _check_present(wanted)
    return wanted.folder if unpack else wanted.path


@dataclass(frozen=True)
class _Wanted:
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


def _name_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"Asked to download {url!r}. Give an address that begins with https:// or http://.")
    name = unquote(parts.path).rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name:
        raise ConfigError(f"Asked to download {url!r}, which ends in no name of a file. Give the address of one file.")
    return name


def _checked_digest(sha256: str | None) -> str | None:
    if sha256 is not None and (len(sha256) != 64 or set(sha256.lower()) - set("0123456789abcdef")):
        raise ConfigError(f"Got sha256={sha256!r}. Give 64 hexadecimal digits, as `sha256sum FILE` prints them.")
    return sha256 and sha256.lower()


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    with file_lock(path, lambda: logger.info("another process has %s in hand; waiting for it", name)):
        yield


def _check_present(wanted: _Wanted) -> None:
    with wanted.path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        raise DataError(
            f"{wanted.path} has the checksum {found}, asked for {wanted.sha256}. Delete it to download it again, or "
            "correct sha256."
        )


# -- one download ----------------------------------------------------------------------------------------------------


def _fetch(wanted: _Wanted) -> None:
    have = wanted.part.stat().st_size if wanted.sha256 is not None and wanted.part.exists() else 0
    with _asked(wanted, have) as answer:
        start = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        _check_size(wanted, total, start)
        digest = _digest_of_part(wanted.part, start)
        with wanted.part.open("ab" if start else "wb") as file:
            got = _copy(wanted, answer, file, digest, start, total)
            sync_file(file)
    if total is not None and got < total:
        raise PeerLostError(_broken_off(wanted, f"the answer ended after {got} of {total} bytes"))
    _check_digest(wanted, digest.hexdigest(), start)
    wanted.part.replace(wanted.path)
    logger.info("%s: %s", wanted.path, format_mb(got))


@contextmanager
def _asked(wanted: _Wanted, have: int) -> Iterator[http.client.HTTPResponse]:
    """Ask for the file from byte `have` on; what goes wrong with server or network becomes our errors."""
    request = urllib.request.Request(wanted.url, headers={"User-Agent": "phalanx", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _opener().open(request, timeout=wanted.timeout_s) as answer:
            if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise PeerLostError(_broken_off(wanted, "the server answered with another part than was asked for"))
            yield answer
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is as long as the file, or longer
            wanted.part.unlink()
        if error.code in (408, 416, 425, 429) or error.code >= 500:
            raise PeerLostError(_broken_off(wanted, f"the server said {error.code} {error.reason}")) from None
        raise ConfigError(
            f"Asked to download {wanted.url}, the server said {error.code} {error.reason}. Check the address."
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise PeerLostError(_broken_off(wanted, str(reason) or type(error).__name__)) from None


def _copy(wanted: _Wanted, answer: Any, file: Any, digest: Any, start: int, total: int | None) -> int:
    """Write the answer to `file` and return how many bytes the file has then."""
    got, said = start, time.monotonic()
    while piece := answer.read1(_PIECE_BYTES):
        got += len(piece)
        if got > wanted.max_bytes:
            _check_size(wanted, got, start)
        digest.update(piece)
        file.write(piece)
        if time.monotonic() - said > _SILENCE_S:
            said = time.monotonic()
            logger.info("%s: %s of %s", wanted.name, format_mb(got), "?" if total is None else format_mb(total))
    return got


def _digest_of_part(part: Path, size: int) -> Any:
    if not size:
        return hashlib.sha256()
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def _check_size(wanted: _Wanted, total: int | None, start: int) -> None:
    if total is None:
        return
    if total > wanted.max_bytes:
        raise ConfigError(
            f"{wanted.url} has {total} bytes or more, above max_bytes={wanted.max_bytes}. Give a larger max_bytes, or "
            "check the address."
        )
    free = shutil.disk_usage(wanted.folder).free
    if total - start > free:
        raise ConfigError(f"{wanted.url} has {total} bytes, but {wanted.folder} has space for {free}. Make space.")


def _check_digest(wanted: _Wanted, found: str, start: int) -> None:
    if wanted.sha256 is None:
        logger.warning('%s was downloaded unchecked; pass sha256="%s" to download()', wanted.name, found)
    elif found != wanted.sha256:
        wanted.part.unlink()
        again = " It was put together from two attempts; call again to download it whole." if start else ""
        raise DataError(
            f"{wanted.url} has the checksum {found}, asked for {wanted.sha256}.{again} Check the address and the "
            "checksum: the file may have been replaced."
        )


def _broken_off(wanted: _Wanted, reason: str) -> str:
    kept = wanted.part.stat().st_size if wanted.sha256 is not None and wanted.part.exists() else 0
    again = f"call again to go on after {kept} bytes" if kept else "call again"
    return (
        f"Asked to download {wanted.url}: {reason}. Check the network, then {again}, or put the file at {wanted.path}."
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
