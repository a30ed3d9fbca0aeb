"""`SlotSchema`: the columns of a click log, and its parser from text to arrays.

Columns, as in the Criteo logs (tabs between fields; an empty dense field reads 0, an empty sparse one is an id too):

    1	1	2	...	68fd1e64	80e26c9b	...

Tokens (a label, then name:value in any order; a slot any number of times or not at all):

    1 age:0.3 user:a81 item:77 item:78

An id is a 64-bit hash of the slot's name (or that of a slot whose ids it shares) and the field's text, so no vocabulary
is made and every worker finds the same one. The native core parses; `slots_python` gives the same bits, is what it is
tested against and takes over where the package was installed without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.data.ctr.slot_rows import SlotRows
from phalanx.data.ctr.slots_python import BROKEN, BrokenLine, SlotParser, hash_texts_python
from phalanx.errors import ConfigError, did_you_mean
from phalanx.versions import HAS_NATIVE

if TYPE_CHECKING:  # whoever hashes texts needs no torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSchema:
    """What a line holds, in the order of its columns.

    Raises:
        ConfigError: If a name comes twice or cannot be written in a line, the hash space is out of range, or slots that
            are not there share ids.
    """

    label: str | None = "label"
    """Name of the first field; None for lines without a label."""

    dense: tuple[str, ...] = ()
    """Names of the numbers."""

    sparse: tuple[str, ...] = ()
    """Names of the slots, whose text becomes ids."""

    hash_space: int | None = None
    """Ids are 0 to `hash_space` - 1; any 64-bit value when None, where two texts practically never meet."""

    format: Literal["columns", "tokens"] = "columns"

    share: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Slots whose texts get the ids they have in another slot: `{"history": "item"}`. The other slot may be one of
    another file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense", tuple(self.dense))
        object.__setattr__(self, "sparse", tuple(self.sparse))
        object.__setattr__(self, "share", dict(self.share))
        if self.format not in ("columns", "tokens"):
            raise ConfigError(f"Asked for slot lines of format {self.format!r}. Give 'columns' or 'tokens'.")
        names = self.names
        for name in names:
            if not name or any(c in name for c in ": \t\r\n") or names.count(name) > 1:
                raise ConfigError(
                    f"Asked for a field named {name!r} in {list(names)}. "
                    "Give every field one name of its own, without spaces and colons."
                )
        check_hash_space(self.hash_space)
        for slot, other in self.share.items():
            if slot not in self.sparse:
                hint = did_you_mean(slot, self.sparse)
                raise ConfigError(f"share={dict(self.share)} names {slot!r}, which is none of the sparse slots.{hint}")
            if not other or other in self.share or other in (self.label, *self.dense):
                raise ConfigError(
                    f"share={dict(self.share)}: slot {slot!r} cannot have the ids of {other!r}, which shares itself or "
                    "is no slot. Name a slot that keeps ids of its own, here or in another file."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """All fields in the order of the columns."""
        return (*([self.label] if self.label else []), *self.dense, *self.sparse)

    @property
    def salts(self) -> tuple[str, ...]:
        """What the ids of each slot are hashed with: its name, or that of the slot whose ids it shares."""
        return tuple(self.share.get(name, name) for name in self.sparse)

    def split(self, ids: Tensor, offsets: Tensor | None = None) -> dict[str, Tensor]:
        """Return the ids of a batch by slot.

        Args:
            ids: Those of the batch, shape (rows, slots), or flat with `offsets`.
            offsets: Those of the batch, shape (rows * slots + 1,); of format `tokens`.

        Returns:
            Shape (rows,) each, or with `offsets` jagged tensors of shape (rows, j).

        Raises:
            ConfigError: If the batch is not one of this schema.
        """
        from phalanx.data.ctr.slot_bags import split_columns, split_tokens

        return split_columns(self.sparse, ids) if offsets is None else split_tokens(self.sparse, ids, offsets)


def criteo_schema(hash_space: int | None = None, *, label: bool = True) -> SlotSchema:
    """Return the schema of Criteo's files: label, I1 to I13, C1 to C26, tabs between.

    Args:
        hash_space: Ids are 0 to `hash_space` - 1; 64-bit ids when omitted.
        label: False for files without labels, such as the test set of the challenge.
    """
    return SlotSchema(
        label="label" if label else None,
        dense=tuple(f"I{i}" for i in range(1, 14)),
        sparse=tuple(f"C{i}" for i in range(1, 27)),
        hash_space=hash_space,
    )


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What a piece of text gave."""

    rows: SlotRows
    broken: int
    """Lines left out."""

    first_broken: BrokenLine | None


def parse_slots(text: bytes, schema: SlotSchema, *, native: bool = HAS_NATIVE) -> ParsedText:
    """Return the rows in whole lines of text.

    Args:
        text: Lines that end in a newline; the last one may lack it.
        schema: What they hold.
        native: Whether the native core parses, or the Python twin.
    """
    count, label, dense, ids, offsets, broken, first = _parser(schema, native).parse(text)
    is_columns = schema.format == "columns"
    rows = SlotRows(
        label,
        dense.reshape(count, len(schema.dense)),
        ids.reshape(count, len(schema.sparse)) if is_columns else ids,
        None if is_columns else offsets,
    )
    return ParsedText(rows, broken, None if first is None else BrokenLine(*first))


def hash_texts(salt: str, texts: Sequence[str | bytes], hash_space: int | None = None) -> NDArray[np.int64]:
    """Return the ids that `texts` have in a slot, shape (n,): those that parsing a file with them gives.

    Raises:
        TypeError: If one of them is no text.
    """
    if not HAS_NATIVE:
        return hash_texts_python(salt, texts, hash_space or 0)
    from phalanx import _core

    return _core.hash_texts(salt, list(texts), hash_space or 0)


def check_hash_space(hash_space: int | None) -> None:
    """Raise for a hash space that no id fits in.

    Raises:
        ConfigError: If it is less than 1 or 2**63 and more.
    """
    if hash_space is not None and not 1 <= hash_space < 2**63:
        raise ConfigError(f"Asked for hash_space={hash_space}. Give 1 to 2**63 - 1, or None for 64-bit ids.")


@lru_cache(maxsize=8)
def _parser(schema: SlotSchema, native: bool) -> Any:
    arguments = (
        schema.label is not None,
        list(schema.dense),
        list(schema.sparse),
        list(schema.salts),
        schema.hash_space or 0,
        schema.format == "columns",
    )
    if not native:
        return SlotParser(*arguments)
    from phalanx import _core

    return _core.SlotParser(*arguments)


def describe_broken(broken: BrokenLine, schema: SlotSchema) -> str:
    """Return what is wrong with a line, by the names of its fields."""
    text = broken.text.decode(errors="replace")
    names = schema.names
    kind = BROKEN[broken.kind]
    if kind == "fields":
        return f"found {broken.field} fields, expected {len(names)} ({', '.join(names[:3])}, ...)"
    where = f"field {broken.field + 1}"
    if kind == "number":
        column = f" ({names[broken.field]})" if schema.format == "columns" else ""
        return f"{where}{column}: found {text!r}, expected a finite decimal number"
    if kind == "token":
        return f"{where}: found {text!r}, expected name:value"
    name = text.partition(":")[0]
    if kind == "name":
        return f"{where}: found {text!r}, but the schema has no {name!r}.{did_you_mean(name, names)}"
    return f"{where}: found {text!r}, but {name!r} came before; a dense field comes once"
