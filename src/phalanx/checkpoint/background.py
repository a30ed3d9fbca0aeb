"""`start`, `wait`: background saves: copy tensors to host memory, then write them in a thread, one save at a time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import phalanx.comm.context as context_of
from phalanx import accelerator

logger = logging.getLogger("phalanx.checkpoint")

_ALIGNMENT = 64


class _BackgroundSave:
    """The running save, its error, and the buffer that the next copy reuses."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.buffer: Tensor | None = None
        self.is_watching_exit = False


_saves = _BackgroundSave()


def start(write: Callable[[], None]) -> None:
    """Run the rest of a save in a background thread."""
    if not _saves.is_watching_exit:
        _saves.is_watching_exit = True
        atexit.register(_at_exit)
    _saves.thread = threading.Thread(target=_run, args=(write,), name="phalanx checkpoint")
    _saves.thread.start()


def _run(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:  # noqa: BLE001 -- raised by wait(), in the thread that trains
        _saves.error = error
        logger.error("the background save failed: %s", error)


def wait() -> None:
    """Wait until the save started with `background=True` is complete. Returns at once if there is none.

    Raises:
        PhalanxError: The error of that save, as documented at `save`. Raised once.
    """
    if _saves.thread is not None:
        _saves.thread.join()
        _saves.thread = None  # not before: a caller interrupted here may save again, over the buffer being written
    error, _saves.error = _saves.error, None
    if error is not None:
        raise error


def _at_exit() -> None:
    """End the process with exit code 1 if its last save failed unnoticed.

    Exit handlers have no other way to set the exit code.
    """
    try:
        wait()
    except Exception:
        logger.exception("the last background save failed, after the script had ended; the exit code is 1")
        context_of.shutdown()
        logging.shutdown()
        os._exit(1)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, in one block of memory that the next save reuses.

    Allocating new memory costs more than the copy: the kernel zeroes it page by page.
    """
    sizes = {key: -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for key, tensor in tensors.items()}
    total = sum(sizes.values())
    buffer, _saves.buffer = _saves.buffer, None
    device = next((tensor.device for tensor in tensors.values() if accelerator.is_accelerator(tensor.device)), None)
    if buffer is None or buffer.numel() < total:
        buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device is not None and accelerator.can_pin())
    copies, at = {}, 0
    for key, tensor in tensors.items():
        copies[key] = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies[key].copy_(tensor, non_blocking=True)
        at += sizes[key]
    if device is not None:
        accelerator.synchronize(device)
    _saves.buffer = buffer
    return copies
