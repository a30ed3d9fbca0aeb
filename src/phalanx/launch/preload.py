"""`preload`: preload torch into the fork server, as fast as possible, where the script needs it.

Measured on 2 cores, one after the other: a plain `import torch` 1.05-1.3 s, with the collector off 0.95 s, with the
libraries loaded by a second thread at the same time 0.60-0.68 s.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import re
import sys
import threading
import warnings
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


TORCH = ("torch", "torch.distributed", "torch.distributed.rendezvous")
"""What every rank needs for its first collective."""

TRAINING = (*TORCH, "torch._dynamo", "phalanx.parallel.distribute")
"""What every rank that trains would otherwise import for itself: two seconds of processor time on each of them."""

_TRAINS = re.compile(r"\boptim\b|\bdistribute\(|\btrain_step\(")
_RUNS_OTHERS = re.compile(r"\bimportlib\b|\brunpy\b|\bpickle\b|__import__|\bexec\b|\beval\b")
_SETS_TORCH = re.compile(r"\b(PY)?TORCH[A-Z_]")


def needed_by(script: str, *, is_elastic: bool) -> tuple[str, ...]:
    """Return what ranks that run `script` would each import, as far as its text says.

    A rank that joins a running job would keep the others waiting while it imports: an elastic job is spared nothing but
    what a script of the standard library alone cannot use.

    Args:
        script: What `phalanx run` is given: a file that can be read, or `-m` with a module, which nobody looks for.
        is_elastic: Whether ranks may join the job while it runs.

    Returns:
        `TORCH`, `TRAINING`, or nothing for a script that imports the standard library alone, by its own statements.
    """
    if script.startswith("-m "):
        return TRAINING if is_elastic else TORCH
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    imported = _imported(text)
    if imported is not None and imported <= sys.stdlib_module_names and not _RUNS_OTHERS.search(text):
        return ()
    if is_elastic:
        return TRAINING
    # A driver that is loaded before the fork fails after it, and the compiler reads its environment when it is
    # imported: a script that may set some of it imports it itself.
    if is_cuda_build(torch_libraries()) or _SETS_TORCH.search(text):
        return TORCH
    return TRAINING if imported and "phalanx" in imported and _TRAINS.search(text) else TORCH


def _imported(text: str) -> set[str] | None:
    """Return the packages that a program imports by name, or None for what is no program: it says so when it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):
            program = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else str(node.module).partition(".")[0])
    return names


def preload(needed: Sequence[str]) -> None:
    """Import what ranks need, and leave one thread and a frozen heap behind.

    Args:
        needed: Modules, torch first if at all; one of the others that is missing is for whoever needs it to report.

    Raises:
        ImportError: If torch cannot be imported.
    """
    gc.disable()
    if "torch" in needed:
        import_torch()
    for name in needed:
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
