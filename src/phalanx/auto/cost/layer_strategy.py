"""`LayerCostModel`: time and memory of a layer under one strategy (pure).

What is sent is what the layers of `parallel/tensor` send; parameters and their gradients are `auto/cost/parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from phalanx.auto.capture.layers import EXPERTS, WHOLE, LayerStrategy
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.layer_memory import layer_memory
from phalanx.auto.cost.layer_work import CallWork, LayerWork
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.cost.operators import PassTimes, ShardFraction
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.parameters import ParameterCostModel
from phalanx.auto.cost.shared_sequence import exchange_keys
from phalanx.auto.solver.problem import StrategyCost
from phalanx.cluster.calibration.figures import Kind
from phalanx.plan.styles import weight_dim

_COUNT_BYTES = 8
"""Of a number of tokens."""

_HEADER_BYTES = 72
"""Bytes that ranks tell each other of their samples before a layer gathers them."""


class LayerCostModel:
    """Prices strategies under one parallel config, call after call: a parameter counts at its first use."""

    def __init__(self, work: LayerWork, config: ParallelConfig) -> None:
        self._work, self._config, self._machine = work, config, work.machine
        self._parameters = ParameterCostModel(work, config)
        self._meets = config.over_tokens if config.model * config.context > 1 else config.over_data
        passes = config.micro_batches / config.stages
        self._waits = _waiting_share(passes * work.total_s(1 / config.batch_parts), work.machine, self._meets)
        self._seen: set[str] = set()
        self._cache: dict[tuple[object, ...], tuple[StrategyCost, ...]] = {}

    def options(self, work: CallWork, strategies: Iterable[LayerStrategy]) -> tuple[StrategyCost, ...]:
        """Return the costs of the strategies of the next call."""
        names, chosen = {param.name for param in work.call.parameters}, tuple(strategies)
        key = self._work.alike(work), frozenset(names & self._seen), chosen
        if key not in self._cache:
            self._cache[key] = tuple(self._option(work, strategy) for strategy in chosen)
        self._seen |= names
        return self._cache[key]

    def _option(self, work: CallWork, strategy: LayerStrategy) -> StrategyCost:
        config = self._config
        gathers_samples, ranks = self._gathers_samples(strategy), self._ranks(strategy)
        shard_fraction = _largest_part(work.call, strategy, ranks)
        shares = config.context > 1 and work.sequence is not None
        tokens = config.context if shares else 1
        fraction = self._fraction(strategy, ranks, shard_fraction, tokens)
        times = self._work.shared_times(work, config) if shares else self._work.times(work, fraction)
        comm = self._comm_over_data(work, strategy) if gathers_samples else self._comm_times(work, strategy)
        comm = self._comm_of_sequence(work) if shares else comm
        comm, times = self._add_waits(comm, times, _meetings(work, strategy, gathers_samples=gathers_samples))
        new_params = [param for param in work.call.parameters if param.name not in self._seen]
        param_cost = self._parameters.of(
            new_params, 1 / shard_fraction if weight_dim(strategy.style) is not None else 1, strategy, on_tokens=shares
        )
        memory = layer_memory(
            work, strategy, ranks, config, self._work.layers.sequence, gathers_samples=gathers_samples
        )
        again = self._recompute(work, strategy, fraction, memory.activation_bytes, comm.forward)
        deferred = self._defer_weights(work, fraction, times) if config.zero_bubble else _DeferredWeights(0.0, 0.0, 0.0)
        # Stages gather once for all micro-batches of a step, at every stage of sharding.
        gather_s, regather_s = (0.0, 0.0) if config.stages > 1 else (param_cost.gather_s, param_cost.gather_again_s)
        added_s = regather_s + param_cost.copy_s + deferred.added_s
        lifetimes = self._lifetimes(work, again.activation_bytes)
        batch_bytes = work.sample_bytes * config.micro_batches / config.batch_parts + lifetimes.persistent_bytes
        return StrategyCost(
            label=str(strategy),
            forward_s=times.forward + comm.forward + again.forward_s + gather_s,
            backward_s=times.backward + comm.backward + again.backward_s + added_s,
            weight_grad_s=deferred.weight_grad_s,
            comm_s=comm.forward + comm.backward + gather_s + regather_s,
            grad_sync_s=param_cost.grad_sync_s + (param_cost.gather_s if config.stages > 1 else 0.0),
            update_s=param_cost.update_s,
            persistent_bytes=param_cost.bytes + batch_bytes,
            batch_bytes=batch_bytes,
            late_bytes=param_cost.late_bytes,
            update_bytes=param_cost.update_bytes,
            activation_bytes=lifetimes.activation_bytes,
            recomputed_bytes=again.recomputed_bytes,
            deferred_bytes=deferred.deferred_bytes,
            workspace_bytes=max(
                memory.workspace_bytes
                + again.workspace_bytes
                + param_cost.working_bytes
                + work.shared_grad_bytes
                + lifetimes.workspace_bytes,
                lifetimes.former_bytes - param_cost.late_bytes,
            ),
        )

    def _lifetimes(self, work: CallWork, activation_bytes: float) -> _Lifetimes:
        """Return how long a rank has what a call keeps for its backward pass, and what it returns.

        A loop has an output until the next one takes its place: at the end of a forward pass, before the loss keeps
        anything, there are two. Stages let it go with its micro-batch: if gradients of weights are apart, with those of
        inputs, as all behind the last weights, and of one micro-batch at a time.
        """
        returned_bytes = work.call.returned_bytes / self._config.batch_parts
        if self._config.stages == 1:
            kept_later = activation_bytes if work.call.kind == "loss" else 0.0
            former_bytes = work.former_bytes / self._config.batch_parts - kept_later
            return _Lifetimes(returned_bytes, activation_bytes, 0.0, former_bytes)
        behind_bytes = work.behind_weights_bytes / self._config.batch_parts
        if self._config.zero_bubble and behind_bytes:
            return _Lifetimes(0.0, activation_bytes if work.trains else 0.0, behind_bytes)
        return _Lifetimes(0.0, activation_bytes + returned_bytes, 0.0)

    def _recompute(
        self, work: CallWork, strategy: LayerStrategy, fraction: ShardFraction, saved_bytes: float, comm_s: float
    ) -> _Recomputation:
        """Return what computing a call again takes and keeps.

        Args:
            work: Of the call.
            strategy: How the layer is computed.
            fraction: What part of it a rank computes.
            saved_bytes: What is kept if nothing is computed again.
            comm_s: Of its collectives in the forward pass.
        """
        config, host = self._config, self._machine.host
        is_selective = config.recompute == "selective"
        if config.recompute == "none" or not work.in_block:
            return _Recomputation(0.0, 0.0, saved_bytes, 0.0, 0.0)
        parts = config.batch_parts * (config.context if work.sequence is not None else 1)
        selective_s = products = 0.0
        if is_selective:
            gathers_samples = self._gathers_samples(strategy)
            count = collective_operators(strategy, self._ranks(strategy), gathers_samples=gathers_samples)
            selective_s = (len(work.operators) + count) * host.selective_op_s
            products = self._work.product_bytes(work, fraction, config)
        again_s = comm_s + self._work.recompute_s(work, fraction, config) + selective_s
        again_s += host.checkpoint_s if work.starts_block else 0.0
        left_bytes = products + (work.checkpoint_bytes / parts if work.starts_block else 0.0)
        if config.stages == 1:
            return _Recomputation(selective_s, again_s, left_bytes, saved_bytes - products, 0.0)
        block_bytes = work.block_saved_bytes - (work.block_product_bytes if is_selective else 0.0)
        return _Recomputation(selective_s, again_s, left_bytes, 0.0, block_bytes / parts)  # as if nothing were sharded

    def _comm_of_sequence(self, work: CallWork) -> PassTimes:
        """Return what ranks that share a sequence exchange in a call, and at the borders of the blocks."""
        config, shared, comm_s = self._config, work.sequence, self._collective_s
        assert shared is not None
        calls = [exchange_keys(call, self._machine, config, comm_s) for call in shared.attention]
        forward, backward = sum(call.forward for call in calls), sum(call.backward for call in calls)
        if shared.is_last:
            forward += comm_s("all_gather", work.output_bytes / config.batch_parts, config.over_context)
        if shared.is_first and not work.is_first:
            cut = work.call.inputs[0].value.bytes / config.batch_parts
            backward += comm_s("all_gather", cut, config.over_context)
        return PassTimes(forward, 0.0 if work.is_first else backward)

    def _ranks(self, strategy: LayerStrategy) -> int:
        """Return how many ranks compute a layer together."""
        config = self._config
        if strategy in (WHOLE, EXPERTS):
            return config.experts if strategy == EXPERTS else 1
        return config.model if config.model > 1 else config.data

    def _gathers_samples(self, strategy: LayerStrategy) -> bool:
        return strategy.style is not None and strategy != EXPERTS and self._config.model == 1

    def _fraction(self, strategy: LayerStrategy, ranks: int, shard_fraction: float, tokens: int = 1) -> ShardFraction:
        """Return what part of a layer a rank computes, of sequences that so many ranks share."""
        config = self._config
        if strategy == EXPERTS:
            return ShardFraction.of_experts(config.batch_parts, ranks, config.load)
        on_tokens = strategy.style is None and strategy.input_state == "tokens"
        shards_samples = on_tokens or strategy.style in ("parts", "sequence")
        samples = 1 / config.batch_parts / (ranks if shards_samples else 1) / tokens
        return ShardFraction(
            samples=1.0 if self._gathers_samples(strategy) else samples,
            outer=shard_fraction if strategy.style in ("column", None) and not shards_samples else 1.0,
            inner=shard_fraction if strategy.style == "row" else 1.0,
        )

    def _collective_s(self, kind: Kind, size: float, where: GroupTopology) -> float:
        """Return the seconds of a collective of a layer, with what autograd and Python add."""
        host = self._machine.host
        if host.layer_s is not None:
            return host.layer_s(kind, size, where)
        return self._machine.collective_s(kind, size, where) + host.collective_call_s

    def _defer_weights(self, work: CallWork, fraction: ShardFraction, times: PassTimes) -> _DeferredWeights:
        """Return what it costs to compute gradients of weights after those of inputs, of a backward pass so long."""
        weight_ops = [op for op in work.operators if op.parameters and op.written_bytes and work.trains]
        # Autograd walks twice, which takes the host as long for an operator as to watch it in both passes: 46 us on a
        # processor on which selective recomputation adds 24 us each.
        added_s = 2 * self._machine.host.selective_op_s * len(weight_ops)
        deferred_bytes = sum(op.written_bytes for op in weight_ops) * fraction.samples * fraction.outer
        return _DeferredWeights(times.weights, added_s, deferred_bytes)

    def _add_waits(self, comm: PassTimes, work: PassTimes, meetings: tuple[int, int]) -> tuple[PassTimes, PassTimes]:
        """Return collectives and work of a call with what ranks wait for the slowest of them after it.

        A call whose ranks meet in a pass waits itself, in full, as often as they meet: before its products too, as if
        the work since they last met were as long as its own. Else the next one that meets waits for this work too:
        which one that is depends on what is chosen for others, so the work counts with its part of what ranks would
        wait after a whole step.

        Args:
            comm: Of the collectives, of ranks in step.
            work: Of the operators.
            meetings: How often ranks meet after work in the forward and in the backward pass.
        """
        waiting_s = self._machine.host.waiting_s
        if waiting_s is None:
            return comm, work
        late = 1 + self._waits
        waited = PassTimes(
            comm.forward and comm.forward + meetings[0] * waiting_s(work.forward, self._meets),
            comm.backward and comm.backward + meetings[1] * waiting_s(work.backward, self._meets),
        )
        forward, backward = 1.0 if comm.forward else late, 1.0 if comm.backward else late
        return waited, PassTimes(work.forward * forward, work.backward * backward, work.weights * backward)

    def _comm_over_data(self, work: CallWork, strategy: LayerStrategy) -> PassTimes:
        """Return the collectives of a layer that gathers the samples of all ranks; terms travel to who adds them.

        Gradients of its outputs and inputs are weighted on their way (`parallel/tensor/layers/gathered_linear`).
        """
        ranks, where, comm_s = self._config.data, self._config.over_data, self._collective_s
        input_bytes, output_bytes = work.input_bytes, work.output_bytes
        weight_s = self._elementwise_s(output_bytes / ranks)
        weight_s += 0.0 if work.is_first else self._elementwise_s(input_bytes / ranks)
        header_s = (
            self._machine.collective_s("all_gather", _HEADER_BYTES * ranks, where)
            + self._machine.host.collective_call_s
        )
        if strategy.style == "column":
            exchange_s = comm_s("all_to_all", output_bytes / ranks, where)
            forward = header_s + comm_s("all_gather", input_bytes, where) + exchange_s
            backward = exchange_s + (0.0 if work.is_first else comm_s("all_to_all", input_bytes, where))
            return PassTimes(forward, backward + weight_s)
        exchange_s = comm_s("all_to_all", input_bytes / ranks, where)
        forward = header_s + exchange_s + comm_s("all_to_all", output_bytes, where)
        forward += self._bias_s(work, output_bytes / ranks)
        backward = comm_s("all_gather", output_bytes, where) + (0.0 if work.is_first else exchange_s)
        return PassTimes(forward, backward + weight_s)

    def _bias_s(self, work: CallWork, output_bytes: float) -> float:
        """Return the seconds of adding a bias to the sum of all ranks' terms: other layers add it in the product."""
        has_bias = any(len(param.shape) == 1 for param in work.call.parameters)
        return self._elementwise_s(output_bytes) if has_bias else 0.0

    def _elementwise_s(self, size: float) -> float:
        return self._machine.operators.operator_s("elementwise", size)

    def _comm_times(self, work: CallWork, strategy: LayerStrategy) -> PassTimes:
        """Return the collectives of a layer whose ranks read the same samples."""
        if strategy.style in (None, "sequence"):
            return PassTimes(0.0, 0.0)
        where, comm_s = self._config.over_model, self._collective_s
        input_bytes, output_bytes = (
            work.input_bytes / self._config.batch_parts,
            work.output_bytes / self._config.batch_parts,
        )
        if strategy.style == "parts":
            return self._comm_around_parts(work)
        if strategy == EXPERTS:
            return self._comm_to_experts(work)
        if strategy.style == "column":
            forward = 0.0 if strategy.has_sharded_output else comm_s("all_gather", output_bytes, where)
            if strategy.input_state == "tokens":  # terms of its gradients travel to who adds them
                return PassTimes(
                    forward + comm_s("all_gather", input_bytes, where), comm_s("all_to_all", input_bytes, where)
                )
            return PassTimes(forward, 0.0 if work.is_first else comm_s("all_reduce", input_bytes, where))
        on_tokens = strategy.output_state == "tokens"
        biased_bytes = output_bytes / (where.ranks if on_tokens else 1)
        bias_s = self._bias_s(work, biased_bytes) if strategy.style == "row" else 0.0
        if on_tokens:
            forward = comm_s("all_to_all", output_bytes, where) + bias_s
            return PassTimes(forward, comm_s("all_gather", output_bytes, where))
        forward = comm_s("all_reduce", output_bytes, where) + bias_s
        gathers_grad = strategy.style == "row" and not strategy.has_sharded_input and not work.is_first
        return PassTimes(forward, comm_s("all_gather", input_bytes, where) if gathers_grad else 0.0)

    def _comm_to_experts(self, work: CallWork) -> PassTimes:
        """Return the collectives that take tokens and weights to their experts, results back, and gradients likewise.

        Ranks tell each other first how many tokens they have for each expert.
        """
        call, where, comm_s = work.call.experts, self._config.over_experts, self._collective_s
        assert call is not None  # such strategies are those of experts
        copies = call.copies * self._config.load / self._config.batch_parts
        counts_s = self._machine.collective_s("all_gather", _COUNT_BYTES * call.experts * where.ranks, where)
        tokens_s = comm_s("all_to_all", copies * call.token_bytes, where)
        weights_s = comm_s("all_to_all", copies * call.weight_bytes, where)
        forward = counts_s + self._machine.host.collective_call_s + weights_s + 2 * tokens_s
        return PassTimes(forward, weights_s + (1 if work.is_first else 2) * tokens_s)

    def _comm_around_parts(self, work: CallWork) -> PassTimes:
        """Return the collectives that put together what is computed in parts: outputs, and gradients of inputs.

        Those of whole parameters are terms. What DTensor adds counts as measured, or
        like recomputation of operators.
        """
        where, comm_s, batch_parts = self._config.over_model, self._collective_s, self._config.batch_parts
        host, count = self._machine.host, len(work.operators)
        trainable = [param for param in work.call.parameters if param.trainable]
        dtensor_s = 2 * count * host.selective_op_s
        if host.placed_s is not None:
            dtensor_s = host.placed_s(count, len(trainable), where) / 2
        forward = sum(comm_s("all_gather", output.bytes / batch_parts, where) for output in work.call.outputs)
        backward = sum(comm_s("all_reduce", param.bytes, where) for param in trainable)
        if not work.is_first:
            inputs = (source for source in work.call.inputs if isinstance(source.source, int))
            backward += sum(comm_s("all_gather", source.value.bytes / batch_parts, where) for source in inputs)
        return PassTimes(forward + dtensor_s, backward + dtensor_s)


