"""`ParameterCostModel`: gradient all-reduce, update and memory cost of a layer's parameters (pure).

What is sent are the buckets of data parallel, and the gathers and reduce-scatters of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.auto.capture.layers import LayerStrategy
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import OPTIMIZER_STATES, UPDATE_TEMPORARIES, MachineModel
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.cluster.calibration.figures import Kind, Sharding
from phalanx.plan.shape import ParamShape
from phalanx.plan.styles import weight_dim
from phalanx.plan.value import Average, TopK

BUCKET_BYTES = 25 * 2**20
"""Gradients are sent together until they fill this many bytes, as `plan.value.AllReduce` says."""

_INDEX_BYTES = 8
"""Of the place of an entry that travels (`parallel/update/top_k`)."""


class ParameterCost(NamedTuple):
    """Of the parameters of a layer. Times in seconds."""

    bytes: float
    late_bytes: float
    """Of these, gradients that no bucket has: they are there from the layer's backward pass on."""

    working_bytes: float
    """While the layer runs: parameters and gradients that are gathered, gradients on their way into a bucket, or of a
    micro-batch alone."""

    update_bytes: float
    """While the optimizer updates its largest parameter."""

    grad_sync_s: float
    gather_s: float
    gather_again_s: float
    copy_s: float
    """Of gradients into their buckets, in every backward pass, and of the host, which hears of each."""

    update_s: float
    """Of the optimizer, and of what ranks exchange after the passes."""


class ParameterCostModel:
    """Prices parameters under one parallel config."""

    def __init__(self, work: LayerWork, config: ParallelConfig) -> None:
        self._optimizer, self._work, self._config, self._machine = work.layers.optimizer, work, config, work.machine
        trained = [param for param in work.layers.captured.parameters if param.trainable]
        self._bucket = min(sum(param.bytes for param in trained), BUCKET_BYTES) or 1
        self._late_exchange = None if config.update is None else _LateExchange(trained, config, work.machine)

    def of(
        self, new_params: Sequence[ParamShape], parts: float, strategy: LayerStrategy, *, on_tokens: bool = False
    ) -> ParameterCost:
        """Return what a layer's parameters cost.

        Args:
            new_params: Those that no layer before it has.
            parts: Into how many parts they are sharded.
            strategy: How the layer is computed.
            on_tokens: Whether each rank of those that share a sequence computes it for some of the tokens.
        """
        config = self._config
        trained = [param for param in new_params if param.trainable]
        size, count = sum(param.bytes for param in trained) / parts, sum(param.count for param in trained) / parts
        frozen = sum(param.bytes for param in new_params if not param.trainable) / parts
        late_s = 0.0
        if self._late_exchange is not None:
            grad_sync_s, gather_s, gather_again_s, copy_s = 0.0, 0.0, 0.0, 0.0
            late_s = self._late_exchange.seconds(trained)
        elif config.zero and self._machine.host.sharded_s is not None:
            grad_sync_s, gather_s, gather_again_s, copy_s = 0.0, self._sharded_s(new_params, parts), 0.0, 0.0
        else:
            grad_sync_s, copy_s = self._grad_sync(trained, size, parts, strategy, on_tokens)
            gather_s = self._collective_s("all_gather", size + frozen, parts, config.over_data) if config.zero else 0.0
            gather_again_s = gather_s if config.zero == 3 else 0.0
        shards = config.data if config.zero else 1
        optimizer_bytes = OPTIMIZER_STATES[self._optimizer] * size / shards
        # A rank's slices stand beside what is gathered, which stages keep for a whole step.
        keeps_full = config.zero in (1, 2) or (config.zero > 0 and config.stages > 1)
        value_bytes = (size + frozen) / shards + (size + frozen if keeps_full else 0.0)
        grad_bytes, bucket_bytes = size / shards, self._bucket_bytes(trained, size, parts, strategy, on_tokens)
        if config.stages > 1:
            # Gradients of micro-batches add up until all are there, beside buckets, before slices; each is new first.
            late_bytes, working_bytes = 0.0, size if config.micro_batches > 1 else 0.0
            grad_bytes = size + bucket_bytes
        else:
            late_bytes = grad_bytes - bucket_bytes
            gathered_bytes = size + (size + frozen if config.zero == 3 else 0.0) if config.zero else 0.0
            working_bytes = gathered_bytes + bucket_bytes
        largest = max((param.bytes for param in trained), default=0.0) / parts / shards
        update_bytes = UPDATE_TEMPORARIES[self._optimizer] * largest
        update_s = (
            self._machine.operators.optimizer_s(self._optimizer, count / shards, len(trained)) if trained else 0.0
        )
        residual_bytes = sum(param.bytes for param in trained if _is_compressed(param, config))
        return ParameterCost(
            bytes=value_bytes + grad_bytes + optimizer_bytes + residual_bytes,
            late_bytes=late_bytes,
            working_bytes=working_bytes,
            update_bytes=update_bytes,
            grad_sync_s=grad_sync_s,
            gather_s=gather_s,
            gather_again_s=gather_again_s,
            copy_s=copy_s,
            update_s=update_s + late_s,
        )

    def _bucket_bytes(
        self, trained: Sequence[ParamShape], size: float, parts: float, strategy: LayerStrategy, on_tokens: bool
    ) -> float:
        """Return the bytes of gradients that are averaged in buckets, which stay from step to step.

        Parameters that are averaged need none. Entries of gradients that travel count as if they did: they are put
        together beside the gradients.
        """
        if self._config.zero:
            return 0.0
        if self._copies(strategy, parts) > 1 and not isinstance(self._config.update, Average):
            return size
        partial = trained if on_tokens else _list_partial_gradients(trained, strategy)
        return float(sum(param.bytes for param in partial))

    def _copies(self, strategy: LayerStrategy, parts: float) -> int:
        """Return how many ranks have the same part of a layer, and average its gradients."""
        config = self._config
        if strategy.style == "expert":
            return config.data // config.experts
        return config.data if config.model > 1 or parts == 1 else 1

    def _grad_sync(
        self, trained: Sequence[ParamShape], size: float, parts: float, strategy: LayerStrategy, on_tokens: bool
    ) -> tuple[float, float]:
        """Return the seconds of exchanging gradients of so many bytes, and of moving them to where they are sent."""
        config, host = self._config, self._machine.host
        copies = self._copies(strategy, parts)
        where = config.over_copies if strategy.style == "expert" else config.over_data
        partial = list(trained) if on_tokens else _list_partial_gradients(trained, strategy)
        partial_bytes, sync_s, copy_s = sum(param.bytes for param in partial), 0.0, 0.0
        if partial_bytes and config.zero:
            sync_s += self._collective_s("all_reduce", partial_bytes / config.data, parts, config.over_tokens)
        elif partial_bytes:
            sync_s += self._collective_s("all_reduce", partial_bytes, parts, config.over_data_and_tokens)
        full_bytes = size if config.zero else size - partial_bytes
        if copies > 1 and full_bytes:
            kind: Kind = "reduce_scatter" if config.zero else "all_reduce"
            sync_s += self._collective_s(kind, full_bytes, parts, where)
            copy_s = self._machine.operators.operator_s("elementwise", full_bytes)
        if host.averaged_s is not None and not config.zero and config.data * config.model * config.context > 1:
            unsharded = [param for param in trained if not _is_sharded(param, strategy)]
            hooked = trained if copies > 1 else partial if config.model * config.context > 1 else unsharded
            copy_s += len(hooked) * host.averaged_s(where if config.data > 1 else config.over_tokens)
        # Stages average once a step, after all micro-batches.
        return (sync_s + copy_s, 0.0) if config.stages > 1 else (sync_s, copy_s)

    def _collective_s(self, kind: Kind, size: float, parts: float, where: GroupTopology) -> float:
        """Return the seconds of so many bytes as a part of buckets, which parameters in parts fill less."""
        bucket = self._bucket / parts
        return self._machine.collective_s(kind, bucket, where) * size / bucket

    def _sharded_s(self, params: Sequence[ParamShape], parts: float) -> float:
        """Return what sharding adds to a step for parameters sharded into so many parts, as parts of their units."""
        sharded_s, where = self._machine.host.sharded_s, self._config.over_data
        assert sharded_s is not None
        how: Sharding = "freed" if self._config.zero == 3 and self._config.stages == 1 else "kept"
        seconds = 0.0
        for param in params:
            unit = self._work.unit_of[param.name]
            start_s, unit_bytes = sharded_s(how, 0.0, len(unit), where), sum(parameter.bytes for parameter in unit)
            seconds += start_s / len(unit)
            seconds += (sharded_s(how, unit_bytes, len(unit), where) - start_s) * param.bytes / unit_bytes / parts
        return seconds


