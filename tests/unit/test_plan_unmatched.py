"""Rules of a Plan that match nothing of the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

import phalanx as px
from phalanx.errors import PlanError
from phalanx.parallel.session import applied_to
from phalanx.plan.files import load_plan
from phalanx.plan.rules.unmatched import check_rules
from phalanx.plan.value import Frozen, ModuleRule, ParamRule, Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight


PARAMS = {name: name for name in ("tokens.weight", "layers.0.weight", "layers.1.weight")} | {
    "head.weight": "tokens.weight"
}
MODULES = ("", "tokens", "layers", "layers.0", "layers.1", "head")


def with_rules(*, params: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> Plan:
    return Plan(
        params=(ParamRule(match="*"), *(ParamRule(match=name, update=Frozen()) for name in params)),
        modules=tuple(ModuleRule(match=name) for name in modules),
    )


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    px.shutdown()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (with_rules(modules=("haed",)), r"modules\[haed\], which matches no module .* Nearest in spelling: head, "),
        (with_rules(modules=("head", "layer.*")), r"modules\[layer\.\*\], .*spelling: layers"),
        (
            with_rules(params=("token.weight",)),
            r"params\[token\.weight\], .* no parameter .*spelling: tokens\.weight, ",
        ),
        (with_rules(params=("tokens",)), r"params\[tokens\], which matches no parameter"),
        (with_rules(params=("head.weight",)), r"params\[head\.weight\], .* its first name, tokens\.weight\. Say"),
        (with_rules(params=("head.*",)), r"params\[head\.\*\], which does nothing: .* tokens\.weight\. Say"),
    ],
)
@pytest.mark.usefixtures("_alone")
def test_a_rule_that_is_about_nothing_is_named_with_names_that_would_do(plan: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_rules(plan, params=PARAMS, modules=MODULES)
    with pytest.raises(PlanError, match=why):
        px.apply(plan, Net())


@pytest.mark.usefixtures("_alone")
def test_rules_for_all_for_the_model_and_for_shared_parameters_by_their_first_names_match() -> None:
    plan = with_rules(params=("tokens.weight", "*.weight", "layers.?.*"), modules=("", "*", "layers.[01]", "head"))
    check_rules(plan, params=PARAMS, modules=MODULES)
    px.apply(plan, Net())
    check_rules(with_rules(modules=("*",)), params={}, modules=("",))


@pytest.mark.usefixtures("_alone")
def test_a_strategy_of_two_models_may_name_units_of_one() -> None:
    generator = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    discriminator = nn.Linear(2, 1)
    strategy = px.DistributedStrategy(sharding=True, sharding_configs={"stage": 3, "units": ["blocks.*"]})
    px.distribute(generator, strategy=strategy)
    px.distribute(discriminator)
    made = applied_to(discriminator)
    assert made is not None
    assert [rule.match for rule in made.plan.modules] == ["blocks.*"]
    with pytest.raises(PlanError, match=r"modules\[blocks\.\*\], which matches no module"):
        px.distribute(nn.Linear(2, 1), plan=made.plan)


@pytest.mark.usefixtures("_alone")
def test_a_strategy_that_recomputes_no_module_is_told_which_setting_it_is() -> None:
    strategy = px.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["layer.*"]})
    with pytest.raises(PlanError, match=r"recompute names 'layer\.\*', .*Did you mean 'layers"):
        px.distribute(Net(), strategy=strategy)


def test_the_message_is_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(PlanError, match=r"modules\[haed\] 不匹配此模型的任何模块。拼写最接近的有：head"):
        check_rules(with_rules(modules=("haed",)), params=PARAMS, modules=MODULES)


def test_a_file_without_a_version_is_no_plan(tmp_path) -> None:
    for content in ("{}", '{"mesh": [{"name": "data", "size": 2}]}'):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(PlanError, match=r'does not hold a Plan: it has no version\. Write "version": 1'):
            load_plan(tmp_path / "plan.json")
