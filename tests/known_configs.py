"""The configurations of a workspace for tests that have no store."""

from __future__ import annotations

from typing import Any

from phalanx.errors import NotFoundError


class Known:
    """The configurations of a workspace, in dictionaries."""

    def __init__(self, **names: dict[str, Any]) -> None:
        self.codes, self.data, self.secrets = (names.get(kind, {}) for kind in ("codes", "data", "secrets"))

    def code(self, name: str) -> dict[str, Any]:
        return self._in(self.codes, "code", name)

    def dataset(self, name: str) -> dict[str, Any]:
        return self._in(self.data, "dataset", name)

    def secret_names(self) -> set[str]:
        return set(self.secrets)

    def secret(self, name: str) -> str:
        return str(self._in(self.secrets, "secret", name))

    def _in(self, known: dict[str, Any], kind: str, name: str) -> Any:
        if name not in known:
            raise NotFoundError(f"there is no {kind} {name}.")
        return known[name]
