"""`SoakResult`: what random faults did to one job."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SoakResult:
    """One job, its faults, and what does not hold after them."""

    kind: str
    seed: int
    faults: list[str] = field(default_factory=list)
    """Each fault that came about, in words."""

    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    report: str = ""
    """What the job said, if there is a problem."""

    restarts: int = 0
    """How often the whole job began again with its newest checkpoint, where it may."""
