"""What holds of any predicted run, whatever its figures: more work or less of a machine is never faster."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.prediction import Prediction, predict
from phalanx.auto.predict.rank_groups import expert_ranks, expert_replicas, list_block_parameters, replicas
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.transformer import _ordering_bytes, shard_copy_bytes
from phalanx.auto.simulate.run import simulate_run
from phalanx.cli.group import phalanx
from predicted_runs import DENSE, EXPERTS, alter, describe, footprint, seconds, states, step

# -- experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "ep"), [(1, 8), (1, 64), (2, 8), (2, 64), (8, 8), (8, 64)])
def test_ranks_together_hold_all_experts_and_their_states(zero: int, tp: int, ep: int) -> None:
    model = {"experts": 64, "top_k": 2, "moe_ffn": 2048}
    run = describe(nodes=8, model=model, parallel={"tp": tp, "dp": 64 // tp, "ep": ep, "zero": zero})
    assert states(run) >= 0.98 * 14 * read_run(run).model.parameters
    assert step(run).optimizer * 64 >= 0.98 * step(run).kernels.streamed(
        DEFAULT.optimizer_bytes * read_run(run).model.parameters
    )


def test_experts_that_fill_the_ranks_have_no_gradients_to_exchange() -> None:
    run = describe(nodes=8, model=EXPERTS, parallel={"dp": 64, "ep": 8})
    alone = alter(run, model={"experts": 64}, parallel={"ep": 64})
    assert expert_replicas(read_run(run)).ranks == 8
    assert expert_replicas(read_run(alone)).ranks == 1
    dense, experts = list_block_parameters(read_run(alone))
    assert step(alone).exchanges.reduce_of(experts) == 0 < step(alone).exchanges.reduce_of(dense)


def test_experts_lie_beyond_the_ranks_that_share_one() -> None:
    run = read_run(describe(nodes=8, model=EXPERTS, parallel={"tp": 8, "dp": 8, "ep": 8}))
    layout = expert_ranks(run)
    assert (layout.ranks, layout.in_node, layout.sharing) == (8, 1, 8), "a rank of each node"
    beside = read_run(describe(nodes=8, model=EXPERTS, parallel={"dp": 64, "ep": 8}))
    assert expert_ranks(beside).in_node == 8
    slow, fast = (
        step(describe(8, 8, gbps, model=EXPERTS, parallel={"tp": 8, "dp": 8, "ep": 8})).exchanges.experts_forward
        for gbps in (400, 3200)
    )
    assert slow > 4 * fast


def test_no_node_holds_more_ranks_of_groups_than_it_has() -> None:
    for tp, cp, ep in itertools.product((1, 2, 8, 16), (1, 2), (1, 4, 16, 64)):
        model = {"experts": 64, "top_k": 2, "heads": 32, "kv_heads": 32}
        parallel = {"tp": tp, "cp": cp, "dp": 128 // tp // cp, "ep": ep}
        run = read_run(describe(nodes=16, model=model, parallel=parallel, batch={"global": 128}))
        for layout in (replicas(run), expert_ranks(run), expert_replicas(run)):
            assert layout.in_node * layout.sharing <= 8
        assert run.expert_tp * ep * expert_replicas(run).ranks == 128


@pytest.mark.parametrize("ep", [1, 8])
def test_experts_take_and_keep_more_than_a_dense_layer_of_the_same_flop(ep: int) -> None:
    run = describe(nodes=2, model=EXPERTS, parallel={"dp": 16, "ep": ep}, batch={"global": 16})
    dense = alter(run, model={"experts": 0, "top_k": 0, "ffn": 2 * DENSE["ffn"]}, parallel={"ep": 1})
    assert step(run).compute_forward > step(dense).compute_forward
    assert footprint(run).activations > footprint(dense).activations


def test_experts_of_one_shape_share_what_autograd_gets() -> None:
    few, many = (describe(parallel={"dp": 8}, model={"experts": count, "top_k": 1}) for count in (2, 16))
    assert footprint(few).gathered == footprint(many).gathered


@pytest.mark.parametrize("model", [{}, {**EXPERTS, "top_k": 4}])
@pytest.mark.parametrize("ep", [1, 8])
def test_only_sums_of_dense_layers_run_beside_the_gradients_of_their_weights(model: dict[str, Any], ep: int) -> None:
    """Whole ones do where ranks have all tokens; of parts, scatters do, and inputs are gathered once more."""
    ep = ep if model else 1
    run = describe(nodes=8, model=model, parallel={"tp": 2, "dp": 32, "ep": ep})
    whole, parts = (step(alter(run, parallel={"sequence_parallel": on})).exchanges for on in (False, True))
    contention = DEFAULT.contention
    forward, backward = whole.tensor_parallel_forward, whole.tensor_parallel_backward
    assert backward == pytest.approx(forward - (1 - contention) * whole.dense_sum)
    forward, backward = parts.tensor_parallel_forward, parts.tensor_parallel_backward
    assert backward == pytest.approx(forward + (contention - 0.5) * parts.dense_sum)
    older = step(alter(run, stack="megatron-2021")).exchanges
    assert older.tensor_parallel_backward == older.tensor_parallel_forward


@pytest.mark.parametrize(
    ("stack", "recompute", "sequence_parallel", "share"),
    [
        ("megatron-2021", "full", False, 1),
        ("pytorch", "none", True, 0),
        ("pytorch", "full", True, 0.75),
        ("pytorch", "full", False, 0.5),
        ("pytorch", "selective", True, 0.5),
        ("pytorch", "selective", False, 0.5),
    ],
)
def test_recomputation_repeats_sums_up_to_where_it_stops(
    stack: str, recompute: str, sequence_parallel: bool, share: float
) -> None:
    parallel = {"tp": 8, "sequence_parallel": sequence_parallel}
    exchanges = step(describe(parallel=parallel, stack=stack, recompute=recompute)).exchanges
    assert exchanges.tensor_parallel_backward == pytest.approx((1 + share) * exchanges.tensor_parallel_forward)


def test_copies_of_tokens_are_sent_to_the_experts_once() -> None:
    """Without sequence parallel all tensor-parallel ranks have a token, and each expert is on fewer of them."""
    run = describe(nodes=8, model={**EXPERTS, "experts": 64}, parallel={"tp": 8, "dp": 8, "ep": 64})
    copies, parts = (step(alter(run, parallel={"sequence_parallel": on})) for on in (False, True))
    assert copies.run.expert_tp == 1
    assert copies.exchanges.experts_forward == parts.exchanges.experts_forward > 0


def test_tokens_of_experts_travel_beside_nothing_in_a_backward_pass_too() -> None:
    exchanges = step(describe(nodes=8, model=EXPERTS, parallel={"dp": 64, "ep": 8})).exchanges
    assert exchanges.experts_backward == exchanges.experts_forward > 0


# -- shards --------------------------------------------------------------------------------------------------


def test_copies_of_shards_add_up_their_gradients() -> None:
    whole, half, none = (
        step(describe(nodes=2, parallel={"dp": 16, "zero": 3, "hsdp": copies})).exchanges for copies in (1, 2, 16)
    )
    assert half.gather < whole.gather, "inside a node"
    assert half.scatter > half.gather * 2, "and then between nodes"
    assert none.gather == 0 < none.scatter


def test_shards_of_the_vocabulary_are_gathered_too() -> None:
    small, large = (step(describe(model={"vocab": vocab}, parallel={"dp": 8, "zero": 3})) for vocab in (32000, 256000))
    assert large.first_gathers > 1.5 * small.first_gathers
    assert large.last_scatters > 1.5 * small.last_scatters


def test_a_vocabulary_of_its_own_for_the_projection_is_updated_and_sent_too() -> None:
    tied, untied = (predict(describe(model={"tied": tied}, parallel={"dp": 8})).breakdown for tied in (True, False))
    assert untied["optimizer_s"] > tied["optimizer_s"]
    assert untied["gradients_s"] > tied["gradients_s"]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"layers": 4, "vocab": 256000}},
        {"model": {"layers": 4, "vocab": 256000}, "software": "low-precision"},
    ],
)
def test_sharding_more_sends_no_less(count: int, changes: dict[str, Any]) -> None:
    def sent(zero: int) -> float:
        run = describe(nodes=2, parallel={"dp": 16, "zero": zero}, overlap={"dp": False}, batch={"global": 16 * count})
        parts = predict(alter(run, **changes), interval=False).breakdown
        return parts["gradients_s"] + parts["exposed_communication_s"]

    # Of gradients in 16 bit, scatters and gathers send two thirds of what replicas send: float32 there.
    least = 0.65 if "software" in changes else 1 / 1.05
    assert sent(2) > least * sent(1)
    assert sent(3) > sent(2) / 1.05


@pytest.mark.parametrize("zero", [2, 3])
def test_shards_are_gathered_and_scattered_as_often_as_passes_need_them(zero: int) -> None:
    run = describe(nodes=2, parallel={"dp": 16, "zero": zero}, overlap={"dp": False}, batch={"global": 16 * 3})
    passes, parts = step(run), predict(run, interval=False).breakdown
    exchanges, layers, count = passes.exchanges, passes.layers, 3
    table_gather, table_scatter = exchanges.gather_of(exchanges.table), exchanges.scatter_of(exchanges.table)
    scatters = count * (layers * exchanges.scatter + 2 * table_scatter)
    gathers = layers * exchanges.gather + 2 * table_gather
    if zero == 3:  # a table once a micro-batch, blocks in the backward pass again
        gathers = count * (gathers + layers * exchanges.gather)
    communication = parts["gradients_s"] + parts["exposed_communication_s"]
    assert communication == pytest.approx(scatters + gathers)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("gbps", [3200, 100])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_shards_without_stages_is_exactly_the_simulation(
    tied: bool, zero: int, gbps: float, count: int
) -> None:
    parallel, batch = {"dp": 16, "zero": zero}, {"global": 16 * count, "micro": 1}
    run = describe(nodes=2, node_gbps=gbps, parallel=parallel, batch=batch, model={"tied": tied})
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s)


def test_gathers_that_fill_a_step_leave_no_rounding_below_nothing() -> None:
    parallel = {"tp": 4, "dp": 8, "zero": 3, "sequence_parallel": True}
    run = describe(nodes=4, node_gbps=50, parallel=parallel, batch={"global": 8}, model={"layers": 61})
    assert step(alter(run, recompute="full", stack="generic")).replica_exchange.gradients >= 0


def test_shards_that_pass_through_the_same_ports_as_tokens_wait_for_them() -> None:
    run = describe(nodes=8, node_gbps=50, model={**EXPERTS, "seq": 2048}, parallel={"zero": 3})
    for parallel in ({"dp": 64, "ep": 64}, {"dp": 32, "cp": 2, "ep": 64, "order": "dp-tp-pp"}):
        passes = step(alter(run, parallel=parallel, model={"experts": 64}))
        exchanges = passes.exchanges
        assert passes.forward >= exchanges.gather + exchanges.on_links_of_shards[0]
        assert passes.backward >= exchanges.gather + exchanges.scatter + exchanges.on_links_of_shards[1]
        assert exchanges.on_links_of_shards[0] >= exchanges.experts_forward > 0


def test_ranks_with_some_rows_of_the_vocabulary_add_up_what_they_give() -> None:
    """Of one block and no stages, as of many; and where the projection hides behind blocks, the embedding does not."""
    run = describe(node_gbps=1, nodes=8, per_node=1, parallel={"tp": 8}, model={"layers": 8}, batch={"global": 1})
    passes = step(run)
    alone = passes.layers * (passes.compute_forward + passes.compute_backward)
    waits = passes.layers * (passes.forward + passes.backward) - alone
    assert predict(run).step_time_s > alone + waits + 2 * passes.exchanges.vocabulary_sum > 1.05 * (alone + waits)
    stages = alter(run, parallel={"tp": 4, "pp": 2}, model={"layers": 9}, batch={"global": 64})
    assert seconds(stages) == pytest.approx(simulate_run(stages).simulation.step_time_s, rel=0.05)


@pytest.mark.parametrize(("dp", "ep", "hsdp"), [(56, 4, 4), (24, 2, 8), (48, 8, 4), (64, 8, 2)])
def test_replicas_of_shards_make_up_the_ranks_with_the_same_experts(dp: int, ep: int, hsdp: int) -> None:
    run = describe(nodes=dp // 8, model=EXPERTS, parallel={"dp": dp, "ep": ep, "zero": 3, "hsdp": hsdp})
    for held in list_block_parameters(read_run(alter(run, batch={"global": dp}))):
        assert held.shards.ranks * held.shard_replicas.ranks == held.replicas.ranks


def test_what_has_no_other_shard_is_neither_copied_nor_gathered() -> None:
    one = describe(parallel={"tp": 8, "zero": 3, "sequence_parallel": True})
    whole = alter(one, parallel={"zero": 0})
    assert shard_copy_bytes(read_run(one)) == 0
    assert footprint(one).gathered <= footprint(whole).gathered
    parallel = {"dp": 8, "ep": 8, "zero": 3}
    dense, experts = list_block_parameters(read_run(describe(model=EXPERTS, parallel=parallel)))
    assert shard_copy_bytes(read_run(describe(model=EXPERTS, parallel=parallel))) == 8 * dense.count < 8 * experts.count


def test_only_what_the_busiest_rank_receives_is_more() -> None:
    """A rank puts its own tokens in order, and what others sent to its experts."""
    run = describe(model=EXPERTS, parallel={"dp": 8, "ep": 8})
    even, busy = (_ordering_bytes(read_run(alter(run, model={"expert_load": load}))) for load in (1, 2))
    assert busy == pytest.approx(1.5 * even)


# -- sequences and stages ------------------------------------------------------------------------------------


def test_gradients_of_keys_and_values_go_round_the_ring_too() -> None:
    run = describe(nodes=8, node_gbps=10, parallel={"cp": 64}, batch={"global": 1})
    exchanges = step(run).exchanges
    assert exchanges.context_backward == pytest.approx(2 * exchanges.context_forward, rel=0.05)
    assert step(alter(run, recompute="full")).exchanges.context_backward > 2.9 * exchanges.context_forward


def test_a_ring_that_is_hidden_costs_what_it_takes_from_attention() -> None:
    hidden = step(describe(model={"seq": 65536}, parallel={"cp": 8}, batch={"global": 1})).exchanges
    assert 0 < hidden.context_forward < 0.5 * hidden.block.attention


def test_experts_that_are_not_sharded_are_not_gathered() -> None:
    parallel = {"pp": 2, "dp": 8, "ep": 8, "zero": 3}
    run = describe(nodes=2, parallel=parallel, model=EXPERTS, batch={"global": 16, "micro": 1})
    assert footprint(run).gathered < 0.5 * footprint(alter(run, parallel={"ep": 4})).gathered


def test_a_block_that_is_computed_again_does_not_hold_its_input_twice() -> None:
    one = describe(model={"layers": 1, "seq": 65536}, parallel={"tp": 8, "sequence_parallel": False})
    assert footprint(alter(one, recompute="full")).activations <= footprint(one).activations


# -- what is known of devices, and of descriptions -----------------------------------------------------------


def width(run: dict[str, Any]) -> float:
    low, high = predict(run).step_time_interval_s or (0.0, 0.0)
    return high / low


def test_less_is_known_of_devices_without_a_published_step() -> None:
    known, unknown = (
        describe(cluster={"device": device}, model={"seq": 512}, batch={"global": 64, "micro": 64})
        for device in ("H100", "MI300X")
    )
    assert width(unknown) > width(known)
    card = alter(known, cluster={"device": "H100-PCIE"})
    assert width(card) > width(known)
    assert width(alter(known, cluster={"device": "GB200"})) == pytest.approx(
        width(alter(known, cluster={"device": "B200"})), rel=0.02
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"hidden": 10**400}}, "model.hidden: Input should be less than or equal to 1e+09"),
        ({"cluster": {"node_gbps": math.inf}}, "cluster.node_gbps: Input should be a finite number"),
        ({"cluster": {"node_gbps": 5e-324}}, "cluster.node_gbps: Input should be greater than or equal to 1e-06"),
        ({"measured": {"step_time_s": "fast"}}, "measured.step_time_s must be a number above 0, found 'fast'"),
        ({"measured": {"tokens_per_s_per_device": 0}}, "measured.tokens_per_s_per_device must be a number above 0"),
    ],
)
def test_a_value_that_no_run_has_is_an_error_of_its_row(changes: dict[str, Any], reason: str) -> None:
    run = {**describe(), "measured": {"step_time_s": None}}
    lines = "\n".join(json.dumps(one) for one in (alter(run, **changes), run))
    shown = CliRunner().invoke(phalanx, ["predict", "-", "--json"], input=lines)
    wrong, right = map(json.loads, shown.stdout.splitlines())
    assert reason in wrong["error"]
    assert right["step_time_s"] > 0


# -- any run -------------------------------------------------------------------------------------------------


def draw(numbers: random.Random) -> dict[str, Any]:
    """Return a run of plausible figures."""
    choose = numbers.choice
    tp, cp, dp, pp = choose([1, 2, 4, 8]), choose([1, 1, 2]), choose([1, 2, 8, 64]), choose([1, 1, 2, 8])
    ranks, heads = tp * cp * dp * pp, 8 * choose([1, 4, 8])
    model = {"layers": choose([8, 24, 61]), "hidden": 128 * heads, "heads": heads, "kv_heads": choose([8, heads])}
    model |= {"seq": choose([1024, 4096, 32768]), "gated": choose([True, False]), "vocab": choose([32000, 256000])}
    model |= {"ffn": 256 * heads, "tied": choose([True, False])}
    ep = 1
    if choose([True, False]):
        model |= {"experts": 16, "top_k": choose([1, 4])}
        ep = choose([e for e in (1, 2, 16) if tp * cp * dp % e == 0])
    parallel = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "zero": choose([0, 1, 2, 3])}
    parallel |= {"sequence_parallel": choose([True, False]), "hsdp": choose([1, min(dp, 8)])}
    micro = choose([1, 4])
    return describe(
        nodes=math.ceil(ranks / 8),
        node_gbps=choose([100, 400, 3200]),
        model=model,
        cluster={"device": choose(["A100", "H100", "B200", "MI300X"])},
        parallel=parallel,
        batch={"global": dp * micro * pp * choose([1, 8]), "micro": micro},
        recompute=choose(["none", "selective", "full"]),
        stack=choose(["megatron-core", "pytorch", "generic"]),
        overlap={name: choose([True, False]) for name in ("dp", "tp", "pp")},
    )


def per_device(run: dict[str, Any]) -> Prediction:
    return predict(run, interval=False)


@pytest.mark.parametrize("seed", range(8))
def test_any_run_obeys_physics(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(25):
        described = draw(numbers)
        run, predicted = read_run(described), per_device(described)
        model, par, rows = run.model, run.parallel, run.batch.whole
        assert all(math.isfinite(value) and value >= 0 for value in predicted.breakdown.values())
        masked = 6 * model.layers * model.seq * model.hidden  # FLOP of scores that no kernel has to compute
        flops = (model.flops_per_token() - masked) * rows * model.seq / par.ranks
        assert predicted.step_time_s > flops / run.device.flops["bf16"]
        assert states(described) >= 0.98 * 14 * model.parameters
        assert predicted.memory_gib * 2**30 * par.ranks > states(described)

        def change(run: dict[str, Any] = described, **changes: Any) -> float:
            return seconds(alter(run, **changes))

        base = predicted.step_time_s
        assert change(cluster={"node_gbps": 2 * run.cluster.node_gbps}) <= base
        assert change(batch={"global": 2 * rows}) >= base
        assert per_device(alter(described, batch={"global": 2 * rows})).tokens_per_s_per_device > (
            0.995 * predicted.tokens_per_s_per_device
        )
        ways = [change(recompute=how) for how in ("none", "selective", "full")]
        assert ways == sorted(ways)
        assert ways[2] < 1.51 * ways[0]
        near = change(model={"vocab": model.vocab + 1}), change(cluster={"node_gbps": 1.01 * run.cluster.node_gbps})
        assert max(near) / base < 1.02
        assert base / min(near) < 1.02
        if par.pp == 1:
            assert change(batch={"micro": 2 * run.batch.micro}) <= 1.02 * base
        zero = [footprint(alter(described, parallel={"zero": zero, "hsdp": 1})) for zero in (0, 1, 3)]
        held = [parts.parameters + parts.gradients + parts.optimizer for parts in zero]
        assert held == sorted(held, reverse=True)
