"""`GradientExchange`: what the exchange of a step's gradients adds to it (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientExchange:
    """The exchange of the gradients of the rank with the first stage, which ends last, and what it runs beside.

    A bucket travels once the last pass of its block is through: so the embedding's, the last, has nothing beside it.
    """

    all_buckets: float
    """Seconds of all."""

    own: float
    """Of those of the first stage; a rank with several has all gradients of the others before."""

    last_bucket: float
    """Of the last bucket."""

    buckets: int
    """Of the first stage."""

    last_pass: float
    """Seconds of the last pass that gives gradients."""

    before: float
    """Seconds after the last pass of the rank's other stages, and before that one."""

    busy: float
    """Part of them in which the rank computes."""

    passes_in_turn: int
    """Last passes that wait for each other, one of each stage: each has an exchange of its stage beside it."""

    def seconds(self, contention: float) -> float:
        """Return what it adds, where each second that it shares with passes costs `contention`."""
        early = min(self.all_buckets - self.own, self.before)
        left = self.all_buckets - self.own - early
        begins = max(0.0, self.last_pass / self.buckets - left)
        shared = min(left + self.own - self.last_bucket, self.last_pass - begins)
        return left + self.own - shared + contention * (self.busy * early + self.passes_in_turn * shared)
