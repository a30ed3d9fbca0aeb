"""`Code`, `Dataset`: where a job's code and data come from, as a job spec names them (pure)."""

from __future__ import annotations

from itertools import combinations
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from phalanx.jobs.spec.addresses import (
    bucket_and_key,
    folder_path,
    git_address,
    git_ref,
    inner_path,
    kind_of,
    mount_path,
    web_address,
)
from phalanx.jobs.spec.fields import Commit, Name, Sha256, SpecModel, Variable, Word


class Code(SpecModel):
    """Where the code comes from: a git repository at a ref, a path, or a code configuration of the workspace by name.

    Exactly one of `git`, `path` and `name` is given. `commit` is filled at submission for git, `digest` for a path; a
    digest alone is a tree that was sent to the server.
    """

    git: Annotated[str, AfterValidator(git_address)] | None = None
    """Address of a repository: https://, http://, ssh://, user@host:path, or a path of a repository here."""
    ref: Annotated[str, AfterValidator(git_ref)] = "HEAD"
    """Branch, tag or commit."""
    commit: Commit | None = None
    """git: the commit that `ref` was at submission."""
    path: Annotated[str, AfterValidator(folder_path)] | None = None
    """A folder on this machine, which is copied without what .phalanxignore, or else .gitignore, leaves out."""
    digest: Sha256 | None = None
    """path: the content at submission."""
    name: Name | None = None
    """Name of a code configuration of the workspace."""
    subdir: Annotated[str, AfterValidator(inner_path)] = "."
    """Folder of the code in which the command starts."""
    secret: Variable | None = None
    """Secret whose value is the token or password for the repository."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return _code_from_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("git", "path", "name") if getattr(self, name) is not None]
        if len(sources) != 1 and not (self.digest and not sources):
            raise ValueError(f"give exactly one of git, path and name; found {' and '.join(sources) or 'none'}")
        if (self.commit and not self.git) or (self.digest and (self.git or self.name)):
            raise ValueError("commit belongs to git, digest to path; leave it out, submission fills it")
        if self.secret and self.git and not self.git.startswith(("https://", "http://")):
            raise ValueError("a secret is a token for https://; ssh takes its keys from the agent, a path needs none")
        return self


class Dataset(SpecModel):
    """A dataset in a job: a registered dataset by name, or a full description, and where the script finds it.

    `kind` and `uri` are filled from the configuration at submission, and what can be known of the content.
    """

    name: Name
    mount: Annotated[str, AfterValidator(mount_path)] | None = None
    """Where the script reads it: a path from the folder the command starts in, or an absolute one. PHALANX_DATASET_*
    says it too."""
    readonly: bool = True
    kind: Literal["local", "nas", "s3", "oss", "http"] | None = None
    uri: str | None = None
    """local, nas: the path on the machines that train. Others: s3://, oss://, https:// or http://."""
    file_system: Word | None = None
    """NAS: id of the file system."""
    sha256: Sha256 | None = None
    """http: what the file must hash to."""
    secret: Variable | None = None
    """s3, oss: secret whose value is ACCESS_KEY_ID:ACCESS_KEY_SECRET. Without one the bucket is read as anybody."""
    endpoint: Annotated[str, AfterValidator(web_address)] | None = None
    """s3, oss: address of the service, where it is not the default one."""
    version: Word | None = None
    """What the content was at submission: an etag, a time of change."""
    size: Annotated[int, Field(ge=0)] | None = None
    """Bytes at submission."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            name, _, mount = value.partition(":")
            return {"name": name, "mount": mount or None}
        if isinstance(value, dict) and isinstance(value.get("uri"), str) and value.get("kind") is None:
            return {**value, "kind": kind_of(value["uri"])}
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind is not None and self.uri is None:
            raise ValueError(f"kind {self.kind} needs a uri: where the data is")
        if self.kind is not None and self.uri is not None:
            _check_address(self.kind, self.uri)
        for field, kinds in _ONLY_FOR.items():
            if getattr(self, field) is not None and self.kind not in (*kinds, None):
                raise ValueError(f"{field} is for {' and '.join(kinds)}, not for {self.kind}; leave it out")
        if self.kind is not None and not self.is_path and not self.readonly:
            raise ValueError(
                f"kind {self.kind} is fetched once for all jobs; it can only be read, so leave out readonly"
            )
        if self.kind == "oss" and self.endpoint is None:
            raise ValueError("oss needs an endpoint, as https://oss-REGION.aliyuncs.com")
        if self.kind == "nas" and self.file_system is None:
            raise ValueError("nas needs the id of its file_system")
        return self

    @property
    def is_path(self) -> bool:
        """Whether `uri` is a path of the machines that train, which is not fetched."""
        return self.kind in ("local", "nas")

    @property
    def variable(self) -> str:
        """Name of the environment variable in which a script finds where the dataset lies."""
        return "PHALANX_DATASET_" + self.name.replace("-", "_").upper()


_ONLY_FOR = {"file_system": ("nas",), "sha256": ("http",), "endpoint": ("s3", "oss"), "secret": ("s3", "oss")}


def _code_from_text(text: str) -> dict[str, str]:
    if not text.startswith("git+"):
        if "://" in text or text.startswith("git@"):
            raise ValueError(f"write git+{text.split('@')[0] if '://' in text else 'ssh://HOST/PATH'} for a repository")
        return {"path": text}
    address = text.removeprefix("git+")
    _, at, ref = urlsplit(address).path.partition("@")
    if not at:
        return {"git": address}
    return {"git": address[: len(address) - len(ref) - 1], "ref": ref}


def _check_address(kind: str, uri: str) -> None:
    if kind in ("s3", "oss"):
        if kind_of(uri) != kind:
            raise ValueError(f"{uri!r} is not of kind {kind}; write it as {kind}://BUCKET/FOLDER")
        bucket_and_key(uri)
    elif kind == "http":
        web_address(uri)
    elif "://" in folder_path(uri):
        raise ValueError(f"{uri!r} is no path; kind {kind} is a path that the machines see")


def find_wrong_datasets(datasets: tuple[Dataset, ...]) -> list[str]:
    """Return what is wrong with the datasets of a job together: names that are there twice, mounts in each other."""
    names = [d.name for d in datasets]
    wrong = [f"dataset {name} is there twice; give each a name" for name in sorted(set(names)) if names.count(name) > 1]
    mounts = [PurePosixPath(d.mount) for d in datasets if d.mount is not None]
    return wrong + [
        f"mounts {first} and {other} lie in each other; mount each dataset in a place of its own"
        for first, other in combinations(mounts, 2)
        if first.is_relative_to(other) or other.is_relative_to(first)
    ]
