"""Native core of Phalanx."""

import numpy
import numpy.typing

def shuffled(n: int, seed: int, start: int, count: int, step: int = 1) -> numpy.typing.NDArray[numpy.int64]:
    """Elements at start, start + step, ... of the permutation of [0, n) that `seed` picks."""

class SlotParser:
    """Parses lines of click logs into arrays."""

    def __init__(
        self, has_label: bool, dense: list[str], sparse: list[str], hash_space: int, is_columns: bool
    ) -> None: ...
    def parse(
        self, text: bytes
    ) -> tuple[
        int,
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.int64],
        int,
        tuple[int, int, int, bytes] | None,
    ]:
        """Rows, label, dense, ids and offsets of whole lines; how many were broken and what the first is."""

def hash_texts(slot: str, texts: list[str], hash_space: int = 0) -> numpy.typing.NDArray[numpy.int64]:
    """Ids of texts in a slot."""
