"""`device_module`, `find_kind` and others: what code asks of the device that computes, whatever its maker.

The only module that names a kind of device or `torch.cuda`; `tests/unit/test_accelerator.py` looks through the others.
It goes through `torch.accelerator` and through the module that torch has for a kind (`torch.cuda`, `torch.xpu`, or that
of a backend which calls itself by `torch.utils.rename_privateuse1_backend`). A device in host memory, `cpu` or `meta`,
has neither streams nor memory of its own.
"""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CUDA = "cuda"
"""The kind whose launches torch can capture as a graph and replay, and which NCCL serves."""

_PINNING = (CUDA, "xpu")
"""Kinds for which torch pins host memory; a backend of a later maker may not."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes in memory of its own."""
    return device.type not in ("cpu", "meta")


def find_kind() -> str | None:
    """Return the type of the devices that this process can use, as `cuda`; None where there is only the CPU."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def count_devices() -> int:
    """Return how many devices this process can use beside the CPU."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def select_device(index: int) -> torch.device:
    """Make a device the current one of this process, and return it.

    Args:
        index: Its number among those that this process sees. There must be one.
    """
    kind = find_kind()
    assert kind is not None
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def current_index() -> int:
    """Return the number of this process's current device; -1 where there is only the CPU."""
    device = current_device()
    return -1 if device is None else int(device.index)


def current_device() -> torch.device | None:
    """Return this process's current device; None where there is only the CPU."""
    kind = find_kind()
    return None if kind is None else torch.device(kind, int(torch.accelerator.current_device_index()))


def device_in_use() -> torch.device | None:
    """Return the device that this process has computed on so far, and None if it used the CPU alone; starts nothing."""
    device = torch.accelerator.current_accelerator()
    if device is None or not device_module(device).is_initialized():
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())


def device_module(device: torch.device) -> Any:
    """Return torch's module for a kind of device, as `torch.cuda`."""
    return torch.get_device_module(device)


def describe_device() -> str | None:
    """Return the name and the runtime of the current device, and None where there is only the CPU."""
    kind = find_kind()
    if kind is None:
        return None
    properties = device_module(torch.device(kind)).get_device_properties(current_index())
    name = f"device: {getattr(properties, 'name', kind)}"
    if kind != CUDA:
        return f"{name}, torch {torch.__version__}"
    runtime = f"CUDA runtime: {torch.version.cuda}, cuDNN: {torch.backends.cudnn.version()}"
    return f"CUDA available: True, {name}, compute capability: {properties.major}.{properties.minor}, {runtime}"


def list_names() -> list[str]:
    """Return the names of all devices that this process sees."""
    kind = find_kind()
    return (
        [] if kind is None else [device_module(torch.device(kind)).get_device_name(i) for i in range(count_devices())]
    )


def runtime_name() -> str:
    """Return what torch was built for, as `CUDA 12.8`."""
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else str(find_kind())


def default_backend(host: str) -> str:
    """Return the torch backends of collectives where nobody chose any: `cpu:shm,cuda:nccl`, or `host` alone.

    Args:
        host: The backend of tensors in host memory.
    """
    kind = find_kind()
    backend = None if kind is None else device_backend(kind)
    return host if backend is None else f"cpu:{host},{kind}:{backend}"


def device_backend(kind: str) -> str | None:
    """Return the backend that torch's registry names for a kind of device, as `nccl`; None if it has none."""
    return dist.Backend.default_device_backend_map.get(kind)


def has_nccl() -> bool:
    """Return whether tensors of this process's device can be exchanged by NCCL."""
    return find_kind() == CUDA and dist.is_nccl_available()


def identify(device: torch.device) -> str:
    """Return a text that is the same in all processes that see a device, however it is numbered there."""
    uuid = getattr(device_module(device).get_device_properties(device), "uuid", None)
    number = (socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), device.index)
    return repr(number) if uuid is None else str(uuid)


# Random numbers


def seed_device(device: torch.device, seed: int) -> None:
    """Start the random numbers of a device from `seed`, 0 to 2**64 - 1; does nothing for the CPU."""
    if is_accelerator(device):
        device_module(device).manual_seed(seed)


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's random numbers, in host memory."""
    return device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Let the random numbers of a device continue from a state, which lies in host memory."""
    device_module(device).set_rng_state(state, device)


def fork_random_numbers(device: torch.device | None, *, enabled: bool = True) -> AbstractContextManager[None]:
    """Put the random numbers of the CPU, and of a device, back after the block."""
    if device is None or not is_accelerator(device):
        return torch.random.fork_rng([], enabled=enabled)
    return torch.random.fork_rng([device], enabled=enabled, device_type=device.type)


# Memory


def free_bytes(device: torch.device) -> int:
    """Return the memory that no process has taken."""
    return int(device_module(device).mem_get_info(device)[0])


def allocated_bytes(device: torch.device) -> int:
    """Return the memory behind this process's tensors."""
    return int(device_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that was ever behind this process's tensors."""
    return int(device_module(device).max_memory_allocated(device))


def cached_bytes(device: torch.device) -> int:
    """Return the memory that torch's allocator keeps for the next tensors."""
    return int(device_module(device).memory_reserved(device)) - allocated_bytes(device)


def empty_cache(device: torch.device) -> None:
    """Give back what torch's allocator keeps."""
    device_module(device).empty_cache()


def can_pin() -> bool:
    """Return whether there is a device that copies faster from host memory which is never swapped out."""
    return find_kind() in _PINNING


# Streams


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for."""
    device_module(device).synchronize()


def record_event(device: torch.device) -> Any:
    """Return a mark with a time in the current stream of a device; it has `synchronize` and `elapsed_time` (ms)."""
    event = device_module(device).Event(enable_timing=True)
    event.record()
    return event


def can_capture_graphs(device: torch.device) -> bool:
    """Return whether launches on a device can be captured as a graph."""
    return device.type == CUDA


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph of a device is being captured, in which the host may not wait."""
    return can_capture_graphs(device) and bool(device_module(device).is_current_stream_capturing())
