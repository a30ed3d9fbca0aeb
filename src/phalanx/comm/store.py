"""`JobStore`: the job's key-value store (torch TCPStore or FileStore), with timeouts and clear errors."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx.cluster import network
from phalanx.cluster.env.environment import split_endpoint
from phalanx.cluster.role.role import Role
from phalanx.comm.elastic.membership import check_members
from phalanx.comm.waits.polling import Pause
from phalanx.errors import ConfigError, PeerLostError, RoleError
from phalanx.i18n import tr

logger = logging.getLogger("phalanx.comm")

RETRY_S = 3.0
"""Seconds between two lines that say the store is not there yet."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.05
"""Pause between two looks for a key, doubled from the first to the longest."""


class JobStore:
    """A torch store as text keys and values under one prefix, with errors that name the store."""

    def __init__(self, store: Store, address: str, prefix: str) -> None:
        self.torch_store: Store = PrefixStore(prefix, store)
        self.place = address

    def set_once(self, key: str, value: str) -> str:
        """Set `key` unless it is set, and return its value now; atomic."""
        return bytes(self._call("compare_set", key, "", value)).decode()

    def set(self, key: str, value: str) -> None:
        """Set `key`."""
        self._call("set", key, value)

    def get(self, key: str) -> str:
        """Return the value of `key`, which must be set."""
        return bytes(self._call("get", key)).decode()

    def delete(self, key: str) -> None:
        """Forget `key` and its value."""
        self._call("delete_key", key)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set."""
        return bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all `keys` are set, at most `seconds`; return whether they are.

        Raises:
            PeerLostError: If a member of an elastic job is lost meanwhile.
        """
        # Asking again and again, because torch's own wait writes two lines of warning for every wait that ends early.
        deadline = time.monotonic() + seconds
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while not self.has(keys):
            if time.monotonic() >= deadline:
                return False
            check_members()
            pause.wait(deadline - time.monotonic())
        return True

    def _call(self, verb: str, *args: object) -> bytes:
        try:
            result: bytes = getattr(self.torch_store, verb)(*args)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise self._lost_store(error) from None
        return result

    def _lost_store(self, error: Exception) -> PeerLostError:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLostError(
            f"The job's store at {self.place} stopped answering ({first_line}). "
            "The process that holds it (the launcher, or rank 0) has ended: look into its log."
        )


def open_store(role: Role, prefix: str, timeout_s: float, env: Mapping[str, str] | None = None) -> JobStore:
    """Open the store that the environment names; rank 0 holds it when no launcher does.

    Args:
        role: Who this process is.
        prefix: Keeps this run's keys apart from those of other runs in the same store.
        timeout_s: Seconds to wait for the store to answer.
        env: Variables to read; the process's own when omitted.

    Raises:
        RoleError: If no place for a store is named.
        ConfigError: If rank 0 cannot listen there.
        PeerLostError: If the store does not answer in time.
    """
    env = os.environ if env is None else env
    family = env.get("PADDLE_GLOO_RENDEZVOUS", "").strip()
    if family == "2":
        return _file_store(role, env, prefix)
    if family not in ("", "3"):
        raise RoleError(
            f"PADDLE_GLOO_RENDEZVOUS={family} is not offered. Set it to 2 (files) or 3 (a store at a host and port)."
        )
    host, port, has_agent = _address(role, env, family)
    address = f"{host}:{port}"
    if has_agent or role.rank != 0:
        _await_listener(host, port, timeout_s)
        return JobStore(connect_store(host, port, timeout_s), address, prefix)
    return JobStore(_listen(host, port, timeout_s), address, prefix)


def _address(role: Role, env: Mapping[str, str], family: str) -> tuple[str, int, bool]:
    has_agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    http = env.get("PADDLE_GLOO_HTTP_ENDPOINT", "").strip() if family == "3" else ""
    if http:
        host, port = split_endpoint(http, "PADDLE_GLOO_HTTP_ENDPOINT")
        # A launcher's store serves as this rendezvous too, when it is the one named.
        return host, port, has_agent and (host, port) == (role.master_addr, role.master_port)
    if not role.master_addr:
        raise RoleError(
            f"{role.world_size} ranks need a place to meet, and none is named. Set MASTER_ADDR and MASTER_PORT, "
            "or PADDLE_TRAINER_ENDPOINTS, or start with `phalanx run`."
        )
    return role.master_addr, role.master_port, has_agent


def _file_store(role: Role, env: Mapping[str, str], prefix: str) -> JobStore:
    folder = env.get("PADDLE_GLOO_FS_PATH", "").strip()
    if not folder:
        raise RoleError("PADDLE_GLOO_RENDEZVOUS=2 needs PADDLE_GLOO_FS_PATH, a folder that all ranks share. Set it.")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RoleError(
            f"PADDLE_GLOO_FS_PATH={folder} cannot be used ({error.strerror}). Name a folder that all ranks can write."
        ) from None
    name = f"store-{role.job_id or 'job'}-{role.attempt}"
    store = FileStore(str(path / name), role.world_size)
    return JobStore(store, str(path / name), prefix)


def _await_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until something listens at the store's address, telling the user about it."""
    start = time.monotonic()
    next_line = start + RETRY_S
    while (answer := answer_of(host, port)) != "answers":
        now = time.monotonic()
        if now - start >= timeout_s:
            raise PeerLostError(
                f"The job's store was to be at {host}:{port}, and {host}:{port} {answer} for {timeout_s:g} s. "
                f"Check that rank 0 (or its launcher) runs there, that MASTER_ADDR and MASTER_PORT are right"
                f"{_whose(host)}, and that no firewall is between."
            )
        if now >= next_line:
            next_line = now + RETRY_S
            logger.warning("%s", tr("server not ready, wait 3 sec to retry..."))
            logger.warning("%s", tr("not ready endpoints:{names}", names=[f"{host}:{port}"]))
        time.sleep(0.05)


def answer_of(host: str, port: int, timeout_s: float = 1.0) -> str:
    """Return in words whether `host:port` takes a connection: answers, refuses, or what else happened."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "refuses connections"
    except TimeoutError:
        return "did not answer"
    except socket.gaierror:
        return "is no host name this machine knows"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    return "answers"


def probe(endpoint: str) -> str:
    """Return in words whether the process at `host:port` can be reached."""
    host, port = split_endpoint(endpoint, "an endpoint")
    answer = answer_of(host, port)
    if answer == "refuses connections":
        return f"host {host} answers, nothing listens on port {port}"
    return f"{endpoint} {answer}"


def addresses_of(host: str) -> list[str]:
    """Return the IPv4 addresses that `host` resolves to, empty when it does not resolve."""
    try:
        return list(dict.fromkeys(str(i[4][0]) for i in socket.getaddrinfo(host, None, socket.AF_INET)))
    except socket.gaierror:
        return []


def _whose(host: str) -> str:
    addresses = addresses_of(host)
    if host in addresses or not addresses:
        return ""
    return f" ({host} resolves to {', '.join(addresses)} here)"


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to a store that listens."""
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def _listen(host: str, port: int, timeout_s: float) -> Store:
    try:
        return TCPStore(host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistNetworkError as error:
        is_taken = "EADDRINUSE" in str(error) or "in use" in str(error)
        reason = f"the port is in use by {network.port_owner(port)}" if is_taken else str(error)
        raise ConfigError(
            f"Rank 0 was to hold the job's store at {host}:{port}, but could not: {reason}. "
            "End the process that has the port, or choose another MASTER_PORT."
        ) from None
