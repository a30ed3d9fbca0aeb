"""`JobKey` and `parse_address`: what launchers believe of one that has not proved yet that it is of the job (pure)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class JobKey:
    """What all launchers of a job know; empty where nothing proves who they are."""

    key: bytes = field(repr=False)

    def proof(self, purpose: str, *parts: object) -> str:
        """Return what only a launcher of the job can say of `parts`."""
        text = " ".join(map(str, (purpose, *parts)))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, proof: object, purpose: str, *parts: object) -> bool:
        """Return whether `proof` came from a launcher of the job."""
        return hmac.compare_digest(str(proof).encode(), self.proof(purpose, *parts).encode())


def parse_address(values: Any) -> Address:
    """Return an address that may be dialled; never a name, which would have to be looked up first.

    Raises:
        ValueError: If it is no IPv4 address with a port.
        TypeError: If it is no pair.
    """
    host, port = values
    if type(port) is not int or not 1 <= port <= 65535:
        raise ValueError(f"{port!r} is no port")
    return str(ipaddress.IPv4Address(str(host))), port
