"""Collectives over memory that the ranks of one host share, as the torch backend `shm` for tensors of the CPU."""

from phalanx.comm.shared_memory.backend import register
from phalanx.comm.shared_memory.process_group import SharedMemoryGroup
from phalanx.comm.shared_memory.torch_group import NAME

__all__ = ["NAME", "SharedMemoryGroup", "register"]
