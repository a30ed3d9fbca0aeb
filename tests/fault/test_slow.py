"""Jobs with a rank that is really slow, under the launcher: who is named, and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import BIN, WARM, Launch, launch, launch_warm

pytestmark = pytest.mark.fault

# Work is little beside each fault, and where they may, ranks go before what else runs on the machine: it would make the
# other rank late too. On Linux a nice value is of the calling thread, and the main thread is the one that counts here.
BEGIN = """
import gc, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
try:
    has_priority = os.nice(-10) < 0
except PermissionError:
    has_priority = False
STEPS, WORK_S = 130, 0.004
a, x = torch.ones(64, 64), torch.ones(1000)
torch.set_num_threads(1)

def work(seconds):
    '''As much computation on every rank, however slow its processor.'''
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(a, a)
"""

GLOO = 'dist.init_process_group("gloo")\n'
SHM = "import phalanx as px\npx.init()\n"

LOOP = """
for step in range(STEPS):
    work(WORK_S)
    if rank == 1:
        fault()
    dist.all_reduce(x)
    x.fill_(1.0)
"""

DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    loss = model(a).sum()
    work(WORK_S)
    if rank == 1:
        fault()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Slow:
    """What keeps rank 1 of two."""

    words: str
    """What must be said of it."""

    fault: str = "def fault(): pass\n"
    begin: str = GLOO
    loop: str = LOOP
    is_throttled: bool = False


THROTTLED = """
def fault():
    if step in (20, STEPS - 1):
        folder = sys.argv[1] if step == 20 else os.path.dirname(sys.argv[1])  # it may end at full speed
        open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
"""

HOGGED = """
import subprocess
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
hogs = []
if rank == 1:
    # Where other jobs run too, they take as much of the other core: a hog that goes before rank 1 is felt there too.
    hog = "import os; os.nice({})\\nwhile True: pass".format(5 if has_priority else 0)
    hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(1 if has_priority else 5)]
    if has_priority:
        os.nice(20)
def fault(): pass
import atexit
atexit.register(lambda: [hog.kill() for hog in hogs])
"""

COLLECTOR = """
junk = [[] for _ in range(200_000)] if rank == 1 else []
def fault():
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        gc.collect()
"""

LOADER = """
class Samples(torch.utils.data.Dataset):
    def __len__(self): return STEPS
    def __getitem__(self, index):
        time.sleep(0.05 if rank == 1 else 0.0)
        return index
