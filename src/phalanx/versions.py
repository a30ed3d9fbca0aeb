"""Supported torch versions, `require_torch()`, and whether the native extension `phalanx._core` is built."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from phalanx.errors import ConfigError

TORCH_MINIMUM = (2, 13)
"""Oldest torch release tested, as (major, minor)."""

TORCH_BELOW = (2, 14)
"""First torch release not tested yet, as (major, minor)."""

HAS_NATIVE = importlib.util.find_spec("phalanx._core") is not None
"""Whether the native core is installed; NumPy twins give the same results where it is not."""

WITHOUT_NATIVE = (
    "phalanx is installed without its native core (phalanx._core): no C++ compiler was there when it was built. "
    "Results are the same, but tables and loaders are slower, ranks of one machine talk through gloo, and parameter "
    "servers do not start. Install a wheel, or a C++20 compiler and then phalanx again."
)
"""What is logged, and shown by `phalanx doctor`, where the native core is not installed."""


def require_torch(version: str | None = None) -> None:
    """Raise unless the installed torch is one this package works with.

    Reads the package's metadata, so torch itself is not imported.

    Args:
        version: Version to judge; the installed one when omitted.

    Raises:
        ConfigError: If torch is missing, too old or too new; names what was found and needed.
    """
    supported = f">={TORCH_MINIMUM[0]}.{TORCH_MINIMUM[1]},<{TORCH_BELOW[0]}.{TORCH_BELOW[1]}"
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f'Phalanx needs torch {supported}, found none. Run: pip install "torch{supported}"'
            ) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not TORCH_MINIMUM <= release < TORCH_BELOW:
        raise ConfigError(
            f"Phalanx needs torch {supported} (a CPU or a CUDA build), found {version}. "
            f'Run: pip install "torch{supported}"'
        )
