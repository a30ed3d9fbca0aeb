"""Parse and format quantities such as `8Gi` and `2h` (pure)."""

from __future__ import annotations

import re
from typing import Any

from phalanx.units import parse_bytes

_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_MOST_BYTES, _MOST_SECONDS = 2**60, 10.0 * 366 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def to_bytes(text: str | int) -> int:
    """Return the bytes that `text` means, as `8Gi`, `500M` or a plain number.

    Raises:
        ValueError: If it is no positive amount.
    """
    count = parse_bytes(str(text)) or 0.0
    if not 0 < count <= _MOST_BYTES:
        raise ValueError(f"{text!r} is no amount of memory; write it as 8Gi, 500Mi or 2G")
    return int(count)


def as_quantity(count: int) -> str:
    """Return bytes in the largest unit that is exact, as Kubernetes reads them: `8Gi`, `500M`."""
    for unit in ("Ti", "Gi", "Mi", "T", "G", "M", "Ki", "k"):
        if count % _BYTES[unit] == 0:
            return f"{count // _BYTES[unit]}{unit}"
    return str(count)


def to_seconds(text: str | float) -> float:
    """Return the seconds that `text` means, as `90`, `90s`, `30m`, `2h`, `1h30m` or `1d`.

    Raises:
        ValueError: If it is no positive time.
    """
    words = str(text).strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", words):
        words += "s"
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", words)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != words or not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"{text!r} is no length of time; write it as 90s, 30m, 2h or 1h30m")
    return seconds


def split_ranges(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return `fields` where ranges as `1:4` are two numbers: `nodes: 4` and `least_nodes: 1`.

    Args:
        fields: As the user wrote them.
        names: Those that may be ranges.
    """
    split = dict(fields)
    for name in names:
        if not isinstance(split.get(name), str) or ":" not in split[name]:
            continue
        least, _, most = (part.strip() for part in split[name].partition(":"))
        if not least.isdigit() or not most.isdigit():
            raise ValueError(f"{name} {split[name]!r} is no range; write it as 1:4")
        split[name] = int(most)
        if least != most:
            split[f"least_{name}"] = int(least)
    return split