def collective_operators(strategy: LayerStrategy, ranks: int, *, gathers_samples: bool) -> int:
    """Return how many operators the collectives of a layer start in a forward pass: views, buffers, copies.

    `selective` watches each of them. As counted of the layers of `parallel/tensor/layers`.
    """
    if gathers_samples:
        return {"column": 11 + 5 * ranks, "row": 15 + 7 * ranks}.get(strategy.style or "", 0)
    if strategy.style == "column":
        return 1 if strategy.has_sharded_output else 3 + 2 * ranks
    if strategy.style == "row":
        return 3 if strategy.has_sharded_input else 5
    return 14 if strategy.style == "vocab" else 0


def _meetings(work: CallWork, strategy: LayerStrategy, *, gathers_samples: bool) -> tuple[int, int]:
    """Return how often ranks meet in each pass of a call that exchanges something: before its products, behind them."""
    if gathers_samples or strategy == EXPERTS:
        return 2, 1 if work.is_first else 2
    gathers_first = strategy.style == "column" and strategy.input_state == "tokens"
    return 2 if gathers_first and not strategy.has_sharded_output else 1, 1


def _waiting_share(step_s: float, machine: MachineModel, where: GroupTopology) -> float:
    """Return what ranks wait for the slowest of them, as a part of their work, if they meet once a step."""
    waiting_s = machine.host.waiting_s
    return 0.0 if waiting_s is None or not step_s else waiting_s(step_s, where) / step_s


def _largest_part(call: ModuleCall, strategy: LayerStrategy, ranks: int) -> float:
    """Return the share of a call that the rank with the largest part has."""
    weight = next((param for param in call.parameters if len(param.shape) == 2), None)
    dim = weight_dim(strategy.style)
    if weight is None or dim is None:
        return 1 / ranks
    size = weight.shape[dim]
    return -(-size // ranks) / size


class _Recomputation(NamedTuple):
    forward_s: float
    """Of the host, which watches operators."""

    backward_s: float
    activation_bytes: float
    recomputed_bytes: float
    workspace_bytes: float


class _Lifetimes(NamedTuple):
    """Of what a call keeps for its backward pass, and of what it returns."""

    persistent_bytes: float
    activation_bytes: float
    workspace_bytes: float
    former_bytes: float = 0.0
    """Bytes at the end of the forward pass without gradients, beside what is there at the call anyway."""


class _DeferredWeights(NamedTuple):
    weight_grad_s: float
    added_s: float
    """Of the host."""

    deferred_bytes: float
    """Bytes of the gradients of outputs, from which those of weights are computed."""
