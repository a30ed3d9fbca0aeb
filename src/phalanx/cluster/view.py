"""`View`: the members of an elastic job in rank order from one membership epoch on (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process that is, or may become, a rank of the job."""

    id: str
    """`n<node>.<k>`, never used again."""

    host: str
    pid: int
    log: str
    node: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Who the ranks are; what is sent to each of them."""

    epoch: int
    members: tuple[Member, ...]
    """The index is the rank."""

    store: str
    """`host:port` of the key-value store in which the ranks of this view meet."""

    reason: str
    planned: bool
    """Whether nobody is dead: ranks take it up together between two updates."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Member ids in rank order."""
        return tuple(member.id for member in self.members)

    def rank(self, member_id: str) -> int:
        """Return the rank of a member."""
        return self.ids.index(member_id)

    def part(self, ranks: Sequence[int]) -> View:
        """Return the view of some of the members."""
        return replace(self, members=tuple(self.members[rank] for rank in ranks))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "members": [member.to_json() for member in self.members]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> View:
        """Undo `to_json`."""
        return cls(**{**values, "members": tuple(Member(**member) for member in values["members"])})