class _LateExchange:
    """What ranks exchange beside no pass: parameters that are averaged, or the largest entries of gradients.

    All parameters travel together, so those of one layer take their part of that. Collectives alone have a price.
    """

    def __init__(self, trained: Sequence[ParamShape], config: ParallelConfig, machine: MachineModel) -> None:
        self._config = config
        self._total = self._list_sent(trained)
        where = config.over_data
        self._total_s = tuple(
            machine.collective_s(kind, size, where) if size and where.ranks > 1 else 0.0 for kind, size in self._total
        )

    def seconds(self, own: Sequence[ParamShape]) -> float:
        """Return the seconds of a step for the parameters of a layer, on average over steps."""
        update = self._config.update
        parts = zip(self._list_sent(own), self._total, self._total_s, strict=True)
        seconds = sum(total_s * size / total for (_, size), (_, total), total_s in parts if size)
        return seconds / update.every if isinstance(update, Average) else seconds

    def _list_sent(self, params: Sequence[ParamShape]) -> tuple[tuple[Kind, float], ...]:
        """Return the collectives, and the bytes of these parameters in each."""
        update, ranks = self._config.update, self._config.data
        if not isinstance(update, TopK):
            return (("all_reduce", float(sum(param.bytes for param in params))),)
        chosen = [param for param in params if _is_compressed(param, self._config)]
        entries = [max(1, round(param.count * (1 - update.sparsity[-1]))) for param in chosen]
        values = sum(count * param.item_bytes for count, param in zip(entries, chosen, strict=True))
        return (
            ("all_reduce", float(sum(param.bytes for param in params if param not in chosen))),
            ("all_gather", float(ranks * values)),
            ("all_gather", float(ranks * _INDEX_BYTES * sum(entries))),
        )


def _is_compressed(param: ParamShape, config: ParallelConfig) -> bool:
    """Return whether only the largest entries of a parameter's gradient travel."""
    return isinstance(config.update, TopK) and param.count >= config.update.dense_below


def _is_sharded(param: ParamShape, strategy: LayerStrategy) -> bool:
    """Return whether each rank has a part of a parameter of a layer."""
    is_all = strategy.style in ("column", "expert")
    return weight_dim(strategy.style) is not None and (is_all or len(param.shape) == 2)


def _list_partial_gradients(params: Iterable[ParamShape], strategy: LayerStrategy) -> list[ParamShape]:
    """Return replicated parameters of whose gradients each rank has a term, as it sees some of the tokens."""
    if strategy.style == "sequence":
        return list(params)
    if strategy.style == "row" and strategy.output_state == "tokens":
        return [param for param in params if len(param.shape) == 1]
    return []
