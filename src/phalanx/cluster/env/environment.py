"""`Environment`: typed reads of environment variables (integers, endpoints, host lists) with named errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.addresses import parse_endpoint
from phalanx.errors import RoleError

_LISTS = {
    "worker_endpoints": ("PHALANX_WORKER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS"),
    "server_endpoints": ("PHALANX_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST"),
    "heter_endpoints": ("PHALANX_HETER_ENDPOINTS", "PADDLE_HETER_TRAINER_IP_PORT_LIST"),
}
_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_SECRET = re.compile(r"[0-9a-fA-F]{64}")
_LONGEST_NUMBER = 9

REPLAY_VARIABLE = "PHALANX_REPLAY"
"""Which steps of an earlier run a process is to do again, as JSON (`checkpoint/replay`)."""

MOST_HOSTS = 100_000
"""Most hosts that a list may name; the largest clusters have a tenth of that."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables, read with one clear error each. An empty value counts as unset."""

    variables: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Return the stripped value of `name`, or None when it is unset or blank."""
        value = self.variables.get(name, "").strip()
        return value or None

    def integer(self, name: str, minimum: int = 0) -> int | None:
        """Return the integer value of `name`, or None when it is unset.

        Raises:
            RoleError: If the value is not an integer, or is below `minimum`; names variable and value.
        """
        value = self.text(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            raise RoleError(f"{name} must be an integer, found {value!r}. Set it to a number or unset it.") from None
        if number < minimum:
            raise RoleError(f"{name} must be at least {minimum}, found {number}. Correct it or unset it.")
        return number

    def seconds(self, name: str) -> float:
        """Return the seconds in `name`, 0 when it is unset.

        Raises:
            RoleError: If the value is not a finite number of at least 0; names variable and value.
        """
        value = self.text(name) or "0"
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise RoleError(f"{name} must be a number of seconds, found {value!r}. Correct it or unset it.")
        return seconds

    def need_integer(self, name: str, because: str, minimum: int = 0) -> int:
        """Return the integer value of `name`, which must be set; `because` names what asks for it."""
        value = self.integer(name, minimum)
        if value is None:
            raise RoleError(f"{because} needs {name}, which is not set. Set it, or start with `phalanx run`.")
        return value

    def need_text(self, name: str, because: str) -> str:
        """Return the value of `name`, which must be set; `because` names what asks for it."""
        value = self.text(name)
        if value is None:
            raise RoleError(f"{because} needs {name}, which is not set. Set it, or start with `phalanx run`.")
        return value

    def endpoints(self, name: str) -> tuple[str, ...]:
        """Return the comma list in `name` as `host:port` strings, empty when it is unset.

        Raises:
            RoleError: If an entry is not `host:port`; names variable and entry.
        """
        entries = tuple(part.strip() for part in (self.text(name) or "").split(",") if part.strip())
        for entry in entries:
            split_endpoint(entry, name)
        return entries

    def all_endpoints(self) -> dict[str, Any]:
        """Return the endpoint lists of the three roles by the field of `Role` they belong in, under whichever name."""
        return {field: self.endpoints(ours) or self.endpoints(fleets) for field, (ours, fleets) in _LISTS.items()}

    def secret(self, name: str) -> bytes:
        """Return the secret in `name`, empty when it is unset; its value never appears in a message.

        Raises:
            RoleError: If it is not 64 hexadecimal digits: a shorter one could be found by trying.
        """
        value = self.text(name) or ""
        if value and not _SECRET.fullmatch(value):
            raise RoleError(
                f"{name} must be 64 hexadecimal digits, found {len(value)} characters that are not. Make one with "
                "`openssl rand -hex 32` and set it to the same value on every host."
            )
        return bytes.fromhex(value)

    def port(self, name: str, because: str) -> int:
        """Return the port in `name`, which must be set."""
        value = self.need_integer(name, because, minimum=1)
        if value > 65535:
            raise RoleError(f"{name} must be a port between 1 and 65535, found {value}. Correct it.")
        return value


def split_endpoint(endpoint: str, source: str) -> tuple[str, int]:
    """Return host and port of `host:port` (`[::1]:80` for IPv6).

    Args:
        endpoint: The text to split.
        source: Variable or flag it came from, named in the error.

    Raises:
        RoleError: If the text is not `host:port`.
    """
    address = parse_endpoint(endpoint)
    if address is None:
        raise RoleError(
            f"{source} must list host:port entries with ports from 1 to 65535, found {endpoint!r}. "
            "Write for example 10.0.0.1:6170."
        )
    return address


def expand_hosts(compact: str) -> list[str]:
    """Return the host names of `gpu[01-03,7],login` in order, leading zeros kept.

    Raises:
        RoleError: If a bracket is not a list of numbers and ranges.
    """
    hosts: list[str] = []
    for part in _OUTSIDE_BRACKETS.split(compact):
        hosts += _expand(part.strip())
    if not all(hosts) or any(c in host for host in hosts for c in "[] "):
        raise _malformed(compact)
    return hosts


def _expand(pattern: str) -> list[str]:
    hosts, at = [""], 0
    for bracket in _BRACKET.finditer(pattern):
        numbers, before = _numbers(bracket[1], pattern), pattern[at : bracket.start()]
        _check_count(len(hosts) * len(numbers), pattern)
        hosts = [host + before + n for host in hosts for n in numbers]
        at = bracket.end()
    return [host + pattern[at:] for host in hosts]


def _numbers(ranges: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for entry in ranges.split(","):
        first, dash, last = entry.partition("-")
        last = last if dash else first
        are_numbers = all(n.isascii() and n.isdecimal() and len(n) <= _LONGEST_NUMBER for n in (first, last))
        if not (are_numbers and int(first) <= int(last)):
            raise _malformed(pattern)
        _check_count(len(numbers) + int(last) - int(first), pattern)
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, pattern: str) -> None:
    """Raise where a few characters would name so many hosts that their list does not fit."""
    if count > MOST_HOSTS:
        raise RoleError(f"The host list {pattern!r} names more than {MOST_HOSTS:,} hosts. Correct its numbers.")


def _malformed(text: str) -> RoleError:
    return RoleError(
        f"A host list must look like node[01-03,7],login, found {text!r}. Set MASTER_ADDR to name the first host."
    )
