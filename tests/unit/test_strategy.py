"""What `DistributedStrategy` accepts, and what it says about everything else."""

import copy

import pytest

from phalanx.errors import StrategyError, StrategyTypeError
from phalanx.plan.rules import dense_on_servers, push_from_strategy
from phalanx.plan.value import Push
from phalanx.strategy import NOT_YET, RENAMED, DistributedStrategy, check_strategy


def test_every_default_is_valid_and_copies_compare_equal():
    strategy = DistributedStrategy()
    assert copy.deepcopy(strategy) == strategy


@pytest.mark.parametrize(("wrong", "right"), [("grph", "graph"), ("fuse_grad_size_in_mb", "fuse_grad_size_in_MB")])
def test_a_misspelt_setting_gets_the_nearest_name(wrong, right):
    with pytest.raises(StrategyError, match=f"Did you mean '{right}'"):
        setattr(DistributedStrategy(), wrong, 1)


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_renamed_setting_names_its_successor(old):
    with pytest.raises(StrategyError, match="was renamed: use strategy"):
        setattr(DistributedStrategy(), old, True)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_a_setting_that_would_not_act_is_refused(name):
    with pytest.raises(StrategyError, match="not available in this version"):
        setattr(DistributedStrategy(), name, True)


def test_reading_an_unknown_setting_is_an_error_too():
    with pytest.raises(StrategyError, match="no setting 'unknown'"):
        _ = DistributedStrategy().unknown


def test_a_wrong_type_names_the_setting_and_what_was_found():
    with pytest.raises(StrategyTypeError, match=r"strategy\.graph.*found 'yes' \(str\)"):
        DistributedStrategy().graph = "yes"
    with pytest.raises(StrategyTypeError, match=r"found \['k_steps'\] \(list\). Write \{\"k_steps\": 100\}"):
        DistributedStrategy().a_sync_configs = ["k_steps"]
    with pytest.raises(StrategyError, match="greater than 0; found -1"):
        DistributedStrategy(fuse_grad_size_in_MB=-1)


@pytest.mark.parametrize("wrong", [{}, "collective", object()])
def test_a_strategy_of_another_type_is_a_type_error_that_names_it(wrong):
    with pytest.raises(TypeError, match=f"found builtins.{type(wrong).__name__}"):
        check_strategy(wrong)


def test_settings_that_cannot_act_say_so(caplog):
    strategy = DistributedStrategy()
    strategy.fuse_grad_size_in_TFLOPS = 50
    strategy.sync_nccl_allreduce = False
    assert "fuse_grad_size_in_TFLOPS does not act" in caplog.text
    assert "sync_nccl_allreduce=False does not act" in caplog.text


# --- parameter servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "servers", "push"),
    [
        ({}, 1, Push(mode="async")),
        ({}, 0, Push(mode="sync")),
        ({"a_sync": True}, 1, Push(mode="async")),
        ({"a_sync": False}, 1, Push(mode="sync")),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 0}}, 1, Push(mode="async")),
        ({"a_sync": True, "a_sync_configs": {"k_steps": -1}}, 1, Push(mode="async")),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 100}}, 1, Push(mode="geo", steps=100)),
        (
            {"a_sync_configs": {"k_steps": 2, "local_optimizer": True}},
            1,
            Push(mode="geo", steps=2, local_optimizer=True),
        ),
        ({"a_sync_configs": {"half_async": True, "max_merge_var_num": 5}}, 1, Push(mode="half_async", steps=5)),
        ({"a_sync_configs": {"staleness": 3}}, 2, Push(mode="bounded", steps=3)),
        ({"gradient_scale_configs": {"scale_strategy": "sum"}}, 1, Push(mode="async", reduce="sum")),
    ],
)
def test_a_sync_says_how_gradients_reach_the_servers(settings, servers, push):
    assert push_from_strategy(DistributedStrategy(**settings), servers) == push


def test_settings_one_by_one_as_scripts_write_them():
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 100}
    assert push_from_strategy(strategy, 1).mode == "geo"
    assert dense_on_servers(strategy, 1)
    strategy.a_sync_configs = {"dense": "all_reduce"}
    assert not dense_on_servers(strategy, 1)
    assert not dense_on_servers(DistributedStrategy(), 0)


def test_two_modes_at_once_are_refused_and_change_nothing():
    with pytest.raises(StrategyError, match=r"a_sync=False asks for synchronous training, and .* for k_steps=3"):
        DistributedStrategy(a_sync=False, a_sync_configs={"k_steps": 3})
    strategy = DistributedStrategy(a_sync_configs={"k_steps": 3})
    with pytest.raises(StrategyError, match="Set a_sync=True, or leave it out"):
        strategy.a_sync = False
    with pytest.raises(StrategyError, match=r"several modes: k_steps=3, staleness=2. Keep one"):
        strategy.a_sync_configs = {"k_steps": 3, "staleness": 2}
    assert (strategy.a_sync, strategy.a_sync_configs) == (None, {"k_steps": 3})


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"k_step": 3}, "a_sync_configs has no setting 'k_step'. Did you mean 'k_steps'"),
        ({"k_steps": "3"}, r"a_sync_configs\.k_steps: Input should be a valid integer; found '3'"),
        ({"k_steps": -2}, "greater than or equal to -1; found -2"),
        ({"dense": "servers"}, r"a_sync_configs\.dense: Input should be 'server' or 'all_reduce'"),
        (3, "strategy.a_sync_configs: Input should be a valid dictionary; found 3"),
    ],
)
def test_a_wrong_setting_of_the_servers_is_named(configs, message):
    with pytest.raises(StrategyError, match=message):
        DistributedStrategy().a_sync_configs = configs


def test_settings_of_the_servers_that_cannot_act_say_so(caplog):
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"send_queue_size": 16, "launch_barrier": True, "max_merge_var_num": 4}
    assert "a_sync_configs['send_queue_size'] does not act: queues to the servers are bounded by bytes" in caplog.text
    assert "a_sync_configs['launch_barrier'] does not act" in caplog.text
    assert "a_sync_configs['max_merge_var_num'] does not act: it needs half_async" in caplog.text
