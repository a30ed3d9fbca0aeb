"""What the console says of a job's resources, in both languages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from phalanx.jobs.models import Job, JobState
from phalanx.ui.formatting import needs
from phalanx.ui.i18n import speaker


def _job(spec: dict[str, Any]) -> Job:
    return Job("a-1", "default", "a", "ann", JobState.QUEUED, "", "local", 5, spec, datetime.now(UTC))


@pytest.mark.parametrize(
    ("spec", "english", "chinese"),
    [
        ({}, "1 rank", "1 个进程"),
        (
            {"resources": {"procs_per_node": 4, "least_procs_per_node": 1, "cpu": 0.5}},
            "1:4 ranks, 0.5 CPU cores",
            "1:4 个进程，0.5 个 CPU 核",
        ),
        ({"resources": {"nodes": 3, "least_nodes": 1}}, "1:3 nodes, each: 1 rank", "1:3 个节点，每个：1 个进程"),
        (
            {"resources": {"nodes": 2, "procs_per_node": 8, "cpu": 1, "memory": 8 << 30, "gpu": 8}},
            "2 nodes, each: 8 ranks, 1 CPU core, 8.0 GiB, 8 GPUs",
            "2 个节点，每个：8 个进程，1 个 CPU 核，8.0 GiB，8 个 GPU",
        ),
        (
            {"resources": {"procs_per_node": 2, "gpu": 1}, "servers": {"count": 3}},
            "2 ranks, 1 GPU; parameter servers: 3",
            "2 个进程，1 个 GPU；参数服务器：3 个",
        ),
    ],
)
def test_resources_are_told_in_words(spec: dict[str, Any], english: str, chinese: str) -> None:
    assert needs(speaker("en"))(_job(spec)) == english
    assert needs(speaker("zh"))(_job(spec)) == chinese
