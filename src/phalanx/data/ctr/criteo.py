"""The Criteo click logs: a label, 13 counts and 26 categories a line."""

from __future__ import annotations

from phalanx.data.ctr.slots import SlotSchema


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
