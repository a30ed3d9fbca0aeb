"""Real deaths under the launcher: who is named, how soon everything is down, and that nothing is left.

Limits are generous for two busy cores: the promise is 3 s from the death to the end of the launcher.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from launching import BIN, Launch, launch

pytestmark = pytest.mark.fault

DOWN_S = 3.0

TRAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist

rank, what = int(os.environ["RANK"]), sys.argv[1]

def mark():
    with open("died", "w") as file:
        file.write(repr(time.time()))

if what == "killed in init" and rank == 1:
    mark()
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("gloo")
x = torch.ones(1)
for step in range(1000):
    print("step", step, flush=True)
    dist.all_reduce(x)
    if rank == 1 and step == 3:
        mark()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "raises":
            raise ValueError("the data of rank 1 is bad")
        if what == "leaves":
            sys.exit(0)
        if what == "exits 3":
            os._exit(3)
"""

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
# A grandchild in a session of its own, out of reach of the rank's process group.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(f"up.{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(300)
"""


def fail(folder: Path, what: str) -> tuple[Launch, float]:
    """Run TRAIN with one fault; returns the launch and the seconds from the fault to the launcher's end."""
    (folder / "train.py").write_text(TRAIN)
    done = launch(folder, "-n", "2", "train.py", what)
    return done, time.time() - float((folder / "died").read_text())


def report_of(done: Launch) -> list[str]:
    """Lines of the framed report, which must be the last thing on the screen."""
    lines = done.out.rstrip("\n").split("\n")
    assert lines[-1] == "=" * 88, done.out
    start = max(i for i, line in enumerate(lines[:-1]) if re.fullmatch(r"=+ .* =+", line))
    return lines[start:]


@pytest.mark.parametrize(
    ("what", "code", "how"),
    [
        ("killed", 137, r"rank 1 ended by signal 9 \(SIGKILL\): .*out-of-memory killer"),
        ("killed in init", 137, r"rank 1 ended by signal 9 \(SIGKILL\)"),
        ("segfault", 139, r"rank 1 ended by signal 11 \(SIGSEGV\)"),
        ("raises", 1, r"rank 1 raised ValueError: the data of rank 1 is bad"),
        ("leaves", 1, r"rank 1 ended early with exit code 0"),
        ("exits 3", 3, r"rank 1 ended with exit code 3"),
    ],
)
def test_the_rank_that_died_first_is_named_and_all_is_down_in_time(
    tmp_path: Path, what: str, code: int, how: str
) -> None:
    done, seconds = fail(tmp_path, what)
    assert done.code == code
    assert seconds < DOWN_S
    lines = report_of(done)
    assert "rank 1 failed first" in lines[0]
    assert re.match(how, lines[1])
    assert lines[-2] == "log file: log/workerlog.1"
    recorded = json.loads(done.log("ended.json"))
    assert (recorded["code"], recorded["first"]["rank"]) == (code, 1)
    assert f"rank 1 {recorded['said']}" == lines[1]
    if what == "raises":
        assert lines[-4] == "ValueError: the data of rank 1 is bad"
        assert any('train.py", line' in line for line in lines)
        assert "entry.py" not in "".join(lines)
    if what == "segfault":
        assert "Fatal Python error: Segmentation fault" in "".join(lines)


def wait_until_up(running: Launch, ranks: int) -> None:
    for rank in range(ranks):
        running.wait_for(running.cwd / f"up.{rank}")


@pytest.fixture
def stubborn(tmp_path: Path) -> Launch:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    running = Launch(("-n", "2", "stubborn.py"), tmp_path)
    wait_until_up(running, 2)
    # Launcher, fork server, store, two ranks, two grandchildren each.
    assert len(running.alive()) == 9
    return running


def test_killing_the_launcher_leaves_no_process(stubborn: Launch) -> None:
    stubborn.process.kill()
    stubborn.wait()
    assert stubborn.gone_within(DOWN_S) < DOWN_S