batches = iter(torch.utils.data.DataLoader(Samples(), num_workers={workers}))
def fault(): next(batches)
"""

SLEEP = "def fault(): time.sleep(0.05)\n"
MORE = "def fault(): work(0.05)\n"

FAULTS = {
    "quota, gloo": Slow("its cgroup was throttled", THROTTLED, is_throttled=True),
    "quota, shm": Slow("its cgroup was throttled", THROTTLED, SHM, is_throttled=True),
    "processes on its core, gloo": Slow("other processes had its core", HOGGED),
    "collector, shm": Slow("Python's garbage collector ran", COLLECTOR, SHM),
    "input, gloo, DDP": Slow("its input took", LOADER.format(workers=1), loop=DDP),
    "input without workers, shm": Slow("its input took", LOADER.format(workers=0), SHM),
    "sleep, gloo": Slow("it slept", SLEEP),
    "sleep, shm, DDP": Slow("it slept", SLEEP, SHM, DDP),
    "computation, shm": Slow("it computed for longer", MORE, SHM),
}


@pytest.fixture
def quota() -> Iterator[Path]:
    """A control group with a twentieth of a core: less than is left on a busy machine."""
    v1 = Path("/sys/fs/cgroup/cpu")
    root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
    group = root / f"phalanx-test-{os.getpid()}"
    try:
        group.mkdir()
        if v1.is_dir():
            (group / "cpu.cfs_quota_us").write_text("5000")
        else:
            (group / "cpu.max").write_text("5000 100000")
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a quota can be made here: {error}")
    yield group
    deadline = time.monotonic() + 5.0
    while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


def script(slow: Slow) -> str:
    return BEGIN + slow.begin + slow.fault + slow.loop


@pytest.mark.parametrize("slow", FAULTS.values(), ids=FAULTS)
def test_the_slow_rank_and_the_cause_are_named(tmp_path: Path, slow: Slow, request: pytest.FixtureRequest) -> None:
    group = [str(request.getfixturevalue("quota"))] if slow.is_throttled else []
    (tmp_path / "train.py").write_text(script(slow))
    # Linux shares processors between sessions, and between cores by what a session has there: in one of its own, what
    # hurries on the core of rank 1 would take from rank 0 as well.
    done = launch(tmp_path, "-n", "2", "train.py", *group, timeout_s=100.0)
    assert done.code == 0, done.out + done.err
    found = re.search(
        r"^rank 0 waited (\d+) s an hour for rank 1 \((\d+)% of the time\): (.*)$", done.out, re.MULTILINE
    )
    assert found, done.out + done.err
    assert slow.words in found[3], found[0]
    assert int(found[2]) >= 10, found[0]
    assert int(found[1]) == pytest.approx(36 * int(found[2]), abs=20)
    goodput = re.search(r"^goodput ([\d.]+) %: .* s waits for rank 1", done.out, re.MULTILINE)
    assert goodput, done.out
    assert float(goodput[1]) <= 90.0
    facts = json.loads(done.log("slow.json"))
    assert facts["lines"][0] == found[0]
    assert facts["losses"]["stragglers"][0]["rank"] == 1


def test_nothing_is_said_of_ranks_that_are_alike(tmp_path: Path) -> None:
    even = "os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})\ndef fault(): pass\n"
    loop = LOOP.replace("work(WORK_S)", "work(0.001); time.sleep(0.05)")
    (tmp_path / "train.py").write_text(BEGIN + SHM + even + loop)
    done = launch_warm(tmp_path, "-n", "2", "--slow-share", "0.3", "train.py")  # whoever else runs here may take a core
    assert done.code == 0, done.out + done.err
    assert not re.search(r"waited|goodput", done.out)
    assert not (tmp_path / "log" / "slow.json").exists()


def test_nothing_is_counted_where_the_user_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(FAULTS["sleep, gloo"]) + "print('callbacks', len(gc.callbacks))\n")
    done = launch_warm(tmp_path, "-n", "2", "--slow-share", "0", "train.py")
    assert done.code == 0, done.out + done.err
    assert "callbacks 0" in done.out
    assert "waited" not in done.out


def phalanx(*arguments: object) -> str:
    done = subprocess.run([BIN / "phalanx", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_running_job_says_which_rank_is_slow_to_whoever_asks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        script(FAULTS["sleep, shm, DDP"]).replace("STEPS, WORK_S = 130", "STEPS, WORK_S = 9999")
    )
    job = Launch(("-n", "2", "train.py"), tmp_path, program=WARM)
    try:
        deadline = time.monotonic() + 40.0
        lines: list[str] = []
        while not lines:
            assert time.monotonic() < deadline
            time.sleep(0.3)
            lines = [
                line for j in json.loads(phalanx("ps", "--json")) if j["pid"] == job.process.pid for line in j["slow"]
            ]
        assert re.match(r"rank 0 waited \d+ s an hour for rank 1 \(\d+% of the time\): it slept", lines[0])
        assert f"  slow: {lines[0][:30]}" in phalanx("ps")
        answer = phalanx("why", "--pid", job.process.pid)
        assert answer.startswith("the job is not hung, but slow. In the last minute:\nrank 0 waited "), answer
        assert json.loads(phalanx("why", "--pid", job.process.pid, "--json"))["slow"]
        assert json.loads(job.log("slow.json"))["losses"]["stragglers"][0]["rank"] == 1
    finally:
        job.process.terminate()
        job.wait(20.0)
        job.gone_within(5.0)
    assert "rank 0 waited " in job.out


# Its batches are shared out over the ranks that there are; each of them makes a step with every batch.
ELASTIC = """
import os, signal, time
import torch, torch.nn.functional as F
import phalanx as px
torch.manual_seed(0)
torch.set_num_threads(1)
member = os.environ["PHALANX_MEMBER_ID"]
net = torch.nn.Linear(12, 5)
data = torch.utils.data.TensorDataset(torch.randn(3600, 12), torch.randint(0, 5, (3600,)))
model, optimizer, loader = px.distribute(net, torch.optim.SGD(net.parameters(), 0.1), data, global_batch=12)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if member == "n0.1":
        time.sleep(0.05)
    optimizer.step()
    if member == "n0.0" and step == 100:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_slow_rank_of_an_elastic_job_is_named_by_its_id_whatever_its_number(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    done = launch_warm(tmp_path, "-n", "1:3", "train.py", timeout_s=100.0)
    assert done.code == 0, done.out + done.err
    # It was rank 1, and rank 0 when n0.0 was lost; n0.3 took the place of that.
    (line,) = re.findall(r"^n0\.\S+.* waited \d+ s an hour for .*$", done.out, re.MULTILINE)
    assert re.match(r"(n0\.0, )?n0\.2(, n0\.3)? waited \d+ s an hour for n0\.1 \(\d+% of the time\): it slept", line)
    (goodput,) = re.findall(r"^goodput .*$", done.out, re.MULTILINE)
    assert re.search(r"\d s waits for n0\.1\b", goodput), goodput
    assert re.search(r"\d s n0\.0 lost\b", goodput), goodput
    facts = json.loads(done.log("slow.json"))
    assert (facts["lines"], facts["goodput"]) == ([line], goodput)
    assert [straggler["rank"] for straggler in facts["losses"]["stragglers"]] == ["n0.1"]
    events = [json.loads(line) for line in done.log("events.launcher.0.jsonl").splitlines()]
    assert events[0]["lost"] == ["n0.0"]
