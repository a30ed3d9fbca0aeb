"""What `DistributedStrategy` accepts, and what it says about everything else."""

import copy
import itertools

import pytest

from phalanx.errors import StrategyError, StrategyTypeError
from phalanx.plan.server_rules import dense_on_servers, push_from_strategy
from phalanx.plan.value import Push
from phalanx.strategy import DistributedStrategy, check_strategy
from phalanx.strategy.conflicts import TECHNIQUES, verdict
from phalanx.strategy.menu import NOT_YET, RENAMED, WITHOUT_EFFECT


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
    with pytest.raises(StrategyTypeError, match=r"found \['k_steps'\] \(list\). Write \{\"k_steps\": \.\.\.\}"):
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


# --- techniques -----------------------------------------------------------------------------------------------------


def test_two_techniques_that_exclude_each_other_are_named_with_the_reason():
    strategy = DistributedStrategy(localsgd=True)
    with pytest.raises(StrategyError, match=r"strategy\.localsgd and strategy\.dgc cannot be on together: ranks that"):
        strategy.dgc = True
    assert not strategy.dgc
    with pytest.raises(StrategyError, match=r"lars and strategy\.lamb cannot be on together: both are the update rule"):
        DistributedStrategy(lars=True, lamb=True)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(TECHNIQUES, 2)))
def test_every_pair_has_a_verdict_that_a_strategy_keeps(first, second):
    found = verdict(first, second)
    assert verdict(second, first) == found
    assert bool(found.why) == (found.verdict != "supported")
    if found.verdict == "supported":
        assert DistributedStrategy(**{first: True, second: True}).techniques == {first, second}
    else:
        with pytest.raises(StrategyError, match="cannot be on together"):
            DistributedStrategy(**{first: True, second: True})


@pytest.mark.parametrize(
    ("setting", "configs", "message"),
    [
        ("recompute_configs", {"checkpoint": []}, "no setting 'checkpoint'. Did you mean 'checkpoints'"),
        ("amp_configs", {"init_loss_scaling": 0}, r"amp_configs\.init_loss_scaling: .*greater than 0; found 0"),
        ("dgc_configs", {"sparsity": [1.5]}, r"dgc_configs\.sparsity\.0: .*less than 1; found 1.5"),
        ("sharding_configs", {"stage": 4}, r"sharding_configs\.stage: Input should be 1, 2 or 3; found 4"),
        ("hybrid_configs", {"order": ["dp", "tp"]}, r"hybrid_configs\.order\.1: .*found 'tp'"),
        ("lars_configs", {"zzz": 1}, r"lars_configs has no setting 'zzz'. It knows: \['lars_coeff'"),
    ],
)
def test_a_wrong_key_or_value_of_a_dictionary_is_named(setting, configs, message):
    with pytest.raises(StrategyError, match=message):
        setattr(DistributedStrategy(), setting, configs)


def test_keys_that_do_not_act_say_why(caplog):
    strategy = DistributedStrategy()
    strategy.sharding_configs = {"stage": 2, "segment_broadcast_MB": 32}
    assert "sharding_configs['segment_broadcast_MB'] does not act: units say what is gathered together" in caplog.text
    assert "'stage'" not in caplog.text


def test_dictionaries_without_their_switch_are_known():
    strategy = DistributedStrategy(recompute_configs={"checkpoints": ["a"]}, lars=True, lars_configs={"epsilon": 0.1})
    assert strategy.idle() == ["recompute_configs"]


def test_every_key_that_does_not_act_exists():
    for dictionary, reasons in WITHOUT_EFFECT.items():
        assert set(reasons) <= set(DistributedStrategy.model_fields[dictionary].annotation.__annotations__)
