"""`Quotas`: resource quotas per queue, from `queues.yaml`."""

from __future__ import annotations

import logging
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from phalanx.jobs.spec.fields import Bytes, Name

logger = logging.getLogger("phalanx.jobs")


class Quota(BaseModel):
    """The most that running jobs of one queue may hold together; None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: float | None = Field(default=None, ge=0)
    memory: Bytes | None = None
    gpu: int | None = Field(default=None, ge=0)
    jobs: int | None = Field(default=None, ge=0)


_FILE = TypeAdapter(dict[Name, Quota])


class Quotas:
    """The limits in a file. If it cannot be read, that is logged and the earlier limits hold."""

    def __init__(self, path: Path) -> None:
        """Take the limits from `path`, which need not exist."""
        self._path = path
        self._read_at: int | None = None
        self._limits: dict[str, Quota] = {}

    def now(self) -> dict[str, Quota]:
        """Return the limits by name of queue."""
        changed = self._path.stat().st_mtime_ns if self._path.exists() else None
        if changed != self._read_at:
            self._read_at = changed
            try:
                text = self._path.read_text(encoding="utf-8") if changed else "{}"
                self._limits = _FILE.validate_python(yaml.safe_load(text) or {})
            except (OSError, yaml.YAMLError, ValidationError) as error:
                logger.error("%s is no list of limits, as `team-a: {cpu: 16, jobs: 8}`: %s", self._path, error)
        return self._limits
