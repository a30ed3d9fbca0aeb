"""`hash_ids`: ids of texts, those that the readers of click logs give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.ctr.slots import check_hash_space, hash_texts
from phalanx.errors import ConfigError

if TYPE_CHECKING:  # whoever serves rows hashes texts without torch
    from torch import Tensor

Texts = Sequence[str | bytes] | NDArray[np.str_] | NDArray[np.bytes_] | NDArray[np.object_]


def hash_ids(texts: Texts, salt: str, *, hash_space: int | None = None) -> Tensor:
    """Return the ids of texts: those that a reader gives them in a slot of the name `salt`.

    Args:
        texts: Sequence or NumPy array of str or bytes; str counts as its UTF-8 bytes. An empty text has an id, too.
        salt: Name of the slot, or of the table: the same text has other ids under another salt.
        hash_space: Ids are 0 to `hash_space` - 1; any 64-bit value when None.

    Returns:
        int64, the shape of `texts`.

    Raises:
        ConfigError: If something is no text, names the first one; or the hash space is out of range.
    """
    import torch

    return torch.from_numpy(hash_to_array(texts, salt, hash_space=hash_space))


def hash_to_array(texts: Texts, salt: str, *, hash_space: int | None = None) -> NDArray[np.int64]:
    """Return what `hash_ids` does, as a NumPy array."""
    check_hash_space(hash_space)
    if not isinstance(salt, str) or isinstance(texts, str | bytes) or not isinstance(texts, Sequence | np.ndarray):
        raise ConfigError(
            "hash_ids takes a sequence or NumPy array of texts and the salt, a str; found "
            f"{type(texts).__name__} and {type(salt).__name__}."
        )
    shape = texts.shape if isinstance(texts, np.ndarray) else (len(texts),)
    flat: list[Any] = texts.ravel().tolist() if isinstance(texts, np.ndarray) else list(texts)
    try:
        ids = hash_texts(salt, flat, hash_space)
    except (TypeError, UnicodeEncodeError):
        raise ConfigError(_describe_wrong(flat)) from None
    return ids.reshape(shape)


def _describe_wrong(texts: list[Any]) -> str:
    for position, text in enumerate(texts):
        if not isinstance(text, str | bytes):
            return f"text {position} is {text!r}, no str or bytes. Convert it, or leave it out."
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            return (
                f"text {position}, {text!r}, has half a surrogate pair, which UTF-8 cannot write. Give bytes instead."
            )
    raise AssertionError("texts that cannot be hashed have a wrong one")