def test_killing_the_fork_server_ends_the_job(stubborn: Launch) -> None:
    os.kill(_fork_server(stubborn), signal.SIGKILL)
    stubborn.wait()
    assert stubborn.code == 1
    assert re.search(
        r"the fork server \(pid \d+\), from which every process of this host is started, ended by signal 9 "
        r"\(SIGKILL\): .*out-of-memory killer",
        stubborn.err,
    )
    assert stubborn.gone_within(DOWN_S) < DOWN_S


def _fork_server(running: Launch) -> int:
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return int(children[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_the_job_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "polite.py").write_text(
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    open(f'saved.{os.environ[\"RANK\"]}', 'w').write(str(number))\n"
        "    sys.exit(0)\n"
        "for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(s, stop)\n"
        "open(f'up.{os.environ[\"RANK\"]}', 'w').write('x')\n"
        "while True: time.sleep(0.05)\n"
    )
    running = Launch(("-n", "2", "polite.py"), tmp_path)
    wait_until_up(running, 2)
    running.process.send_signal(number)
    running.wait(10)
    assert running.code == (130 if number == signal.SIGINT else 0)
    assert running.out.endswith(f"stopped by {number.name}; every process of the job has ended\n")
    passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert {(tmp_path / f"saved.{rank}").read_text() for rank in range(2)} == {str(int(passed_on))}
    assert json.loads(running.log("ended.json")) == {"code": running.code, "stopped_by": number.name}
    running.gone_within(0.5)


def test_a_closed_terminal_lets_the_job_save(tmp_path: Path) -> None:
    """As a lost ssh session does: SIGHUP, and from then on nothing can be written to the screen."""
    (tmp_path / "train.py").write_text(
        "import os, torch, phalanx as px\n"
        "model = torch.nn.Linear(2, 2)\n"
        "checkpointer = px.Checkpointer('saved', model)\n"
        "open(f'up.{os.environ[\"RANK\"]}', 'w').write('x')\n"
        "while True:\n"
        "    print('a step', flush=True)\n"
        "    checkpointer.step()\n"
    )
    ours, theirs = pty.openpty()
    launcher, terminal = shlex.join(_run_program()), os.ttyname(theirs)
    shell = f"exec < {terminal} > {terminal} 2>&1; exec {launcher} -n 2 train.py"
    running = Launch((), tmp_path, program=("setsid", "sh", "-c", shell))
    wait_until_up(running, 2)
    os.close(theirs)
    os.close(ours)
    running.wait(30)
    assert running.code == 0
    assert list((tmp_path / "saved").glob("step-*/complete.json"))
    running.gone_within(0.5)


def test_ctrl_c_while_the_launcher_still_imports_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    running = Launch(("train.py",), tmp_path)
    while len(running.alive()) < 2:  # The fork server is there, and little else.
        assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    running.wait(10)
    assert running.code in (-signal.SIGINT, 130)
    assert running.err == ""
    running.gone_within(5.0)


def test_a_second_stop_signal_cuts_the_grace_short(stubborn: Launch) -> None:
    started = time.monotonic()
    stubborn.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert stubborn.process.poll() is None
    stubborn.process.send_signal(signal.SIGINT)
    stubborn.wait(10)
    assert time.monotonic() - started < DOWN_S
    assert stubborn.code == 130
    stubborn.gone_within(0.5)


def test_who_does_not_end_in_the_grace_that_was_set_is_killed_and_named(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    running = Launch(("-n", "2", "stubborn.py"), tmp_path, environment={"PHALANX_STOP_GRACE_S": "1"})
    wait_until_up(running, 2)
    running.process.send_signal(signal.SIGTERM)
    running.wait(10)
    assert running.code == 128 + signal.SIGTERM
    assert "after 1 s: what they were saving is lost. Set PHALANX_STOP_GRACE_S to give them longer" in running.out
    running.gone_within(0.5)


def test_sighup_ignored_before_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("open('up.0', 'w').write('x'); open('gate').read(); print('through')")
    os.mkfifo(tmp_path / "gate")
    running = Launch(("short.py",), tmp_path, program=("nohup", *_run_program()))
    wait_until_up(running, 1)
    running.process.send_signal(signal.SIGHUP)
    (tmp_path / "gate").write_text("go")
    running.wait(10)
    assert running.code == 0
    assert "through" in running.out


def _run_program() -> tuple[str, ...]:
    from launching import RUN

    return RUN


RESTART = """
import os, sys
import torch
import torch.distributed as dist

attempt = int(os.environ["PHALANX_ATTEMPT"])
assert attempt == int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("attempt", attempt, "sum", x.item(), flush=True)
if attempt < int(sys.argv[1]) and dist.get_rank() == 1:
    raise RuntimeError(f"attempt {attempt} fails")
dist.all_reduce(x)
"""


def test_a_failed_job_is_restarted_whole(tmp_path: Path) -> None:
    (tmp_path / "restart.py").write_text(RESTART)
    done = launch(tmp_path, "-n", "2", "--max-restarts", "2", "restart.py", "1")
    assert done.code == 0, done.out
    assert re.search(
        r"WARNING .*rank 1 raised RuntimeError: attempt 0 fails. Restarting the whole job, restart 1 of 2; "
        r"logs of the failed attempt are in log/attempt-0",
        done.out,
    )
    assert "attempt 0 sum 2.0" in done.log("attempt-0/workerlog.1")
    assert done.log("workerlog.1") == "attempt 1 sum 2.0\n"
    assert "failed first" not in done.out


def test_a_killed_fork_server_costs_a_restart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "open(f'up.{os.environ[\"RANK\"]}', 'w').write('x')\n"
        "if os.environ['PHALANX_ATTEMPT'] == '0': time.sleep(300)\n"
        "print('trained', flush=True)\n"
    )
    running = Launch(("-n", "2", "--max-restarts", "1", "train.py"), tmp_path)
    wait_until_up(running, 2)
    os.kill(_fork_server(running), signal.SIGKILL)
    running.wait()
    assert running.code == 0, running.err
    assert re.search(r"ended by signal 9 .* Restarting the whole job, restart 1 of 1; logs .*/attempt-0", running.out)
    assert running.log("workerlog.1") == "trained\n"
    running.gone_within(0.5)


def test_restarts_run_out(tmp_path: Path) -> None:
    (tmp_path / "restart.py").write_text(RESTART)
    done = launch(tmp_path, "-n", "2", "--max-restarts", "1", "restart.py", "5")
    assert done.code == 1
    assert "attempt 1 fails" in report_of(done)[1]


def test_an_out_of_reach_grandchild_ends_with_a_good_job_too(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
    )
    assert launch(tmp_path, "leak.py").code == 0


def test_a_rank_that_ended_well_long_before_the_others_is_mentioned(tmp_path: Path) -> None:
    """Waiting itself is not a failure, but silence about it would look like a hang."""
    from phalanx.launch.job import local_attempt as attempt

    (tmp_path / "wait.py").write_text("import os\nif os.environ['RANK'] == '0': open('gate').read()\n")
    (tmp_path / "soon.py").write_text(
        "import sys, phalanx.launch.job.local_attempt as a\n"
        "a.LINGER_S = 0.2\n"
        "from phalanx.launch.cli.command import main\n"
        "main(sys.argv[1:])\n"
    )
    assert attempt.LINGER_S >= 10
    os.mkfifo(tmp_path / "gate")
    program = (str(BIN / "python"), "soon.py")
    running = Launch(("-n", "2", "wait.py"), tmp_path, program=program)
    assert running.process.stdout is not None
    said = ""
    while "rank 1 ended with exit code 0 over 0 s ago, while rank 0 still run(s)" not in said:
        line = running.process.stdout.readline()
        assert line, said
        said += line
    (tmp_path / "gate").write_text("go")
    assert running.wait().code == 0
