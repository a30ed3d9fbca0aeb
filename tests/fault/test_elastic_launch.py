"""Ranks of `phalanx run -n a:b` are killed, frozen and replaced while the others continue."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elastic_launch import ids, no_launcher_left, start
from launching import BIN, Launch, launch

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures(no_launcher_left.__name__)]


def test_a_killed_rank_is_left_out_and_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:3")
    first = job.wait_for_view("n0.2", 0)
    assert (first["epoch"], ids(first), first["planned"]) == (0, ["n0.0", "n0.1", "n0.2"], True)
    assert job.environment("n0.1")["PHALANX_REPLICAS"] == "3"
    pid = job.kill("n0.1")
    without = job.wait_for_view("n0.2", 1)
    assert (ids(without), without["planned"], without["store"]) == (["n0.0", "n0.2"], False, first["store"])
    assert f"rank 1 (n0.1, pid {pid}) was killed by SIGKILL" in without["reason"]
    grown = job.wait_for_view("n0.3", 2)
    assert (ids(grown), grown["planned"]) == (["n0.0", "n0.2", "n0.3"], True)
    assert job.seen("n0.3")[1] == {"joining": {"epoch": 1, "store": first["store"], "id": "n0.3"}}
    environment = job.environment("n0.3")
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["PHALANX_JOINING"]) == ("0", "1", "1")
    assert (tmp_path / "log" / "workerlog.n0.3").read_text().startswith("member n0.3 is here")
    # The others are the processes that began, and know nothing else.
    job.wait_for_view("n0.0", 2)
    assert [view["epoch"] for view in job.views("n0.0")] == [0, 1, 2]
    assert "PHALANX_JOINING" not in job.environment("n0.0")
    assert job.end().code == 0


def test_a_joiner_whose_peers_finish_before_they_take_it_in_ends_with_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:2", script_arguments=("silent",))
    job.wait_for_view("n0.1", 0)
    job.kill("n0.1")
    job.wait_for_view("n0.0", 1)
    took_up = {"epoch": 1, "step": 7, "seconds": 0.1, "redone": 0, "lost": ["n0.1"], "new": []}
    job.say("n0.0", joined=took_up)
    job.wait_for_view("n0.2", 2)
    job.say("n0.0", exit=0)
    job.end_nodes()
    assert job.launcher.code == 0


def test_two_ranks_that_die_together_are_both_left_out(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:4", "--max-restarts", "0")
    job.wait_for_view("n0.3", 0)
    (tmp_path / "log").mkdir(exist_ok=True)
    for member in ("n0.0", "n0.2"):
        job.kill(member)
    job.wait_until(lambda: ids(job.views("n0.3")[-1]) == ["n0.1", "n0.3"])
    assert job.launcher.process.stdout is not None
    lines = iter(job.launcher.process.stdout.readline, "")  # it says so a moment later, and the job must not end before
    assert any("the restart budget is used up (all 0 of --max-restarts 0 are used)" in line for line in lines)
    assert job.end().code == 0


@pytest.mark.parametrize("frozen", ["stopped", "asleep"])
def test_a_frozen_rank_is_killed_once_another_waited_for_it(tmp_path: Path, frozen: str) -> None:
    job = start(tmp_path, "-n", "1:2", "--max-restarts", "0")
    job.wait_for_view("n0.1", 0)
    if frozen == "stopped":
        pid = job.kill("n0.1", signal.SIGSTOP)
    else:
        pid = job.views("n0.1")[0]["members"][1]["pid"]
        job.say("n0.1", sleep=60)
        job.wait_until(lambda: not (tmp_path / "say.n0.1").exists())
    job.say("n0.0", suspect={"epoch": 0, "ids": ["n0.1"], "waited_s": 1.0, "step": 3})
    view = job.wait_for_view("n0.0", 1)
    assert ids(view) == ["n0.0"]
    assert f"rank 1 (n0.1, pid {pid}) is frozen" in view["reason"]
    assert not Path(f"/proc/{pid}").exists()
    assert job.end().code == 0


def test_a_rank_that_computes_or_waits_itself_is_not_killed(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:3")
    job.wait_for_view("n0.2", 0)
    job.say("n0.1", spin=3)
    job.wait_until(lambda: not (tmp_path / "say.n0.1").exists())
    job.say("n0.2", suspect={"epoch": 0, "ids": ["n0.1"], "waited_s": 1.0, "step": 3})
    job.say("n0.0", suspect={"epoch": 0, "ids": ["n0.2"], "waited_s": 1.0, "step": 3})
    computing = job.wait_until(lambda: [m["wait"] for m in job.seen("n0.2") if "wait" in m])[0]
    waiting = job.wait_until(lambda: [m["wait"] for m in job.seen("n0.0") if "wait" in m])[0]
    assert computing["id"] == "n0.1"
    assert computing["why"].startswith("is computing")
    assert waiting == {"id": "n0.2", "why": "waits for another itself"}
    time.sleep(1.5)
    assert [view["epoch"] for view in job.views("n0.0")] == [0]
    assert job.end().code == 0


def test_too_few_ranks_end_the_job_with_the_cause(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "2:3", "--max-restarts", "0")
    job.wait_for_view("n0.2", 0)
    job.kill("n0.1")
    job.wait_for_view("n0.0", 1)
    job.kill("n0.2")
    done = job.launcher.wait()
    done.gone_within(0.5)
    assert done.code == 128 + signal.SIGKILL
    refused = next(m["refused"] for m in job.seen("n0.0") if "refused" in m)
    assert refused["why"].endswith("1 of at least 2 ranks are left")
    # What the job survived is not the cause.
    assert "member n0.2 failed first" in done.out
    assert "member n0.1" not in done.out.partition("failed first")[2]


def test_a_job_that_lost_what_its_ranks_need_ends_with_the_reason(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:3", "--max-restarts", "0", script_arguments=("silent",))
    job.wait_for_view("n0.2", 0)
    job.kill("n0.1")
    job.wait_for_view("n0.0", 1)
    job.say("n0.0", abandon={"why": "a shard is lost"})
    done = job.launcher.wait()
    done.gone_within(0.5)
    assert done.code == 128 + signal.SIGKILL
    assert "the job cannot continue: a shard is lost" in done.out
    refused = next(m["refused"] for m in job.seen("n0.2") if "refused" in m)
    assert refused["why"] == "a shard is lost"
    events = [json.loads(line) for line in (tmp_path / "log" / "events.launcher.0.jsonl").read_text().splitlines()]
    assert [(event["lost"], event["ended"]) for event in events] == [(["n0.1"], "a shard is lost")]


def test_an_error_of_every_rank_ends_the_job_with_it(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:3")
    job.wait_for_view("n0.2", 0)
    job.say("n0.1", **{"raise": "no such column"})
    job.wait_for_view("n0.0", 1)
    job.say("n0.2", **{"raise": "no such column"})
    done = job.launcher.wait()
    done.gone_within(0.5)
    assert done.code == 1
    assert "ValueError: no such column" in done.out.partition("failed first")[2]


def test_a_script_that_knows_nothing_of_members_fails_as_in_any_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    done = launch(tmp_path, "-n", "1:2", "job.py")
    assert done.code == 128 + signal.SIGKILL
    assert "member n0.1 failed first" in done.out


def test_the_agent_is_gone_with_the_launcher(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:2")
    job.wait_for_view("n0.1", 0)
    job.launcher.process.kill()
    job.launcher.process.communicate()
    job.launcher.gone_within(2.0)


def phalanx(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "phalanx"), *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_running_job_is_scaled_down_and_up_by_command(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:3")
    job.wait_for_view("n0.2", 0)
    pid = str(job.launcher.process.pid)
    (listed,) = [j for j in json.loads(phalanx(tmp_path, "ps", "--json").stdout) if str(j["pid"]) == pid]
    assert (listed["elastic"]["epoch"], listed["elastic"]["target"]) == (0, 3)
    assert oct(Path(listed["control"]).stat().st_mode & 0o777) == "0o600"
    assert phalanx(tmp_path, "scale", listed["job_id"], "1").stdout == "3 ranks -> 1 ranks\n"
    smaller = job.wait_for_view("n0.0", 1)
    assert (ids(smaller), smaller["planned"]) == (["n0.0"], True)
    assert "n0.2 leaves (scaled to 1 ranks)" in smaller["reason"]
    for member in ("n0.1", "n0.2"):  # they are told, and end well
        assert ids(job.wait_for_view(member, 1)) == ["n0.0"]
    assert phalanx(tmp_path, "scale", pid, "2").returncode == 0
    assert ids(job.wait_for_view("n0.3", 2)) == ["n0.0", "n0.3"]
    refused = phalanx(tmp_path, "scale", pid, "4")
    assert (refused.returncode, "was started with 1 to 3" in refused.stderr) == (1, True)
    shown = phalanx(tmp_path, "ps").stdout
    assert "membership epoch 2: 2 of 1 to 3 ranks, target 2; 0 is n0.0, 1 is n0.3" in shown
    assert "epoch 2: n0.3 joins, stood still for 0.25 s" in shown
    done = job.end()
    assert done.code == 0
    assert "lost: " in done.out.rpartition("goodput ")[2]
    events = [json.loads(line) for line in (tmp_path / "log" / "events.launcher.0.jsonl").read_text().splitlines()]
    assert [(e["epoch"], e["left"], e["joined"]) for e in events] == [
        (1, ["n0.1", "n0.2"], []),
        (2, [], ["n0.3"]),
    ]
    assert not Path(listed["control"]).exists()


def test_a_refusal_without_a_failed_process_starts_the_whole_job_again(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "2:3", "--max-restarts", "1")
    members = job.wait_for_view("n0.2", 0)["members"]
    early = [member for member in members if member["id"] != "n0.2"]
    for member in early:
        job.wait_for_view(member["id"], 0)
        job.say(member["id"], exit=0)
    job.wait_until(lambda: not any(Path(f"/proc/{member['pid']}").exists() for member in early))
    job.say("n0.2", suspect={"epoch": 0, "ids": ["n0.0", "n0.1"], "waited_s": 1.0, "step": 3})
    job.wait_until(lambda: len([view for view in job.views("n0.2") if view["epoch"] == 0]) == 2)
    done = job.end()
    assert done.code == 0
    assert "1 of at least 2 ranks are left. Restarting the whole job" in done.out


def test_a_rank_is_added_only_once_one_that_leaves_has_freed_its_device(tmp_path: Path) -> None:
    job = start(tmp_path, "-n", "1:2")
    job.wait_for_view("n0.1", 0)
    leaving = next(m["pid"] for m in job.wait_for_view("n0.0", 0)["members"] if m["id"] == "n0.1")
    job.say("n0.1", sleep=2.0)
    job.wait_until(lambda: not (tmp_path / "say.n0.1").exists())
    pid = str(job.launcher.process.pid)
    assert phalanx(tmp_path, "scale", pid, "1").returncode == 0
    assert ids(job.wait_for_view("n0.0", 1)) == ["n0.0"]
    assert phalanx(tmp_path, "scale", pid, "2").returncode == 0
    job.environment("n0.2")
    assert not Path(f"/proc/{leaving}").exists()
    assert ids(job.wait_for_view("n0.2", 2)) == ["n0.0", "n0.2"]
    assert job.end().code == 0


def test_a_job_of_fixed_size_and_a_job_that_is_not_there_cannot_be_scaled(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    job = Launch(("-n", "1", "wait.py"), tmp_path)
    job.wait_for(tmp_path / "log" / "workerlog.0")
    fixed = phalanx(tmp_path, "scale", str(job.process.pid), "2")
    job.process.terminate()
    job.wait()
    gone = phalanx(tmp_path, "scale", str(job.process.pid), "2")
    assert (fixed.returncode, "was started with a fixed number of ranks" in fixed.stderr) == (1, True)
    assert (gone.returncode, "No job is called" in gone.stderr) == (1, True)
