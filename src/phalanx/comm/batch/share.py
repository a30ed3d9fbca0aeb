"""`BatchShare`, `row_weight_of`: how much of a global batch a rank holds, and what its gradients weigh (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How much of the current global batch this rank holds."""

    rows: int
    """Rows of this rank's batch that count; 0 for a batch that only keeps the ranks in step."""

    global_rows: int
    """Rows of the whole global batch, over all ranks."""

    @property
    def weight(self) -> float:
        """Weight of this rank's mean gradient in the gradient of the global mean; the ranks' weights add up to 1."""
        return self.rows / self.global_rows


Shares = tuple[BatchShare, ...]
"""What a computation may be of: a single share when its batch is known, none when every rank weighs the same."""


def row_weight_of(shares: Shares, ranks: int, *, is_sum: bool = False) -> float:
    """Return the factor of this rank's gradients, of which the mean over the ranks is then taken.

    Args:
        shares: What the gradients may be of.
        ranks: Number of ranks that read rows of their own.
        is_sum: Whether gradients are summed over the ranks, so that only a batch that does not count weighs less.

    Returns:
        1 for an even share, 0 for a batch that does not count.

    Raises:
        ConfigError: If the candidates weigh differently.
    """
    if not shares:
        return 1.0
    if not weigh_alike(shares, ranks, is_sum=is_sum):
        rows = " or ".join(str(share.global_rows) for share in shares)
        raise ConfigError(
            f"a gradient is of a batch of {rows} rows, which weigh differently on {ranks} ranks, and which cannot be "
            "known: the model's inputs are not the tensors that a loader gave out, and several batches of an epoch "
            "that has such were given out before it was called. Call px.use_batch(batch) before the forward pass, "
            "with what the loader gave, or let all batches be even: drop_last=True, and a global batch that the ranks "
            "divide."
        )
    return float(shares[0].rows > 0) if is_sum else shares[0].weight * ranks


def weigh_alike(shares: Sequence[BatchShare], ranks: int, *, is_sum: bool = False) -> bool:
    """Return whether batches have one weight on every rank. What is known here alone says so of all ranks."""

    def is_even(share: BatchShare) -> bool:
        return share.global_rows >= ranks and share.rows > 0 if is_sum else share.rows * ranks == share.global_rows

    return len(set(shares)) <= 1 or all(is_even(share) for share in shares)
