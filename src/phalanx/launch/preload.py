"""Preload torch into the fork server, as fast as possible.

Measured on 2 cores, one after the other: a plain `import torch` 1.05-1.3 s, with the collector off 0.95 s, with the
libraries loaded by a second thread at the same time 0.60-0.68 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_NEEDED_BY_TORCH = (
    "asyncio",
    "unittest.mock",
    "torchgen.model",
    "multiprocessing.reduction",
    "urllib.request",
    "tarfile",
    "pickletools",
    "typing_extensions",
    "importlib.metadata",
    "ctypes",
    "platform",
    "uuid",
    "csv",
    "timeit",
)
"""Modules torch imports that read no thread setting: they can be had before the environment is fixed."""


def warm_up(until: Callable[[], bool]) -> None:
    """Import what torch will import, while the launcher still reads its flags.

    Args:
        until: Asked between two imports; True ends the warm-up.
    """
    gc.disable()
    for name in _NEEDED_BY_TORCH:
        if until():
            return
        # Which modules torch imports differs between its versions; what is missing is torch's to report.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def torch_libraries() -> Path | None:
    """Return the folder of torch's shared libraries, found without importing torch, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib"


def is_cuda_build(libraries: Path | None) -> bool:
    """Return whether the torch in `libraries` was built with CUDA."""
    return libraries is not None and (libraries / "libtorch_cuda.so").exists()


def _load_libraries(folder: Path) -> None:
    """Map and relocate torch's libraries; ctypes lets go of the interpreter lock while it does."""
    # torch repeats each step itself and reports what fails, so a failure here only costs the head start.
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libtorch_python.so"))


ELASTIC = ("torch._dynamo", "phalanx.parallel.distribute")
"""What a rank that joins a running job would otherwise import for itself, for a second while the others wait for it."""


def preload(further: Sequence[str] = ()) -> None:
    """Import torch and what the first collective needs, and leave one thread and a frozen heap behind.

    Args:
        further: Modules to import after it; one that is missing is for whoever needs it to report.

    Raises:
        ImportError: If torch cannot be imported.
    """
    gc.disable()
    import_torch()
    for name in further:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Objects made so far are never collected: the children share their pages and their collector is faster.
    gc.freeze()


def import_torch() -> None:
    """Import torch and what the first collective needs, its libraries loaded by a second thread meanwhile.

    A CUDA build finds its own libraries in an order of its own, so there the head start is left out.

    Raises:
        ImportError: If torch cannot be imported.
    """
    folder = torch_libraries()
    loader = None
    if folder is not None and not is_cuda_build(folder) and sys.platform == "linux":
        loader = threading.Thread(target=_load_libraries, args=(folder,))
        loader.start()
    with contextlib.suppress(ModuleNotFoundError):
        import numpy  # noqa: F401

    import torch
    import torch.distributed  # noqa: F401

    if loader is not None:
        loader.join()
