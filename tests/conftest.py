"""What every test of the suite shares."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that what passes passes again, and no deadline: it would be one for the machine.
# `pytest --hypothesis-profile=random` draws others.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_UNTIMED)
settings.register_profile("random", **_UNTIMED)
settings.load_profile("repeatable")

LAUNCH_PREFIXES = (
    "PHALANX_",
    "PADDLE_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PET_",
    "FLAGS_",
    "DLC_",
)
LAUNCH_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINING_ROLE", "POD_IP",
)  # fmt: skip


ENVIRONMENT = {
    # Kernels of torch's compiler without vectors and optimization: what they compute is compared, and not timed.
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_DEBUG_COMPILE": "1",
}
"""What all processes of the suite run with, unless the caller or a test sets it."""


def pytest_configure() -> None:
    """Set the environment, and undo what `nohup` or a background shell ignores: programs would not stop when asked."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test as if no launcher were around, whatever the suite itself was started under."""
    for name in list(os.environ):
        if name.startswith(LAUNCH_PREFIXES) or name in LAUNCH_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """Start torch's random numbers alike in every test, and so the orders of its data; ranks of tests do the same."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # Without a device `manual_seed` formats the stack for each kind that may come: 8,000 times, seconds.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def no_context_left() -> Iterator[None]:
    """End the Context and the tables a test made, so that the next one starts as a fresh process would."""
    yield
    state = sys.modules.get("phalanx.parallel.session")
    if state is not None:
        state.session.reset()
    auto_context = sys.modules.get("phalanx.train.model.auto_context")
    if auto_context is not None:
        auto_context.reset_auto_parallel_context()
    attach = sys.modules.get("phalanx.ps.client.table_client")
    if attach is not None and attach._current is not None:
        attach._current.close()
        attach._current = None
    context = sys.modules.get("phalanx.comm.context")
    if context is not None:
        context.shutdown()


@pytest.fixture(autouse=True, scope="module")
def old_objects_frozen() -> None:
    """Spare every `gc.collect()`, and `px.distribute` calls it twice, half a second of walking through torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def phalanx_propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see the `phalanx` loggers even when a command of ours has configured them."""
    import logging

    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port nothing listens on and the system will not hand out: bound, never listened to, open to SO_REUSEPORT."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """A PostgreSQL server, as the folder of its socket."""
    from postgres import server

    with server() as folder:
        yield folder
