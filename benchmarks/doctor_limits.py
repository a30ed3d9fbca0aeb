"""Faults of what a rank runs on: processor quota, swap, network, disk, a data worker that is killed.

Such a rank is slow, or lost, rather than hung: the slow report, or the report of the failure, must name it and say why.
"""

from __future__ import annotations

from benchmarks.doctor_faults import GLOO, Fault, on_rank_1

_LOOP = """
a = torch.ones(64, 64)
torch.set_num_threads(1)

def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(a, a)

for step in range(10**6):
    work(0.004)
    if rank == 1:
        {act}
    dist.all_reduce(x)
    x.fill_(1.0)
"""
_JOIN = """
def join():
    note()
    with open(os.environ["FAULT_CGROUP"] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
"""
_QUOTA = GLOO + _JOIN + _LOOP.format(act="step == 20 and join()")
_SWAP = (
    GLOO
    + _JOIN
    + """
memory = []

def touch():
    # More than its control group lets it keep, so that each step reads pages back from the swap.
    if not memory:
        join()
        memory.append(bytearray(256 << 20))
    for page in range(0, 256 << 20, 4096):
        memory[0][page] = 1
"""
    + _LOOP.format(act="step >= 20 and touch()")
)
_NETWORK = (
    GLOO
    + """
for step in range(10**6):
    if rank == 0 and step == 20:
        note()
    dist.all_reduce(x)
    x.fill_(1.0)
    time.sleep(0.02)
"""
)
_WORKER = (
    GLOO
    + """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        if rank == 1 and index == 8:
            note()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)

for batch in DataLoader(Data(), batch_size=1, num_workers=1):  # FAULT
    dist.all_reduce(batch)
"""
)

LIMITS: tuple[Fault, ...] = (
    Fault(
        name="processor quota of its cgroup",
        script=_QUOTA,
        verdict="slow",
        needs="quota",
        words=("its cgroup was throttled",),
    ),
    Fault(name="memory that is swapped out", script=_SWAP, verdict="slow", needs="swap", words=("swapped out",)),
    Fault(
        name="network between two nodes cut",
        script=_NETWORK,
        verdict="lost",
        needs="network",
        words=("(node 1) is gone", "cut off"),
    ),
    Fault(name="killed data worker", script=_WORKER, verdict="failure", words=("DataLoader worker",)),
    Fault(
        name="full disk",
        script=on_rank_1("with open('disk/file', 'wb') as file:\n    while file.write(bytes(65536)): pass  # FAULT"),
        verdict="failure",
        needs="disk",
        words=("No space left on device",),
    ),
)
