"""Faults that keep a job from continuing, as data: the script, who must be named, at which line, and in which words.

A script may be of plain torch, or of Phalanx. The line that must be named carries the comment `# FAULT`; more than one
where ranks contradict each other. Tests and `bench_doctor` read the same list; `doctor_waits` and
`doctor_limits` have more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["hang", "slow", "failure", "lost"]
"""What must speak: the hang report, the slow report, the report of a rank that failed, or that of a lost node."""

Need: TypeAlias = Literal["", "quota", "swap", "network", "disk"]
"""What a fault needs of the machine, see `doctor_trial`."""

_TORCH = """
import ctypes, fcntl, os, queue, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
x = torch.ones(4)

def note():
    with open("fault", "w") as file:
        file.write(repr(time.time()))

def steps(count=25):
    for _ in range(count):
        dist.all_reduce(x)
"""
GLOO = (
    _TORCH
    + """
dist.init_process_group("gloo")
steps()
"""
)
SHM = (
    _TORCH
    + """
import phalanx as px
px.init()
steps()
"""
)
DDP = (
    _TORCH
    + """
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
_BACKWARD = (
    DDP
    + """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if rank == 1 and step == 5:
            note()
            time.sleep(1000)  # FAULT
        return gradient

for step in range(8):
    optimizer.zero_grad()
    Slow.apply(model(torch.ones(2, 8))).sum().backward()
    optimizer.step()
"""
)
_WORKER = (
    GLOO
    + """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if rank == 1 and index == 8:
            note()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # WORKER
        return torch.ones(2)

for batch in DataLoader(Data(), batch_size=1, num_workers=1):  # FAULT
    dist.all_reduce(batch)
"""
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to hang."""

    name: str
    script: str
    culprits: tuple[int, ...] = (1,)
    """Ranks that must be named as those who are waited for, or who contradict each other."""

    words: tuple[str, ...] = ()
    """What the report must say beside ranks and lines."""

    ranks: int = 2
    verdict: Verdict = "hang"
    needs: Need = ""

    @property
    def lines(self) -> list[int]:
        """Numbers of the lines that must be named."""
        return [number for number, line in enumerate(self.script.splitlines(), 1) if "# FAULT" in line]


def on_rank_1(act: str, base: str = GLOO) -> str:
    """A script in which rank 1 does something else, and then the collective that rank 0 is in."""
    body = "\n".join(f"    {line}" for line in act.splitlines())
    return f"{base}\nif rank == 1:\n    note()\n{body}\ndist.all_reduce(x)\n"


FAULTS: tuple[Fault, ...] = (
    Fault(name="sleep, gloo", script=on_rank_1("time.sleep(1000)  # FAULT"), words=("waits, without using",)),
    Fault(name="sleep, shared memory", script=on_rank_1("time.sleep(1000)  # FAULT", SHM), words=("float32[4]",)),
    Fault(name="sleep in backward of DDP", script=_BACKWARD, words=("backward",)),
    Fault(
        name="stopped by a signal",
        script=on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)  # FAULT"),
        words=("stopped by a signal or a debugger", "kill -CONT"),
    ),
    Fault(
        name="interpreter lock held in C",
        script=on_rank_1("ctypes.PyDLL(None).sleep(1000)  # FAULT"),
        words=("holds its interpreter lock",),
    ),
    Fault(
        name="lock taken twice",
        script=on_rank_1("lock = threading.Lock()\nlock.acquire()\nlock.acquire()  # FAULT"),
    ),
    Fault(name="queue that nobody fills", script=on_rank_1("queue.Queue().get()  # FAULT"), words=("Queue.get",)),
    Fault(
        name="file locked by another process",
        script=on_rank_1(
            "holder = subprocess.Popen([sys.executable, '-c', "
            '\'import fcntl, time; f = open("lock", "w"); fcntl.flock(f, 2); print(flush=True); time.sleep(1000)\'], '
            "stdout=subprocess.PIPE)\nholder.stdout.readline()\nfile = open('lock', 'w')\n"
            "fcntl.flock(file, fcntl.LOCK_EX)  # FAULT"
        ),
    ),
    Fault(
        name="subprocess that does not end",
        script=on_rank_1("subprocess.run(['sleep', '1000'])  # FAULT"),
        words=("in run",),
    ),
    Fault(
        name="pipe that nobody writes to",
        script=on_rank_1("reading, writing = os.pipe()\nos.read(reading, 1)  # FAULT"),
    ),
    Fault(name="endless loop", script=on_rank_1("while True: pass  # FAULT"), words=("of a core",)),
    Fault(
        name="collective under a rank-dependent branch",
        script=GLOO + "note()\nif rank == 0:\n    dist.all_reduce(torch.ones(3))  # FAULT\ndist.barrier()  # FAULT\n",
        culprits=(0, 1),
        words=("different calls", "barrier", "all_reduce"),
    ),
    Fault(
        name="two groups in another order",
        script=GLOO
        + "other = dist.new_group([0, 1])\nfor group in (None, other) if rank == 0 else (other, None):\n    note()\n"
        + "    dist.all_reduce(x, group=group)  # FAULT\n",
        culprits=(0, 1),
        words=("wait for each other", "group 1"),
    ),
    Fault(
        name="two groups in another order, shared memory",
        script=SHM
        + "other = dist.new_group([0, 1])\nfor group in (None, other) if rank == 0 else (other, None):\n    note()\n"
        + "    dist.all_reduce(x, group=group)  # FAULT\n",
        culprits=(0, 1),
        words=("wait for each other",),
    ),
    Fault(
        name="both receive first",
        script=GLOO + "note()\ndist.recv(x, 1 - rank)  # FAULT\ndist.send(x, 1 - rank)\n",
        culprits=(0, 1),
        words=("wait for each other", "recv"),
    ),
    Fault(
        name="a message that is not sent",
        script=GLOO + "if rank == 0:\n    note()\n    dist.recv(x, 1)\nelse:\n    time.sleep(1000)  # FAULT\n",
        words=("recv",),
    ),
    Fault(name="deadlocked data worker", script=_WORKER, words=("DataLoader.__next__", "its data worker (pid")),
    Fault(
        name="uneven loaders",
        script=GLOO
        + "note()\nfor batch in range(10 if rank == 0 else 9):\n    dist.all_reduce(torch.ones(3))  # FAULT\n"
        + "dist.barrier()  # FAULT\n",
        culprits=(0, 1),
        words=("different calls",),
    ),
    Fault(
        name="one of four ranks sleeps",
        script=on_rank_1("time.sleep(1000)  # FAULT"),
        ranks=4,
        words=("ranks 0, 2, 3 wait",),
    ),
    Fault(
        name="a new group that one rank does not make",
        script=GLOO + "if rank == 0:\n    note()\n    dist.new_group([0, 1])\nelse:\n    time.sleep(1000)  # FAULT\n",
        words=("new_group",),
    ),
)
