"""Questions about addresses are answered from the kernel's table as text."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.network import interface_towards, is_loopback


def row(interface: str, network: str, bits: int, metric: int = 0, flags: str = "0001") -> str:
    def field(dotted: str) -> str:
        return f"{struct.unpack('=I', bytes(map(int, dotted.split('.'))))[0]:08X}"

    mask = (0xFFFFFFFF << (32 - bits)) & 0xFFFFFFFF
    dotted_mask = ".".join(str(b) for b in mask.to_bytes(4, "big"))
    return f"{interface}\t{field(network)}\t00000000\t{flags}\t0\t0\t{metric}\t{field(dotted_mask)}\t0\t0\t0"


HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
ROUTES = "\n".join(
    [
        HEADER,
        row("eth0", "0.0.0.0", 0, metric=100),
        row("wlan0", "0.0.0.0", 0, metric=600),
        row("ib0", "10.1.0.0", 16),
        row("eth1", "10.0.0.0", 8),
        row("down0", "10.1.2.0", 24, flags="0000"),
    ]
)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("8.8.8.8", "eth0"),
        ("10.2.0.1", "eth1"),
        ("10.1.2.3", "ib0"),
        ("::1", "lo"),
        ("fd00::1", None),
    ],
)
def test_the_longest_prefix_then_the_lowest_metric_wins(address, interface):
    assert interface_towards(address, ROUTES) == interface


def test_without_a_route_there_is_no_interface():
    assert interface_towards("8.8.8.8", HEADER) is None
    assert interface_towards("8.8.8.8", "") is None


@given(st.ip_addresses(v=4))
def test_loopback_is_127_and_nothing_else(address):
    assert is_loopback(str(address)) == str(address).startswith("127.")


def test_names():
    assert is_loopback("localhost")
    assert not is_loopback("gpu01")
