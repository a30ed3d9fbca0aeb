"""The torch.distributed backend `shm`: CPU collectives over shared memory."""

from phalanx.comm.shared_memory.backend import register
from phalanx.comm.shared_memory.process_group import SharedMemoryGroup
from phalanx.comm.shared_memory.torch_group import NAME

__all__ = ["NAME", "SharedMemoryGroup", "register"]
