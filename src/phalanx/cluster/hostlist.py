"""Slurm's compact lists of host names."""

from __future__ import annotations

import re

from phalanx.errors import RoleError

_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


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
    bracket = _BRACKET.search(pattern)
    if bracket is None:
        return [pattern]
    before, after = pattern[: bracket.start()], pattern[bracket.end() :]
    return [before + n + tail for n in _numbers(bracket[1], pattern) for tail in _expand(after)]


def _numbers(ranges: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for entry in ranges.split(","):
        first, dash, last = entry.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _malformed(pattern)
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _malformed(text: str) -> RoleError:
    return RoleError(
        f"A host list must look like node[01-03,7],login, found {text!r}. Set MASTER_ADDR to name the first host."
    )
