"""How two Plans differ."""

from __future__ import annotations

from phalanx.plan import ModelShape, ParamShape, Plan, diff, plan_from_strategy
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.strategy import DistributedStrategy

SHAPE = ModelShape(
    tuple(
        ParamShape(name=f"{layer}.{kind}", shape=shape, dtype="float32", item_bytes=4)
        for layer in ("a", "b")
        for kind, shape in (("weight", (8, 8)), ("bias", (8,)))
    )
)


def plan(**settings: object) -> Plan:
    return plan_from_strategy(DistributedStrategy(**settings), SHAPE, 4)  # type: ignore[arg-type]


def test_equal_plans_do_not_differ_whatever_their_reasons():
    assert diff(plan(), plan().model_copy(update={"because": ()})) == ()


def test_each_change_is_named_once():
    said = [str(change) for change in diff(plan(), plan(sharding=True, sharding_configs={"stage": 2}))]
    assert said == [
        "mesh[data]: {size: 4} -> default",
        "mesh[shard]: default -> {size: 4}",
        "step.batch_axes: data -> shard",
        "params[*]: default -> {update: {kind: reduce_scatter, zero: 2, along: shard}}",
        "modules[a]: default -> {unit: True}",
        "modules[b]: default -> {unit: True}",
    ]


def test_a_cut_layer_is_named_by_its_rules_and_back_is_the_reverse():
    cut = with_cut_layers(plan(), [Styled(module="b", style="column", weight="b.weight", bias="b.bias")], "data")
    changes = diff(plan(), cut)
    assert {"params[b.weight]", "params[b.bias]", "modules[b]"} <= {change.where for change in changes}
    back = {change.where: change for change in diff(cut, plan())}
    assert all((back[c.where].after, back[c.where].before) == (c.before, c.after) for c in changes)


def test_the_order_of_rules_counts_as_the_last_wins():
    first = with_cut_layers(plan(), [Styled(module="b", style="column", weight="b.weight")], "data")
    turned = first.model_copy(update={"params": first.params[::-1]})
    assert turned.rule_for("b.weight") != first.rule_for("b.weight")
    assert [str(change) for change in diff(first, turned)] == ["params in order: [*], [b.weight] -> [b.weight], [*]"]
