"""Words of the console: Chinese of what the queue says, and no key that no page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx import ui
from phalanx.jobs.scheduling.queue import Amount, RunningJob, WaitingJob, choose
from phalanx.jobs.scheduling.quotas import Quota
from phalanx.ui.i18n import TABLE
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


def test_every_word_of_the_console_is_shown_somewhere() -> None:
    folder = Path(ui.__file__).parent
    files = (*folder.rglob("*.html"), *folder.rglob("*.py"), *(folder.parent / "cli").glob("*.py"))
    texts = [path.read_text() for path in files if path.name != "i18n.py"]
    source = "".join(texts)
    computed = ("cause ", "event ", "source ")  # and those named by states, roles, tabs and pages
    unused = [
        key for key in TABLE if not key.startswith(computed) and not re.search(f"[\"']{re.escape(key)}[\"']", source)
    ]
    states = {"queued", "preparing", "running", "restarting", "stopping", "succeeded", "failed", "stopped"}
    assert set(unused) - states - {"viewer", "developer", "admin", "cpu", "gpu"} == set()
