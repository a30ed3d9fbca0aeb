"""Candidates of the planner event by event: as long and as full as the planner says, and with layers to look at."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.auto.planner.result import Planned
from phalanx.auto.simulate.picture import picture_of
from phalanx.auto.simulate.trace import trace_of


class Deep(nn.Sequential):
    """Eight equal blocks, so that stages can be equal too."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 128)) for _ in range(8)))


def planned(cluster: str, *limits: str, top_k: int = 3) -> Planned:
    sample = torch.zeros(256, 128), torch.zeros(256, dtype=torch.long)
    return px.auto_parallel(Deep(), sample, F.cross_entropy, cluster=cluster, limits=limits, top_k=top_k)


@pytest.mark.parametrize(
    ("cluster", "limits", "apart"),
    [
        ("a100x4", ("pp=1",), 1e-9),
        ("cpux4", ("pp=1",), 1e-9),
        ("cpux4", ("pp=1", "zero=3"), 0.01),  # gradients travel beside the gather of their own layer, not after it
        ("a100x4", ("tp=2", "pp=1"), 0.01),
        ("cpux4", ("dp=1", "tp=1", "vpp=1"), 0.05),  # on the way to the last stage each send counts once, not twice
        ("cpux4", ("pp=2", "vpp=1"), 0.05),
    ],
)
def test_a_plan_takes_as_long_event_by_event_as_the_planner_says(
    cluster: str, limits: tuple[str, ...], apart: float
) -> None:
    answer = planned(cluster, *limits)
    for place, candidate in enumerate(answer.searched.candidates):
        step = answer.simulate(place).simulation
        assert step.step_time_s == pytest.approx(candidate.seconds, rel=apart), candidate.arrangement
        assert max(step.peaks) == pytest.approx(candidate.peak, rel=1e-9), candidate.arrangement


def test_interleaved_stages_are_never_faster_than_the_work_of_a_rank() -> None:
    answer = planned("cpux2", "pp=2", "vpp=2")
    for place, candidate in enumerate(answer.searched.candidates):
        step = answer.simulate(place).simulation
        assert max(one.busy for one in step.ranks) <= step.step_time_s
        assert step.step_time_s == pytest.approx(candidate.seconds, rel=0.02)  # sends aside: stages are even
        assert max(step.peaks) <= candidate.peak * (1 + 1e-9)


def test_a_trace_names_the_layers_and_follows_their_memory() -> None:
    answer = planned("cpux2", "tp=2")
    trace = trace_of(answer.simulate())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"forward 0.0", "backward 7.2", "optimizer"} <= {event["name"] for event in spans}
    assert any(event["cat"] == "collectives" for event in spans)
    held = [event["args"]["GiB"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(set(held)) > 6
    assert trace["otherData"]["rows_per_s"] == pytest.approx(256 / answer.seconds)
    assert trace["otherData"]["ranks_that_do_the_same"] == 2
    json.dumps(trace)


@pytest.mark.parametrize(("limit", "words"), [("pp=1", "each rank"), ("pp=2", "stage 1")])
def test_a_picture_shows_layers_or_stages(limit: str, words: str) -> None:
    said = [one.text for one in ET.fromstring(picture_of(planned("a100x2", limit).simulate())).iter()]
    assert words in said
    assert any("rows/s" in one for one in said if one)
