"""Parse `host:port` strings (pure)."""

from __future__ import annotations


def parse_endpoint(text: str, *, least_port: int = 1) -> tuple[str, int] | None:
    """Return host and port of `host:port` (`[::1]:80` for IPv6), or None if the text is none.

    Args:
        text: What was written.
        least_port: Smallest port; 0 where it may stand for one that the system chooses.
    """
    host, colon, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not (colon and host and is_number and least_port <= int(port) <= 65535):
        return None
    return host.strip("[]"), int(port)
