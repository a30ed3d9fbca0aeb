"""Further ways for a rank not to come, for `bench_doctor`: what it may wait for, or compute, while others wait."""

from __future__ import annotations

from benchmarks.doctor_faults import DDP, GLOO, SHM, Fault, on_rank_1

_LOADER = (
    GLOO
    + """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        if rank == 1 and index == 8:
            note()
            {act}
        return torch.ones(2)

for batch in DataLoader(Data(), batch_size=1, num_workers={workers}):{mark}
    dist.all_reduce(batch)
"""
)
_MODEL = (
    DDP
    + """
def late(*_):
    if rank == 1 and step == 5:
        note()
        time.sleep(1000)  # FAULT

{hook}
for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
)


def _waits(name: str, act: str, *words: str, base: str = GLOO) -> Fault:
    """A fault in which rank 1 does something that does not end, in the last line of `act`."""
    return Fault(name=name, script=on_rank_1(f"{act}  # FAULT", base), words=words)


WAITS: tuple[Fault, ...] = (
    _waits("condition that nobody notifies", "c = threading.Condition()\nc.acquire()\nc.wait()"),
    _waits("event that nobody sets", "threading.Event().wait()"),
    _waits("thread that does not end", "t = threading.Thread(target=time.sleep, args=(1000,))\nt.start()\nt.join()"),
    _waits("socket that nobody connects to", "import socket\nsocket.create_server(('127.0.0.1', 0)).accept()"),
    _waits("socket that nobody writes to", "import socket\na, b = socket.socketpair()\na.recv(1)"),
    _waits("select on nothing", "import select\nselect.select([], [], [])"),
    _waits("fifo without a reader", "os.mkfifo('fifo')\nopen('fifo', 'w')"),
    _waits("child process that does not end", "child = subprocess.Popen(['sleep', '1000'])\nos.waitpid(child.pid, 0)"),
    _waits(
        "future that has no result",
        "import concurrent.futures\nf = concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 1000)\nf.result()",
    ),
    _waits("queue of processes that nobody fills", "import multiprocessing\nmultiprocessing.Queue().get()"),
    _waits("coroutine that does not end", "import asyncio\nasyncio.run(asyncio.sleep(1000))"),
    _waits("signal that does not come", "signal.pause()"),
    _waits(
        "key that nobody sets",
        "import datetime\nstore = dist.distributed_c10d._get_default_store()\n"
        "store.wait(['never'], datetime.timedelta(1))",
    ),
    _waits("regular expression without an end", "import re\nre.match('(a+)+$', 'a' * 64 + 'b')"),
    _waits("sum over too much", "sum(range(10**13))", base=SHM),
    _waits("steps of torch without an end", "y = torch.ones(300, 300)\nwhile True: y = torch.tanh(y @ y)", base=SHM),
    Fault(
        name="sleep in a dataset without workers",
        script=_LOADER.format(act="time.sleep(1000)  # FAULT", workers=0, mark=""),
    ),
    Fault(
        name="stopped data worker",
        script=_LOADER.format(act="os.kill(os.getpid(), signal.SIGSTOP)", workers=1, mark="  # FAULT"),
    ),
    Fault(name="sleep in a forward hook", script=_MODEL.format(hook="model.register_forward_hook(late)")),
    Fault(name="sleep in an optimizer hook", script=_MODEL.format(hook="optimizer.register_step_pre_hook(late)")),
)
