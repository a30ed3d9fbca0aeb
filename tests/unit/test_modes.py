"""The modes and `set_auto_parallel_context`: what they make of a strategy, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import phalanx as px
from phalanx.cluster.role.role import Role
from phalanx.errors import ConfigError
from phalanx.parallel.tensor.shard_api import has_shard_requests
from phalanx.train.model.auto_context import INSTEAD
from phalanx.train.model.mode_rules import check_ranks, read_mode, require_cuts, strategy_in

TWO = Role(rank=1, world_size=2, launcher="phalanx")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"paramater_broadcast": True}, "no setting 'paramater_broadcast'. Did you mean 'parameter_broadcast'"),
        ({"parallel_mode": "data_paralel"}, "found 'data_paralel'. Did you mean 'DATA_PARALLEL'"),
        ({"mirror_mean": "yes"}, r"mirror_mean=...\) takes a bool, found 'yes'"),
        ({"mirror_mean": True, "gradients_mean": False}, "gradients_mean was set twice, to True and False"),
        ({"device_num": 0}, "device_num counts ranks, found 0"),
        ({"global_rank": -1}, "global_rank counts from 0, found -1"),
        ({"search_mode": "recursive"}, "search_mode is one of .* Did you mean 'recursive_programming'"),
        ({"pipeline_stages": 2}, r'Write instead: strategy.hybrid_configs = \{"pp_degree": 2\}'),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        px.set_auto_parallel_context(**settings)


@pytest.mark.parametrize("name", INSTEAD)
def test_a_setting_that_is_not_taken_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* Write instead"):
        px.set_auto_parallel_context(**{name: 1})


def test_settings_are_read_back_under_both_their_names() -> None:
    px.set_auto_parallel_context(parallel_mode="DATA_PARALLEL", mirror_mean=False, parameter_broadcast=True)
    assert px.get_auto_parallel_context("parallel_mode") is px.ParallelMode.DATA_PARALLEL
    assert px.get_auto_parallel_context("gradients_mean") is px.get_auto_parallel_context("mirror_mean") is False
    assert px.get_auto_parallel_context("device_num") is None
    px.reset_auto_parallel_context()
    assert px.get_auto_parallel_context("parallel_mode") is None


def test_after_a_model_was_made_it_is_an_error_until_reset() -> None:
    px.Model(net())
    with pytest.raises(ConfigError, match="was called after a Model was made"):
        px.set_auto_parallel_context(mirror_mean=True)
    px.reset_auto_parallel_context()
    px.set_auto_parallel_context(mirror_mean=True)


def test_the_mode_is_said_once() -> None:
    assert read_mode(None) is None
    assert read_mode("stand_alone") is px.ParallelMode.STAND_ALONE
    px.set_auto_parallel_context(parallel_mode=px.ParallelMode.DATA_PARALLEL)
    assert read_mode(None) is read_mode("DATA_PARALLEL") is px.ParallelMode.DATA_PARALLEL
    with pytest.raises(ConfigError, match="asked for STAND_ALONE, set_auto_parallel_context for DATA_PARALLEL"):
        read_mode(px.ParallelMode.STAND_ALONE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_num": 8}, r"says device_num=8, and this is rank 1 of 2 \(launcher: phalanx\)"),
        ({"global_rank": 0}, "says global_rank=0, and this is rank 1 of 2"),
    ],
)
def test_numbers_that_disagree_with_the_launcher_name_both(settings: dict[str, Any], message: str) -> None:
    px.set_auto_parallel_context(**settings)
    with pytest.raises(ConfigError, match=message):
        check_ranks(None, TWO)


def test_numbers_that_agree_with_the_launcher_are_taken() -> None:
    px.set_auto_parallel_context(device_num=2, global_rank=1)
    check_ranks(px.ParallelMode.DATA_PARALLEL, TWO)


def test_stand_alone_is_for_one_process() -> None:
    check_ranks(px.ParallelMode.STAND_ALONE, Role())
    with pytest.raises(ConfigError, match="STAND_ALONE is for one process, and 2 ranks were launched"):
        check_ranks(px.ParallelMode.STAND_ALONE, TWO)


def test_data_parallel_sets_cuts_aside() -> None:
    model = px.shard(net(), {"0": "column", "2": "row"})
    asked = px.DistributedStrategy(hybrid_configs={"mp_degree": 2, "dp_degree": 1}, pipeline=True)
    chosen = strategy_in(px.ParallelMode.DATA_PARALLEL, asked, model)
    assert chosen.techniques == set()
    assert chosen.hybrid_configs == {"dp_degree": 1}
    assert not has_shard_requests(model)
    assert asked.techniques == {"tensor_parallel", "pipeline"}


def test_hybrid_parallel_lets_cuts_act_and_wants_some() -> None:
    model, strategy = px.shard(net(), {"0": "column"}), px.DistributedStrategy()
    assert strategy_in(px.ParallelMode.HYBRID_PARALLEL, strategy, model) == strategy
    assert has_shard_requests(model)
    require_cuts(px.ParallelMode.HYBRID_PARALLEL, strategy, model, 2)
    require_cuts(px.ParallelMode.SEMI_AUTO_PARALLEL, strategy, net(), 1)
    with pytest.raises(ConfigError, match="SEMI_AUTO_PARALLEL has nothing to shard"):
        require_cuts(px.ParallelMode.SEMI_AUTO_PARALLEL, strategy, net(), 2)


def test_the_context_becomes_settings_of_the_strategy() -> None:
    px.set_auto_parallel_context(mirror_mean=False, parameter_broadcast=False, enable_parallel_optimizer=True)
    chosen = strategy_in(None, None, net())
    assert chosen.gradient_scale == "sum"
    assert chosen.parameter_broadcast is False
    assert chosen.sharding is True


def test_a_strategy_that_says_something_else_is_an_error() -> None:
    px.set_auto_parallel_context(mirror_mean=False)
    with pytest.raises(ConfigError, match=r"asks for strategy.gradient_scale_configs = .*'sum'.*says .*'avg'"):
        strategy_in(None, px.DistributedStrategy(gradient_scale_configs={"scale_strategy": "avg"}), net())
