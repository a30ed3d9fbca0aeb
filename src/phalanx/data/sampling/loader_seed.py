"""`LoaderSeed`: the shuffle seed of a loader, equal on all ranks and saved in checkpoints."""

from __future__ import annotations

import collections
import logging

import torch

from phalanx.comm import context
from phalanx.comm.agreement import share_from_first
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.data")

_shared: collections.Counter[str] = collections.Counter()
"""Seeds that this process shared with the others so far, by the kind of data."""


class LoaderSeed:
    """The seed of a loader's orders and of the random numbers of its data code.

    `given` wins. Otherwise it is rank 0's: of the user's generator, or of torch (`torch.manual_seed`; without that each
    run starts anywhere). It is looked at once, when it is first needed, and then stays. Data that is not trained on may
    be read on one rank only, so its loader asks nobody: without a generator it starts at 0.

    Args:
        given: What the user gave the loader or a DistributedSampler.
        generators: The user's generators that torch would draw the order from, the one that decides first.
        training: Whether the batches are trained on.
        kind: The kind of data; loaders of one kind are used in the same order on all ranks.
    """

    def __init__(self, user_seed: int | None, generators: list[torch.Generator], *, training: bool, kind: str) -> None:
        self.given, self._generators = user_seed, generators
        self._training, self._kind = training, kind
        self._value = user_seed
        self._is_shared = user_seed is not None or not training

    def __call__(self) -> int:
        """Return the seed, 0 to 2**64 - 1 unless another was given.

        The first call of a job of several ranks waits for rank 0's.

        Raises:
            PeerLostError: If rank 0 has ended, or did not arrive in time.
        """
        if self._value is None:
            self._value = self._own()
        if not self._is_shared and context.is_initialized():
            if context.current().is_distributed:
                self._value = self._of_first(self._value)
            self._is_shared = True
        return self._value

    def restore(self, saved: int) -> None:
        """Restore the seed of a saved state.

        Raises:
            ConfigError: If the user gave another.
        """
        if self.given is not None and saved != self.given:
            raise ConfigError(
                f"The state was saved with seed {saved}, this loader has seed {self.given}: the rest of "
                "the epoch would repeat samples and miss others. Make the loader with the saved seed."
            )
        if self._generators and saved != self._own():
            logger.warning(
                "the data continues in the order of seed %d, with which it was saved, and not in that of the "
                "generator's seed %d; for a new order do not load the loader's state",
                saved,
                self._own(),
            )
        self._value, self._is_shared = saved, True

    def _own(self) -> int:
        if self._generators:
            return self._generators[0].initial_seed()
        return torch.initial_seed() if self._training else 0

    def _of_first(self, own: int) -> int:
        _shared[self._kind] += 1
        key = f"data seed/{self._kind}/{_shared[self._kind]}"
        return int(share_from_first(f"the seed of the order of {self._kind}", key, own))
