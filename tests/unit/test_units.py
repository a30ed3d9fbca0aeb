"""Amounts and addresses are read and printed alike everywhere."""

from __future__ import annotations

import pytest

from phalanx.addresses import parse_endpoint
from phalanx.units import format_bytes, format_gib, format_length, format_mb, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8Gi", 2**33), ("8 GiB", 2**33), ("500M", 5e8), ("1.5k", 1500), ("2Ki", 2048), ("1024", 1024), ("7B", 7)],
)
def test_bytes_are_read(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8 apples", "-1Gi", "500m", "8gib", "K"])
def test_other_text_is_no_amount(text: str) -> None:
    assert parse_bytes(text) is None


def test_any_case_may_be_allowed() -> None:
    assert parse_bytes("8gib", any_case=True) == 2**33


def test_amounts_are_printed() -> None:
    assert [format_bytes(size) for size in (2**33, 3 * 2**19, 512)] == ["8 GiB", "1.5 MiB", "0.5 KiB"]
    assert (format_gib(2**29), format_mb(1_500_000)) == ("0.5 GiB", "1.5 MB")
    assert [format_seconds(seconds) for seconds in (2, 0.0205, 3e-6)] == ["2 s", "20.5 ms", "3 µs"]


@pytest.mark.parametrize(("text", "address"), [("a:1", ("a", 1)), ("[::1]:80", ("::1", 80)), ("a", None), (":1", None)])
def test_endpoints_are_read(text: str, address: tuple[str, int] | None) -> None:
    assert parse_endpoint(text) == address


def test_port_0_is_an_endpoint_where_the_system_may_choose() -> None:
    assert parse_endpoint("a:0") is None
    assert parse_endpoint("a:0", least_port=0) == ("a", 0)


def test_lengths_of_time_are_printed() -> None:
    assert [format_length(seconds) for seconds in (-1.0, 0.9, 12.7, 187.0, 7387.0)] == [
        "0 s",
        "0 s",
        "12 s",
        "3:07",
        "2:03:07",
    ]
    assert (format_length(4.26, digits=1), format_length(61.9, digits=1)) == ("4.3 s", "1:01")
