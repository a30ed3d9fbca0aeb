"""`NamedGroup`: the bookkeeping that torch wants of a `ProcessGroup`: name, rank, size, backend per device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx import accelerator
from phalanx.comm.waits.timeouts import chosen_timeout

NAME = "shm"
"""The backend's name in torch."""

_TorchGroup: Any = dist.ProcessGroup  # its signatures differ from one torch to the next
_CPU = torch.device("cpu")


class NamedGroup(_TorchGroup):  # type: ignore[misc]
    """A process group that knows its name and place, serves the CPU itself and has other backends for the rest.

    Args:
        options: What torch says of the group: store, ranks, timeout.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank: int = options.group_rank
        self._size: int = options.group_size
        # A group that torch names after its ranks may be made again: the keys of the one before are still in the store.
        number = options.store.add(f"made/{options.group_rank}", 1)
        self._store, self._timeout = PrefixStore(str(number), options.store), chosen_timeout(options.timeout)
        self._group_name, self._group_description = str(options.group_id), "undefined"
        self._others: dict[str, Any] = {}
        if accelerator.has_nccl():
            self._others[accelerator.CUDA] = self._nccl()

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815 -- torch's names

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    @property
    def group_name(self) -> str:
        """The name by which compiled code finds the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the group is for, as its maker wrote."""
        return self._group_description

    def getGroupName(self) -> str:  # noqa: N802, D102
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802, D102
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802, D102
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802, D102
        self._group_description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(torch.device(name) for name in self._others if name != "gloo")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in self._others:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._others[device.type]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether tensors must be allocated here to be fast: no."""
        return False

    def get_group_store(self) -> Any:
        """Return the store of this group's keys."""
        return self._store

    def _gloo(self) -> Any:
        if "gloo" not in self._others:
            store = PrefixStore("gloo", self._store)
            gloo = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
            gloo._set_sequence_number_for_group()
            self._others["gloo"] = gloo
        return self._others["gloo"]

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", self._store), self._rank, self._size, options)
        nccl._set_sequence_number_for_group()
        return nccl
