"""`split_tokens`, `split_columns`: the ids of a batch of click logs, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.errors import ConfigError


def split_columns(slots: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    """Return the columns of ids of shape (rows, slots), shape (rows,) each, as views.

    Raises:
        ConfigError: If there are not as many columns as slots.
    """
    if ids.dim() != 2 or ids.shape[1] != len(slots):
        raise ConfigError(
            f"ids of shape {tuple(ids.shape)} without offsets are no batch of {len(slots)} slots, which has shape "
            f"(rows, {len(slots)}). Give the offsets of a batch of format 'tokens' too."
        )
    return dict(zip(slots, ids.unbind(1), strict=True))


def split_tokens(slots: Sequence[str], ids: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Return the bags of each slot as a jagged tensor of shape (rows, j).

    Args:
        slots: Names, in the order of the bags of a row.
        ids: All ids, row by row and slot by slot, shape (ids,).
        offsets: Where bag row * slots + slot begins, and the last one ends, shape (rows * slots + 1,).

    Raises:
        ConfigError: If the offsets are not those of whole rows, or of other ids.
    """
    bags = len(offsets) - 1
    if ids.dim() != 1 or bags < 0 or not slots or bags % len(slots) or int(offsets[-1]) != len(ids):
        raise ConfigError(
            f"{len(offsets)} offsets and ids of shape {tuple(ids.shape)} are no batch of {len(slots)} slots. Give ids "
            "and offsets as the dataset returned them."
        )
    lengths = offsets.diff()
    slot_of_id = torch.arange(len(slots), device=ids.device).repeat(bags // len(slots)).repeat_interleave(lengths)
    by_slot = lengths.view(-1, len(slots))
    values = ids[slot_of_id.argsort(stable=True)].split(by_slot.sum(0).tolist())
    begins = torch.nn.functional.pad(by_slot.cumsum(0), (0, 0, 1, 0))
    return {
        name: torch.nested.nested_tensor_from_jagged(values[slot], begins[:, slot].contiguous())
        for slot, name in enumerate(slots)
    }
