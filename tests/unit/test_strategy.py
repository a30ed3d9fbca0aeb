"""What `DistributedStrategy` accepts, and what it says about everything else."""

import copy

import pytest

from phalanx.errors import StrategyError, StrategyTypeError
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
