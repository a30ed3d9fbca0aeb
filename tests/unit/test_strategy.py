"""What `DistributedStrategy` accepts, and what it says about everything else."""

import copy
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as rules
from hypothesis import strategies as st

from phalanx.errors import StrategyError, StrategyTypeError
from phalanx.plan.rules.servers import dense_on_servers, push_from_strategy
from phalanx.plan.value import Push
from phalanx.strategy import DistributedStrategy, check_strategy
from phalanx.strategy.menu import NOT_YET, RENAMED
from phalanx.strategy.page import fill_page
from phalanx.strategy.settings import configs_of
from phalanx.strategy.techniques import TECHNIQUES, conflict_table, verdict


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


@pytest.mark.parametrize(
    ("name", "instead"), [("auto", "px.auto_parallel"), ("auto_search", "plan=plan"), ("semi_auto", "px.shard")]
)
def test_what_a_planner_decides_is_a_call(name: str, instead: str) -> None:
    with pytest.raises(StrategyError, match=rf"strategy.{name} is no setting: .*{instead}"):
        setattr(DistributedStrategy(), name, True)


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
    assert "fuse_grad_size_in_TFLOPS has no effect" in caplog.text
    assert "sync_nccl_allreduce=False has no effect" in caplog.text


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
        ({"a_sync_configs": {"wire_dtype": "bfloat16"}}, 1, Push(mode="async", wire_dtype="bfloat16")),
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
    assert "a_sync_configs['send_queue_size'] has no effect: queues to the servers are bounded by bytes" in caplog.text
    assert "a_sync_configs['launch_barrier'] has no effect" in caplog.text
    assert "a_sync_configs['max_merge_var_num'] has no effect: it needs half_async" in caplog.text


# --- techniques -----------------------------------------------------------------------------------------------------


def test_two_techniques_that_exclude_each_other_are_named_with_the_reason():
    strategy = DistributedStrategy(localsgd=True)
    with pytest.raises(StrategyError, match=r"strategy\.localsgd and strategy\.dgc cannot be on together: ranks that"):
        strategy.dgc = True
    assert not strategy.dgc
    with pytest.raises(
        StrategyError, match=r"lars and strategy\.lamb cannot be on together: each of them replaces the update rule"
    ):
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
    assert "sharding_configs['segment_broadcast_MB'] has no effect: units say what is gathered together" in caplog.text
    assert "'stage'" not in caplog.text


def test_dictionaries_without_their_switch_are_known():
    strategy = DistributedStrategy(recompute_configs={"checkpoints": ["a"]}, lars=True, lars_configs={"epsilon": 0.1})
    (said,) = strategy.idle()
    assert said.startswith("strategy.recompute_configs has no effect: recompute is off. Set strategy.recompute = True")
    assert DistributedStrategy(hybrid_configs={"pp_degree": 2}, pipeline_configs={"accumulate_steps": 2}).idle() == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hierarchical_allreduce_inter_nranks": 2}, "use_hierarchical_allreduce is off"),
        ({"gradient_merge": True}, "gradient_merge has no effect: it merges 1 batch"),
        ({"base_batch": 32}, "base_batch has no effect: the learning rate is not scaled"),
        ({"amp": True, "amp_configs": {"incr_ratio": 3.0}}, r"amp_configs\['incr_ratio'\] has no effect: bfloat16"),
        ({"dgc": True, "fuse_grad_size_in_MB": 3}, "fuse_grad_size_in_MB has no effect: with dgc, gradients are not"),
    ],
)
def test_settings_that_need_others_say_so(settings, sentence):
    (said,) = DistributedStrategy(**settings).idle()
    assert re.search(sentence, said)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"amp_configs": {"use_pure_fp16": True, "use_pure_bf16": True}}, "use_pure_fp16 and use_pure_bf16. Keep one"),
        ({"amp_configs": {"use_pure_fp16": True, "dtype": "bfloat16"}}, 'use_pure_fp16 and dtype="bfloat16"'),
        (
            {"amp": True, "amp_configs": {"use_pure_bf16": True}, "sharding": True},
            "strategy.amp with use_pure_bf16 and strategy.sharding cannot be on together",
        ),
    ],
)
def test_precisions_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(StrategyError, match=message):
        DistributedStrategy(**settings)


# --- files and tables -----------------------------------------------------------------------------------------------

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "graph": st.booleans(),
        "fuse_grad_size_in_MB": st.floats(0.001, 1e6),
        "base_batch": st.none() | st.integers(1, 1 << 20),
        "scale_lr": st.sampled_from(["none", "linear", "sqrt"]),
        "gradient_scale_configs": st.sampled_from([{}, {"scale_strategy": "sum"}]),
        "recompute_configs": st.fixed_dictionaries(
            {
                "checkpoints": st.lists(
                    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=5)
                )
            }
        ),
        "dgc_configs": st.fixed_dictionaries(
            {"sparsity": st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3)}
        ),
        "hybrid_configs": st.just({"mp_degree": 2, "order": ["mp", "dp"]}),
        "sharding": st.booleans(),
    },
)


@rules(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=60)
@given(said=SETTINGS, suffix=st.sampled_from([".yaml", ".yml", ".toml"]))
def test_what_was_set_comes_back_from_a_file(tmp_path, said, suffix):
    strategy = DistributedStrategy(**said)
    strategy.save(tmp_path / f"strategy{suffix}")
    loaded = DistributedStrategy.load(tmp_path / f"strategy{suffix}")
    assert loaded == strategy
    assert (
        loaded.explicit_settings()
        == strategy.explicit_settings()
        == {name: v for name, v in strategy.explicit_settings().items() if name in said}
    )


