"""The torch.distributed backend `shm`: CPU collectives over shared memory.

In: CPU tensors of the ranks of one host, or of several through gloo. Out: collectives as torch.distributed has them,
with the same sums on every rank. Start with `backend`, then `process_group`; the bytes move in `csrc`.
"""

from phalanx.comm.shared_memory.backend import register
from phalanx.comm.shared_memory.process_group import SharedMemoryGroup
from phalanx.comm.shared_memory.torch_group import NAME

__all__ = ["NAME", "SharedMemoryGroup", "register"]
