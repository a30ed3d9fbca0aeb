"""Words of the console: Chinese of what the queue says, and no key that no page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import jobs, ui
from phalanx.cluster.view import Member
from phalanx.jobs.attempt import failures
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Phase, Status
from phalanx.jobs.backends.kubernetes.pods import Pod, failure_of
from phalanx.jobs.backends.slurm import states as slurm
from phalanx.jobs.node import exit_reason
from phalanx.jobs.scheduling.queue import Amount, RunningJob, WaitingJob, choose
from phalanx.jobs.scheduling.quotas import Quota
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.workers.sign_off import SplitPush
from phalanx.launch.elastic.workers.worker_pool import WorkerPool
from phalanx.launch.reports.report import describe_exit
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.launch.request.elastic import WorkerRange
from phalanx.ui.i18n import WORDS
from phalanx.ui.reasons import translate_reason


def _waiting(name: str, cpu: int, memory: int = 0, queue: str = "default") -> WaitingJob:
    return WaitingJob(name, "ann", 5, 10.0, Amount(cpu * 1000, memory, 0), queue)


def test_every_reason_of_the_queue_has_its_chinese() -> None:
    capacity = Amount(4000, 8192, 1)
    running = [RunningJob("r", "bob", Amount(3000, 4096, 0), "default")]
    waiting = [_waiting("big", 2, 6000), _waiting("small", 1), _waiting("huge", 9), _waiting("limited", 1, queue="q")]
    waiting += [_waiting(f"more-{number}", 4) for number in range(30)]
    decision = choose(waiting, running, capacity, {}, {"q": Quota(jobs=0)})
    assert len(decision.reasons) > 30
    for reason in decision.reasons.values():
        assert re.search(r"[\u4e00-\u9fff]", translate_reason(reason)), reason


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("needs 4 cpu, 2 cpu are free; 3rd in line", "需要 4 核 CPU，空闲 2 核 CPU；排在第 3 位"),
        ("needs 1 gpu, none is free; next in line", "需要 1 个 GPU，没有空闲；排在下一个"),
        ("submitted by ada", "由 ada 提交"),
        ("something that a script wrote", "something that a script wrote"),
    ],
)
def test_a_reason_in_chinese(english: str, chinese: str) -> None:
    assert translate_reason(english) == chinese


def _ended(code: int, **details: str) -> str:
    """What the launcher says of the end of a process."""
    ended = ProcessExit(
        title="rank 1", role="worker", rank=1, host="h", pid=1, code=code, time=0.0, log_file="", **details
    )
    return f"rank 1 {describe_exit(ended)}"


LOST = (
    "its process is gone",
    "its backend knows nothing of it any more",
    "Slurm does not know the job any more",
    "the cluster has no such workload",
    "was not started",
)
"""What backends say of a node that left no exit record."""


def test_what_backends_say_of_lost_nodes_is_of_the_code() -> None:
    source = "".join(path.read_text() for path in Path(jobs.__file__).parent.rglob("*.py"))
    assert [why for why in LOST if f'"{why}"' not in source] == []


def _failures() -> Iterator[str]:
    yield from (failures.lost_node_failure(1, why).message for why in LOST)
    for message in ("asked to end", "asked to end by SIGTERM", "ended with node 1, which failed"):  # of node/agent.py
        yield message
        stopped = failures.failure_of({0: ExitRecord("stopped", None, message)}, Status(Phase.FAILED))
        assert stopped is not None
        yield stopped.message
    yield "attempt 1 failed (node_failure: node 0 has not been heard of for 30 s); restart 1 of 3"
    yield from (f"'python x.py' could not be {verb}: no" for verb in ("started", "supervised"))
    yield from (failures.oom_failure(0, count).message for count in (1, 3))
    yield from (failures.hang_failure(60, signs).message for signs in (None, {"0": 1.0, "1": 10.0}))
    yield failures.timeout_failure(60).message
    yield from (failures.submit_failure(ValueError("no"), tried).message for tried in (None, 30.0))
    yield from (f"{words} (Slurm: X, nodes a)" for _, words in slurm.FAILURES.values())
    yield from (f"slurm: {words} (Slurm: X)" for words in slurm._WAITS.values())
    for why in ("OOMKilled", "Evicted"):
        failure = failure_of([Pod(name="a", node=0, phase="Failed", why=why)])
        assert failure is not None
        yield failure.message
    yield from (_ended(-number) for number in (4, 6, 7, 8, 9, 11, 15))
    yield from (
        _ended(0),
        _ended(3),
        _ended(1, error="ValueError: no"),
        _ended(124, kind="hang", error="rank 0 is at x"),
    )
    yield from (f"torchrun {exit_reason.describe_exit(code)}: killed from outside" for code in (1, -9))


def test_every_failure_has_its_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "en")
    for message in _failures():
        chinese = translate_reason(message)
        assert re.search(r"[\u4e00-\u9fff]", chinese), message
        assert not re.search(
            r"\b(rank|node|its|the|was|ended|killed|signal|processor|memory)\b", chinese.replace("rank 0 is at x", "")
        ), chinese


def test_changes_of_workers_have_their_chinese() -> None:
    workers = WorkerPool(limits=WorkerRange(least=1, most=3), budget=RestartBudget(None, 0))
    workers.lose(1, "worker 1 is frozen: stopped by a signal for 3.0 s", now=1.0)
    workers.sign_off(1, SplitPush(7, [0, 2], [1]), now=2.0)
    workers.start(1, 3.0, clock=0.0)
    workers.scale(2)
    workers.finish(2, 4.0)
    workers.scale(3)
    workers.start(2, 5.0, clock=0.0)
    assert [translate_reason(event["reason"]) for event in workers.events] == [
        "工作进程 1 停止响应：被信号暂停，已 3.0 秒",
        (
            "工作进程 1 的推送 7 已写入参数服务器 0、2 的表，没有写入参数服务器 1 的表：该工作进程在发送时丢失。"
            "训练继续，各表保留这一差异"
        ),
        "工作进程 1 接替一个丢失的工作进程",
        "工作进程 2 已退出",
        "工作进程 2 加入",
    ]


def test_changes_of_ranks_have_their_chinese() -> None:
    membership = Membership(SizeLimits(1, 4))
    for number in range(4):
        membership.add(Member(id=f"n0.{number}", host="h", pid=5, log="", node=0))
    views = [membership.start(["n0.0", "n0.1", "n0.2"], "h:1")]
    for member in membership.active:
        membership.take_up(member, 0)
    membership.scale({0: 2}, "scaled to 2 ranks", (1, 0))
    membership.admit("n0.3")
    views.append(membership.next_view({0: "h:1"}))
    assert views[-1] is not None
    membership.adopt(views[-1])
    membership.lose("n0.0", "rank 0 (n0.0, pid 5) raised ValueError: no; never")
    membership.lose("n0.1", "h (node 0) is gone or cut off: no sign of life for 5 s")
    views.append(membership.next_view({0: "h:1"}))
    assert [translate_reason(view.reason) for view in views if view is not None] == [
        "作业启动",
        "n0.2 退出（规模调整为 2 个进程）；n0.3 加入",
        "进程 0（n0.0，pid 5）抛出 ValueError: no; never；h（节点 0）丢失或失去连接：已 5 秒没有消息",
    ]


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("n0.1 leaves (my own words)", "n0.1 退出（my own words）"),
        ("rank 1 (n0.1, pid 5) was killed by SIGKILL", "进程 1（n0.1，pid 5）被信号 SIGKILL 终止"),
        ("worker 2 ended with exit code 3", "工作进程 2 以退出码 3 结束"),
        ("a script wrote; this line", "a script wrote; this line"),
    ],
)
def test_a_change_in_chinese(english: str, chinese: str) -> None:
    assert translate_reason(english) == chinese


def test_every_word_of_the_console_is_shown_somewhere() -> None:
    folder = Path(ui.__file__).parent
    files = (*folder.rglob("*.html"), *folder.rglob("*.py"), *(folder.parent / "cli").glob("*.py"))
    texts = [path.read_text() for path in files if path.name != "i18n.py"]
    source = "".join(texts)
    computed = ("cause ", "checkpoint ", "event ", "source ")  # and those named by states, roles, tabs and pages
    unused = [
        key for key in WORDS if not key.startswith(computed) and not re.search(f"[\"']{re.escape(key)}[\"']", source)
    ]
    states = {"queued", "preparing", "running", "restarting", "stopping", "succeeded", "failed", "stopped"}
    assert set(unused) - states - {"viewer", "developer", "admin", "cpu", "gpu"} == set()
