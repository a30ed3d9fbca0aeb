"""Peers that cannot share our environment: a virtual environment each under `.peers`, made on demand from PyPI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / ".peers"

PADDLE = ("paddlepaddle==2.6.2", "protobuf==4.25.3", "numpy<2", "setuptools<80")
"""The last wheel with parameter servers; newer protobuf and NumPy break it, and it imports setuptools undeclared."""

TORCHREC = ("torch==2.13.0", "tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions")
TORCHREC_ALONE = ("torchrec==1.9.2", "fbgemm-gpu-cpu==1.8.0")
"""TorchRec asks for the kernels of GPUs by name. Those of fbgemm 1.9 are for torch 2.14; 1.8 has those of our torch."""

ROCKSDICT = ("rocksdict==0.3.29",)


class PeerMissingError(RuntimeError):
    """A peer cannot be measured here; says why."""


def python_of(name: str, requirements: Sequence[str], *, alone: Sequence[str] = (), folder: Path = FOLDER) -> Path:
    """Return the Python of a peer's environment, made first when it is missing or holds something else.

    Args:
        name: Name of the environment.
        requirements: What pip installs into it.
        alone: What it installs then, without what that depends on.
        folder: Where environments are.

    Raises:
        PeerMissingError: If it cannot be installed.
    """
    home = folder / name
    python, installed = home / "bin" / "python", home / "installed.txt"
    asked = "\n".join([*requirements, *alone])
    if installed.is_file() and installed.read_text() == asked:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(home)], name)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    _run([*pip, *requirements], name)
    if alone:
        _run([*pip, "--no-deps", *alone], name)
    installed.write_text(asked)
    return python


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise PeerMissingError(f"{name} cannot be installed: {' '.join(last) or f'exit {done.returncode}'}")
