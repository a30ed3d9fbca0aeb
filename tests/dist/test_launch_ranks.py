"""What scripts expect of the process they run in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launching import launch

pytestmark = pytest.mark.dist

PLAIN = """
import os
import re
import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
kept = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
kept(torch.ones(1, 2)).sum().backward()
print("sum", x[0].item(), "threads", torch.get_num_threads(), flush=True)
# No destroy_process_group, and the DDP object stays a global: ending well is the launcher's business.
"""

LOADERS = """
import os, pickle, random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index

def main():
    again = pickle.loads(pickle.dumps(Squares()))
    assert type(again) is Squares, type(again)
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader], flush=True)
    open(f"random.{os.environ['RANK']}", "w").write(f"{random.random()} {np.random.rand()}")

if __name__ == "__main__":
    main()
"""

EXITS = """
import atexit, threading, time
atexit.register(lambda: print("exit handler", flush=True))
threading.Thread(target=lambda: (time.sleep(0.3), print("thread", flush=True))).start()
print("main over", flush=True)
"""


def test_a_plain_torch_script_finds_its_store(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    done = launch(tmp_path, "-n", "2", "plain.py")
    assert done.code == 0, done.out
    assert "sum 3.0" in done.log("workerlog.0")
    assert "sum 3.0" in done.log("workerlog.1")
    assert "destroy" not in done.out


def test_loader_workers_start_by_fork_and_by_spawn(tmp_path: Path) -> None:
    (tmp_path / "loaders.py").write_text(LOADERS)
    done = launch(tmp_path, "-n", "2", "loaders.py")
    assert done.code == 0, done.out
    for method in ("fork", "spawn"):
        assert f"{method} [[0, 1, 4, 9], [16, 25, 36, 49]]" in done.out
    drawn = [(tmp_path / f"random.{rank}").read_text().split() for rank in range(2)]
    assert drawn[0][0] != drawn[1][0], "ranks share the state of random"
    assert drawn[0][1] != drawn[1][1], "ranks share the state of numpy.random"


def test_threads_and_exit_handlers_run_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    done = launch(tmp_path, "exits.py")
    assert done.code == 0
    assert done.log("workerlog.0").split("\n")[:3] == ["main over", "thread", "exit handler"]


def test_an_exit_handler_that_fails_fails_the_rank(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(
        "import threading, os\nt = threading.Thread(target=os._exit, args=(4,)); t.start()"
    )
    assert launch(tmp_path, "leave.py").code == 4


LOSES_A_CHILD = """
import os, signal

def handler(*_):
    raise RuntimeError("a worker was lost")  # as torch's DataLoader does

class Bad(Exception):
    def __str__(self):
        pid = os.fork() or os._exit(0)
        os.waitpid(pid, 0)
        return "the data is bad"

signal.signal(signal.SIGCHLD, handler)
raise Bad
"""


def test_a_child_that_ends_while_an_error_is_written_down_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(LOSES_A_CHILD)
    done = launch(tmp_path, "bad.py")
    assert done.code == 1
    assert done.out.rstrip().split("\n")[-4] == "Bad: the data is bad", done.out
    assert "a worker was lost" not in done.out + done.err


BREAKS_A_PIPE = """
import os, signal, torch
from torch.utils.data import DataLoader

batches = iter(DataLoader(torch.ones(100, 1), num_workers=1))
next(batches)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as if the signal came too late
worker = batches._workers[0].pid
os.kill(worker, signal.SIGKILL)
os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
raise ConnectionResetError("peer")
"""


def test_behind_a_broken_pipe_the_data_worker_that_was_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BREAKS_A_PIPE)
    done = launch(tmp_path, "bad.py")
    assert done.code == 1
    assert re.search(r"rank 0 raised RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Killed", done.out)
    assert 'bad.py", line 11' in done.out
    assert "ConnectionResetError: peer" in done.out


def test_four_launches_at_once_share_no_port(tmp_path: Path) -> None:
    """Each job's two ranks meet in their own store; a clash would fail one or join two jobs."""
    from launching import RUN, Launch

    (tmp_path / "meet.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "store.set('job' + os.environ['RANK'], os.environ['PHALANX_JOB_ID'])\n"
        "other = store.get('job' + str(1 - int(os.environ['RANK']))).decode()\n"
        "assert other == os.environ['PHALANX_JOB_ID']\n"
        "print('met', os.environ['PADDLE_TRAINER_ENDPOINTS'], flush=True)\n"
    )
    # A dozen processes among themselves; tests that run beside them in other processes of `make test` go first.
    nice = ("nice", "-n", "10", *RUN)
    running = [Launch(("-n", "2", "--log-dir", f"log{i}", "meet.py"), tmp_path, nice) for i in range(4)]
    done = [one.wait(100) for one in running]
    assert [one.code for one in done] == [0] * 4, [one.out for one in done if one.code]
    endpoints = [e for one in done for e in one.out.rpartition("met ")[2].strip().split(",")]
    assert len(set(endpoints)) == 8
    for one in done:
        one.gone_within(0.5)


def test_two_jobs_in_one_folder_do_not_mix_their_logs(tmp_path: Path) -> None:
    from launching import Launch

    os.mkfifo(tmp_path / "gate")
    (tmp_path / "wait.py").write_text("open('here', 'w').write('x'); open('gate').read(); print('first')")
    (tmp_path / "second.py").write_text("print('second')")
    first = Launch(("wait.py",), tmp_path)
    first.wait_for(tmp_path / "here")
    second = launch(tmp_path, "second.py")
    (tmp_path / "gate").write_text("go")
    assert first.wait().code == second.code == 0
    assert "log is in use by another job that runs now; this one writes to" in second.out
    assert (tmp_path / "log" / "workerlog.0").read_text() == "first\n"
    assert (tmp_path / "log.2" / "workerlog.0").read_text() == "second\n"
