"""`git_address`: validate git URLs, paths and dataset URIs from outside (pure).

Each function returns what it was given, tidied, or raises ValueError with what to write instead; no message repeats
what may be a password.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

_GIT_SCHEMES = ("https", "http", "ssh", "file")
_SCP_LIKE = re.compile(r"[\w.-]+@[A-Za-z0-9][\w.-]*:[^:]+")
_MOST_LETTERS = 3000
"""Of a path or address; a system takes 4096 bytes, with the folder that a path starts from."""

_SYSTEM_FOLDERS = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr")


def git_address(text: str) -> str:
    """Return the address of a git repository: https, http, ssh, file, `user@host:path`, or a path on this machine.

    Other transports of git run commands, and a word that begins with a dash is an option to it.
    """
    _plain(text, "the address of a repository")
    if "://" in text:
        _without_password(text)
        parts = urlsplit(text)
        if parts.scheme not in _GIT_SCHEMES:
            raise ValueError(f"{parts.scheme}:// is no transport that is used; write https://, ssh:// or a path")
        if parts.scheme != "file" and not re.match(r"[A-Za-z0-9\[]", parts.hostname or ""):
            raise ValueError("the address names no host; write https://HOST/PATH")
    elif ":" in text.split("/")[0] and not _SCP_LIKE.fullmatch(text):
        raise ValueError(f"{text!r} is no address of a repository; write https://HOST/PATH, user@host:path or a path")
    return text


def is_local(git: str) -> bool:
    """Return whether a checked address of a repository is a path on this machine."""
    return git.startswith("file://") or not ("://" in git or ":" in git.split("/")[0])


def git_ref(text: str) -> str:
    """Return a branch, tag, full ref or commit."""
    if not re.fullmatch(r"(?!-)[^\s~^:?*\[\\\x00-\x1f\x7f]+", text) or ".." in text:
        raise ValueError(f"{text!r} is no ref; write a branch, a tag or a commit of 40 digits")
    return text


def folder_path(text: str) -> str:
    """Return the path of a folder of this machine, absolute or not."""
    return _plain(text, "a folder")


def inner_path(text: str) -> str:
    """Return a relative path that stays inside the folder it starts from."""
    path = PurePosixPath(_plain(text, "a path"))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{text!r} leads out of its folder; write a path inside it, without '..'")
    return str(path)


def kept_path(text: str) -> str:
    """Return an absolute path, or a relative one that stays inside the folder it starts from; neither with `..`."""
    _plain(text, "a path")
    return text if text.startswith("/") and ".." not in PurePosixPath(text).parts else inner_path(text)


def mount_path(text: str) -> str:
    """Return where a dataset is to lie: a path in the working copy, or an absolute one outside the system's folders."""
    path = PurePosixPath(_plain(text, "a mount"))
    if ".." in path.parts or path == PurePosixPath("."):
        raise ValueError(f"{text!r} is no place for a dataset; write a folder without '..', as data/mnist or /mnt/data")
    if path.is_absolute() and (len(path.parts) == 1 or path.parts[1] in _SYSTEM_FOLDERS):
        raise ValueError(f"{text!r} is the system's own; mount the dataset elsewhere, as /mnt/data")
    return str(path)


def kind_of(uri: str) -> str:
    """Return the kind of dataset that an address means: s3, oss, http, or local for a path."""
    scheme = uri.split("://")[0] if "://" in uri else ""
    kind = {"": "local", "s3": "s3", "oss": "oss", "http": "http", "https": "http"}.get(scheme)
    if kind is None:
        raise ValueError(f"{scheme}:// is no address of a dataset; write a path, s3://, oss://, https:// or http://")
    return kind


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Return bucket and key of `s3://bucket/key` or `oss://bucket/key`; the key may be empty, or a prefix of keys."""
    bucket, _, key = uri.split("://", 1)[-1].partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ValueError(f"{uri!r} names no bucket; write it as s3://BUCKET/FOLDER")
    return bucket, key.strip("/")


def web_address(uri: str) -> str:
    """Return an address that begins with https:// or http:// and holds no password."""
    _plain(uri, "an address")
    _without_password(uri)
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{uri!r} is no address; write it as https://HOST/PATH")
    return uri


def _plain(text: str, what: str) -> str:
    if max(map(len, text.encode("utf-8", "replace").split(b"/"))) > 255 or len(text) > _MOST_LETTERS:
        raise ValueError(f"{text[:40]}... is too long for {what}")
    if not text or text.startswith("-") or re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
        raise ValueError(f"{text!r} is not {what}: it is empty, begins with a dash or has control characters")
    if re.match(r"[A-Za-z0-9+.-]+::", text):
        raise ValueError(f"{text!r} runs a command; write {what} as https://HOST/PATH or a path")
    return text


def _without_password(text: str) -> None:
    if urlsplit(text).password is not None:
        raise ValueError("the address holds a password, which everybody would see; store a secret and name it: secret")