def test_a_file_says_only_what_was_set(tmp_path):
    strategy = DistributedStrategy(amp=True, lars_configs={"epsilon": 0.5})
    strategy.save(tmp_path / "a.yaml")
    assert (tmp_path / "a.yaml").read_text() == "amp: true\nlars_configs:\n  epsilon: 0.5\n"
    strategy.save(tmp_path / "a.toml")
    assert (tmp_path / "a.toml").read_text() == "amp = true\n\n[lars_configs]\nepsilon = 0.5\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "ampp: true", r"a\.yaml: DistributedStrategy has no setting 'ampp'. Did you mean 'amp'"),
        (
            "a.yaml",
            "amp_configs: {dtyp: float16}",
            r"a\.yaml: strategy.amp_configs has no setting 'dtyp'. Did you mean",
        ),
        ("a.toml", "[amp_configs]\ndtype = 3", r"a\.toml: strategy.amp_configs.dtype: Input should be 'bfloat16'"),
        ("a.yml", "- amp", r"a\.yml holds a list, not settings by name"),
        ("a.yaml", "amp: [", r"a\.yaml is not YAML"),
        ("a.toml", "amp", r"a\.toml is not TOML"),
        ("a.yaml", "!!python/object/apply:os.getpid []", r"a\.yaml is not YAML"),
        ("a.json", "{}", r"strategy files end in .yaml, .yml, .toml; found 'a.json'"),
        ("missing.yaml", None, "cannot read the strategy file .*missing.yaml"),
    ],
)
def test_a_file_that_is_no_strategy_is_named_with_the_setting(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(StrategyError, match=message):
        DistributedStrategy.load(tmp_path / name)


def test_a_strategy_prints_what_is_on_and_what_was_set():
    strategy = DistributedStrategy(recompute=True, sync_buffers=False, hybrid_configs={"pp_degree": 2})
    strategy.recompute_configs = {"checkpoints": ["a", "b"]}
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in str(strategy).splitlines() if "│" in line]
    assert lines == [
        ["recompute", "checkpoints=['a', 'b']"],
        ["pipeline", ""],
        ["sync_buffers", "False"],
        ["hybrid_configs", "pp_degree=2"],
    ]
    assert str(DistributedStrategy()) == "Strategy: defaults, data parallel over all ranks"


@pytest.mark.parametrize("name", [name for name in DistributedStrategy.model_fields if configs_of(name)])
def test_every_key_of_a_dictionary_has_a_meaning_or_a_reason_why_it_does_not_act(name):
    kind = configs_of(name)
    assert kind().model_dump() == DistributedStrategy().config(kind).model_dump()
    for key, field in kind.model_fields.items():
        assert (key in kind.keys_without_effect()) == (field.description is None)


@pytest.mark.parametrize("name", [name for name in DistributedStrategy.model_fields if configs_of(name)])
def test_a_default_is_a_value_that_the_key_takes_and_none_is_not(name):
    for key, field in configs_of(name).model_fields.items():
        if field.default is None:
            with pytest.raises(StrategyError, match=rf"{name}\.{key}: Input should be"):
                DistributedStrategy(**{name: {key: None}})
        else:
            assert getattr(DistributedStrategy(**{name: {key: field.default}}), name) == {key: field.default}


def test_the_page_is_made_from_the_code():
    page = (Path(__file__).parents[2] / "docs" / "strategy.md").read_text()
    assert page == fill_page(page), "run: make docs"
    assert conflict_table() in page
    for name in DistributedStrategy.model_fields:
        assert f"| `{name}` |" in page
        for key in getattr(configs_of(name), "model_fields", ()):
            assert f"| `{key}` |" in page


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fuse_grad_size_in_MB": float("inf")}, "fuse_grad_size_in_MB: Input should be a finite number; found inf"),
        ({"clip_configs": {"norm": float("nan")}}, "clip_configs.norm: Input should be a finite number; found nan"),
        ({"clip_configs": {"norm": True}}, r"clip_configs.norm: Input should be a number; found True \(bool\)"),
        ({"amp_configs": {"incr_ratio": 0.5}}, "incr_ratio: Input should be greater than or equal to 1; found 0.5"),
        ({"amp_configs": {"decr_ratio": 2.0}}, "decr_ratio: Input should be less than or equal to 1; found 2.0"),
        ({"self": 1}, "DistributedStrategy has no setting 'self'"),
    ],
)
def test_numbers_that_nothing_can_be_done_with_are_refused(settings, why):
    with pytest.raises(StrategyError, match=why):
        DistributedStrategy(**settings)


def test_what_was_put_into_a_dictionary_later_is_checked_before_it_is_used():
    strategy = DistributedStrategy(amp=True)
    strategy.amp_configs["dtype"] = "float16"
    assert check_strategy(strategy).explicit_settings() == {"amp": True, "amp_configs": {"dtype": "float16"}}
    strategy.amp_configs["dtypo"] = "float16"
    with pytest.raises(StrategyError, match=r"strategy.amp_configs has no setting 'dtypo'\. Did you mean 'dtype'"):
        check_strategy(strategy)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "false", "holds a bool, not settings by name"),
        ("a.yaml", "[" * 5000, "is not YAML"),
        ("a.toml", "a=" + "[" * 5000, "is not TOML"),
    ],
)
def test_files_that_are_no_settings_are_errors(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    with pytest.raises(StrategyError, match=why):
        DistributedStrategy.load(tmp_path / name)
    with pytest.raises(StrategyError, match=r"cannot write the strategy file .*No such file"):
        DistributedStrategy(amp=True).save(tmp_path / "none" / name)
