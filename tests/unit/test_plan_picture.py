"""A Plan's picture, and the files a run leaves for who watches it."""

import xml.etree.ElementTree as ET

from phalanx.plan.files import read_run_plan, write_run_plan
from phalanx.plan.report.explain import explain
from phalanx.plan.report.picture import picture
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.strategy import DistributedStrategy


def _shape() -> ModelShape:
    sizes = {"fc.weight": (512, 256), "fc.bias": (512,)}
    return ModelShape(tuple(ParamShape(name=n, shape=s, dtype="float32", item_bytes=4) for n, s in sizes.items()))


def test_what_a_run_leaves_is_read_back_and_drawn(tmp_path):
    assert read_run_plan(tmp_path) is None
    shape = _shape()
    plan = plan_from_strategy(DistributedStrategy(), shape, 2)
    write_run_plan(plan, shape, tmp_path)
    assert read_run_plan(tmp_path) == (plan, shape)
    drawn = picture(explain(plan, shape))
    words = "".join(ET.fromstring(drawn).itertext())
    assert "Plan over" in words
    assert "replicated" in words
    assert "a rank holds 0.502 MiB" in words


def test_names_of_a_model_are_no_markup(tmp_path):
    shape = ModelShape((ParamShape(name="<b>&", shape=(2,), dtype="float32", item_bytes=4),))
    ET.fromstring(picture(explain(plan_from_strategy(DistributedStrategy(), shape, 2), shape)))
