"""`EgressPolicy`: allowlist of hosts that the server may connect to (SSRF protection).

The server stands where members do not: beside services that trust its address, and beside the one at 169.254.169.254
from which machines of a cloud learn their keys. A name is resolved once, what it resolves to is looked at, and that
address is connected to; every redirect is such a request again.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from phalanx.errors import SpecError

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def host_rule(text: str) -> str:
    """Return a host that an administrator lists: a name, an address, or a network as 10.0.0.0/8."""
    if "/" in text:
        ipaddress.ip_network(text)
    elif not text or set(text) & set(" :@[]*") - (set(":") if _address(text) else set()):
        raise ValueError(f"{text!r} is no host; write a name, an address, or a network as 10.0.0.0/8")
    return text.lower()


@dataclass(frozen=True)
class EgressPolicy:
    """Whom the server may connect to for members."""

    hosts: tuple[str, ...] = ()
    """Names, addresses and networks that are allowed although they are not public."""

    def check(self, url: str) -> None:
        """Raise SpecError unless the host of an address may be connected to."""
        self.addresses(urlsplit(url).hostname or "")

    def addresses(self, host: str) -> list[str]:
        """Return where a host is, resolved now.

        Raises:
            SpecError: If it has no address, or one that is neither public nor listed; in the same words, so that nobody
                learns here which names there are.
        """
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            infos = []
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        parsed = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
        if addresses and all(self._allows(host, address) for address in parsed):
            return addresses
        raise SpecError(
            f"{host} is no host with a public address, and this server connects to no others for its members. Correct "
            "the address; or its administrator lists the host under `hosts` in server.yaml."
        )

    def _allows(self, host: str, address: Address) -> bool:
        return is_public(address) or any(_is_of(rule, host, address) for rule in self.hosts)

    def client(self, **options: Any) -> httpx.Client:
        """Return a client whose every request, redirects among them, goes to such hosts alone.

        Through a proxy of the server's environment it is the proxy that resolves names and connects.
        """
        import httpx  # slow to import

        egress = self

        class Pinned(httpx.HTTPTransport):
            """Connects to the addresses that were looked at, not to what a name resolves to a moment later."""

            def handle_request(self, request: httpx.Request) -> httpx.Response:
                host = request.url.host
                *others, last = egress.addresses(host)
                for address in others:
                    try:
                        return super().handle_request(_pinned(request, host, address))
                    except httpx.ConnectError:
                        continue
                return super().handle_request(_pinned(request, host, last))

        if getproxies().keys() & {"http", "https", "all"}:
            return httpx.Client(event_hooks={"request": [lambda request: egress.check(str(request.url))]}, **options)
        return httpx.Client(transport=Pinned(), **options)


def is_public(address: Address) -> bool:
    """Return whether an address is one of the open network, and no other way to write one that is not."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def _pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """Return a request for `host` to one of its addresses; the certificate is to be that of `host` all the same."""
    import httpx

    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )


def _is_of(rule: str, host: str, address: Address) -> bool:
    if "/" in rule:
        network = ipaddress.ip_network(rule)
        return address.version == network.version and address in network
    return rule == host.lower().rstrip(".") or _address(rule) == address


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
