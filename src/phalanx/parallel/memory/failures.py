"""`MemoryFailure`: an error that says that memory ran out, without what it holds in memory."""

from __future__ import annotations

import errno
import re
import resource
import traceback
from dataclasses import dataclass

import torch

from phalanx import accelerator
from phalanx.cluster.proc import available_bytes, process_memory

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[A-Za-z]+)")
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_NO_KERNEL = "could not create a primitive"
_DNN_WORDS = (_NO_KERNEL, "could not execute a primitive", "could not create a memory object")
"""What oneDNN says whatever the reason was."""

_LITTLE_BYTES = 64 * 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that host or device memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    words = str(error)
    is_certain = any(part in words for part in _WORDS)
    return is_certain or (words in _DNN_WORDS and free_bytes(torch.device("cpu")) < _LITTLE_BYTES)


def is_repeatable(error: BaseException) -> bool:
    """Return whether what raised an error can succeed with more memory; else a note on the error says why not."""
    if str(error) == _NO_KERNEL and is_out_of_memory(error):
        note = (
            "oneDNN had no memory to generate a kernel in, and a thread in which that failed generates none afterwards"
        )
        error.add_note(f"What failed was not repeated with less memory: {note}.")
        return False
    return is_out_of_memory(error)


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """What an error said of memory, once its frames, which hold activations, are gone."""

    error: BaseException
    phase: str
    requested: str
    """How much was asked for, in the words of the allocator; empty if it does not say."""

    free_bytes: int
    """Memory that was left then, as far as the device or the process's limits tell."""

    @classmethod
    def of(cls, error: BaseException, phase: str, device: torch.device, handled: BaseException | None) -> MemoryFailure:
        """Return what an error says, and clear the frames that it came through.

        Args:
            error: The error.
            phase: Of which pass it is.
            device: Whose memory ran out.
            handled: The exception that the script was handling before, which stays as it is.
        """
        match = _REQUESTED.search(str(error))
        failure = cls(error, phase, match[1] if match else "", free_bytes(device))
        at: BaseException | None = error
        while at is not None and at is not handled:
            traceback.clear_frames(at.__traceback__)
            at.__traceback__ = None
            inner, at = at, at.__context__
            inner.__context__ = None
        return failure

    @property
    def amounts(self) -> str:
        """Return what was asked for and what was free."""
        requested = f"{self.requested} asked for, " if self.requested else ""
        return f"{requested}{self.free_bytes:,} bytes free"

    def error_because(self, why: str) -> BaseException:
        """Return the error, with why no remedy was applied."""
        self.error.add_note(f"The pass was not repeated with less memory: {why}.")
        return self.error


def free_bytes(device: torch.device) -> int:
    """Return the memory that is left: of the device, or of this host and this process's limits."""
    if accelerator.is_accelerator(device):
        return accelerator.free_bytes(device)
    left, used = [available_bytes() or 0], process_memory()
    for limit, size in ((resource.RLIMIT_AS, used.address_space), (resource.RLIMIT_DATA, used.data)):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left.append(max(most - size, 0))
    return min(left)
