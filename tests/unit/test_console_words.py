"""Words of the console: Chinese of what the queue says, and no key that no page shows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import ui
from phalanx.jobs.attempt import failures
from phalanx.jobs.backends.kubernetes.pods import Pod, failure_of
from phalanx.jobs.backends.slurm import states as slurm
from phalanx.jobs.node import exit_reason
from phalanx.jobs.scheduling.queue import Amount, RunningJob, WaitingJob, choose
from phalanx.jobs.scheduling.quotas import Quota
from phalanx.launch.reports.report import describe_exit
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.plan.report.explain import explain
from phalanx.plan.report.picture import picture
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.techniques import TECHNIQUES
from phalanx.ui.i18n import TABLE
from phalanx.ui.plan_words import translate_picture, translate_words
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


def _failures() -> Iterator[str]:
    yield failures.lost_node_failure(1, "no heartbeat").message
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
            r"\b(rank|ended|killed|signal|processor|memory)\b", chinese.replace("rank 0 is at x", "")
        ), chinese


def test_every_word_of_a_plans_picture_has_its_chinese() -> None:
    frozen = {"x": False, "fc.weight": True, "<b>&": True}
    shape = ModelShape(
        tuple(
            ParamShape(name=name, shape=(8,), dtype="float32", item_bytes=4, trainable=not fixed)
            for name, fixed in frozen.items()
        )
    )
    strategy = DistributedStrategy(clip=True, clip_configs={"norm": 1.0})
    for ranks in (1, 2):
        drawn = translate_picture(picture(explain(plan_from_strategy(strategy, shape, ranks), shape)))
        words = [text.text or "" for text in ET.fromstring(drawn).iter() if text.tag.endswith("text")]
        english = [word for word in words if re.search(r"[a-z]{3}", word) and not re.search(r"[\u4e00-\u9fff]", word)]
        assert english == ["fc.weight (1)"]
        assert "<b>& (1)" in words


@pytest.mark.parametrize("effect", [technique.effect for technique in TECHNIQUES.values() if technique.effect])
def test_what_a_technique_does_has_its_chinese(effect: str) -> None:
    for words in (f"x=True: {effect}", f"x=True: {effect} (one rank: nothing to do)"):
        assert not re.search(r"rank|gradients|each ", translate_words(words)), words


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("2 servers, table item", "2 个参数服务器，表 item"),
        ("shard over data, shard over model", "沿 data 分片，沿 model 分片"),
        ("push (async, 4 steps)", "推送（async，4 步）"),
        ("stage 1 on rank 0 of its axis: a, b", "阶段 1，在其轴的进程 0：a, b"),
        ("layers.0 (3)", "layers.0 (3)"),
    ],
)
def test_words_of_a_plan_in_chinese(english: str, chinese: str) -> None:
    assert translate_words(english) == chinese


def test_every_word_of_the_console_is_shown_somewhere() -> None:
    folder = Path(ui.__file__).parent
    files = (*folder.rglob("*.html"), *folder.rglob("*.py"), *(folder.parent / "cli").glob("*.py"))
    texts = [path.read_text() for path in files if path.name != "i18n.py"]
    source = "".join(texts)
    computed = ("cause ", "checkpoint ", "event ", "source ")  # and those named by states, roles, tabs and pages
    unused = [
        key for key in TABLE if not key.startswith(computed) and not re.search(f"[\"']{re.escape(key)}[\"']", source)
    ]
    states = {"queued", "preparing", "running", "restarting", "stopping", "succeeded", "failed", "stopped"}
    assert set(unused) - states - {"viewer", "developer", "admin", "cpu", "gpu"} == set()
