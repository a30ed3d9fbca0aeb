"""`LayerWork`: computation cost of a model's layers, cached over parallel configs (pure)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phalanx.auto.capture.blocks import is_inside
from phalanx.auto.capture.graph import Operator, TensorShape
from phalanx.auto.capture.layers import Layers
from phalanx.auto.capture.module_calls import CallInput, ModuleCall
from phalanx.auto.capture.partition_points import unit_of
from phalanx.auto.capture.sequence_blocks import AttentionCall, SequenceBlocks
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.cost.operators import PassTimes, ShardFraction, estimate_passes
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.shared_sequence import ring_again_s, ring_product_bytes, ring_steps
from phalanx.auto.solver.problem import fills_s
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.stages import units


@dataclass(frozen=True, kw_only=True, slots=True)
class CallWork:
    """One call, as far as no parallel config changes it. Bytes are of a global batch."""

    call: ModuleCall
    operators: tuple[Operator, ...]
    is_first: bool
    """Whether nobody needs the gradient of its inputs."""

    trains: bool
    """Whether its parameters get gradients."""

    input_bytes: float
    """Bytes of its inputs."""

    checkpoint_bytes: float
    """Bytes of its inputs that nothing holds but a block that is computed again from them: neither of the batch nor
    returned."""

    output_bytes: float
    """Bytes of its outputs."""

    sample_bytes: float
    """Bytes of tensors of the batch that no call before reads."""

    shared_grad_bytes: float
    """Bytes of gradients of parameters that several operators use, while it runs, beside those of all parameters: of
    later uses, up to the first; and in such a use its own and a new sum of both."""

    behind_weights_bytes: float
    """Bytes that the layer with the model's last weights returns and those behind it keep, up to this one. 0 before,
    and for all if a stage may be without weights behind it."""

    former_bytes: float
    """Of the loss where it begins, or of the last call if there is none: all bytes that the model returns, as a loop
    has those of the step before too until it has new ones. 0 of others."""

    block: str
    """The repeated block that it is in, which may be recomputed; empty if it is in none."""

    starts_block: bool
    sequence: SequencePlace | None
    """Of a call in blocks whose sequence ranks may share."""

    block_saved_bytes: float
    """In a repeated block: bytes of all that it keeps up to this call."""

    block_product_bytes: float
    """In a repeated block: bytes of the results of its products up to this call, which `selective` keeps."""

    @property
    def in_block(self) -> bool:
        """Whether it is in a repeated block."""
        return bool(self.block)


class SequencePlace(NamedTuple):
    """A call in blocks whose sequence ranks may share."""

    attention: tuple[AttentionCall, ...]
    is_first: bool
    """Whether the sequence is cut before it."""

    is_last: bool
    """Whether it is put together behind it."""


class LayerWork:
    """The work of all calls of a model in order, and the seconds of parts of it on a machine."""

    def __init__(self, layers: Layers, machine: MachineModel) -> None:
        self.layers, self.machine = layers, machine
        captured, calls, blocks = layers.captured, layers.calls, layers.blocks
        trains = [any(param.trainable for param in call.parameters) for call in calls]
        is_first = _first(calls, trains)
        block_of = [next((b for b in blocks if is_inside(call.path, (b,))), None) for call in calls]
        first: dict[str, int] = {}
        saved: dict[str, tuple[int, int]] = {}
        block_saved = []
        for position, block in enumerate(block_of):
            size = products = 0
            if block is not None:
                first.setdefault(block, position)
                size, products = saved.get(block, (0, 0))
                ops = [captured.operators[i] for i in calls[position].operators]
                size += calls[position].saved_bytes
                products += sum(op.written_bytes for op in ops if op.flops)
                saved[block] = size, products
            block_saved.append((size, products))
        points = layers.partition_points
        behind_weights = _list_behind_weights(calls, trains, points.of if points else (0,) * len(calls))
        returned_bytes = float(sum(call.returned_bytes for call in calls))
        loss_start = next((position for position, call in enumerate(calls) if call.kind == "loss"), len(calls) - 1)
        sample_bytes, shared_grad_bytes = _list_sample_bytes(calls), _list_shared_grad_bytes(calls, captured.operators)
        self.all = tuple(
            CallWork(
                call=call,
                operators=tuple(captured.operators[i] for i in call.operators),
                is_first=is_first[position],
                trains=trains[position],
                input_bytes=_bytes(source.value for source in call.inputs),
                checkpoint_bytes=_bytes(source.value for source in call.inputs if not _is_held(source)),
                output_bytes=_bytes(call.outputs),
                sample_bytes=sample_bytes[position],
                shared_grad_bytes=shared_grad_bytes[position],
                behind_weights_bytes=behind_weights[position],
                former_bytes=returned_bytes if position == loss_start else 0.0,
                block=block or "",
                starts_block=block is not None and first[block] == position,
                sequence=_place(layers.sequence, position),
                block_saved_bytes=block_saved[position][0],
                block_product_bytes=block_saved[position][1],
            )
            for position, (call, block) in enumerate(zip(calls, block_of, strict=True))
        )
        self._without_outputs = self.all if layers.return_outputs else tuple(map(_without_outputs, self.all))
        first_of = {(work.call.template, work.is_first, work.trains): work for work in reversed(self.all)}
        counts = Counter((work.call.template, work.is_first, work.trains) for work in self.all)
        self._distinct = [(work, counts[key]) for key, work in first_of.items()]
        names = units(ModelShape(captured.parameters))
        params_by_unit: dict[int | None, list[ParamShape]] = {}
        unit_by_param = {param: unit_of(param.name, names) for param in captured.parameters}
        for param, unit in unit_by_param.items():
            params_by_unit.setdefault(unit, []).append(param)
        self.unit_of = {param.name: params_by_unit[unit] for param, unit in unit_by_param.items()}
        """By parameter, all that are in its unit."""

        self._times: dict[tuple[int, bool, bool, ShardFraction], PassTimes] = {}
        self._ring_times: dict[tuple[object, ...], PassTimes] = {}
        self._again: dict[tuple[object, ...], float] = {}

    def calls_under(self, config: ParallelConfig) -> tuple[CallWork, ...]:
        """Return all calls, with the bytes that they keep under a parallel config.

        Torch's stages keep what the model returns of a micro-batch up to its backward pass, whatever the loop does.
        """
        return self._without_outputs if config.stages == 1 else self.all

    def times(self, work: CallWork, fraction: ShardFraction) -> PassTimes:
        """Return the seconds of both passes of a part of a call."""
        key = work.call.template, work.is_first, work.trains, fraction
        if key not in self._times:
            self._times[key] = estimate_passes(
                work.operators, self.machine.operators, fraction, is_first=work.is_first, trains=work.trains
            )
        return self._times[key]

    def shared_times(self, work: CallWork, config: ParallelConfig) -> PassTimes:
        """Return the seconds of both passes of a call of which each rank computes a part of the sequence."""
        assert work.sequence is not None
        fraction = ShardFraction(samples=1 / config.batch_parts / config.context)
        rings = ring_calls(work, config)
        if not rings:
            return self.times(work, fraction)
        key = work.call.template, work.is_first, work.trains, config.context, config.batch_parts
        if key not in self._ring_times:
            others = self._without(rings, work)
            plain = estimate_passes(
                others, self.machine.operators, fraction, is_first=work.is_first, trains=work.trains
            )
            steps = [ring_steps(call, self.machine, config) for call in rings]
            self._ring_times[key] = PassTimes(
                plain.forward + sum(ring.forward for ring in steps),
                plain.backward + (0.0 if work.is_first else sum(ring.backward for ring in steps)),
                plain.weights,
            )
        return self._ring_times[key]

    def total_s(self, batch_fraction: float) -> float:
        """Return the seconds of both passes through all calls, of a part of the batch."""
        passes = ((count, self.times(work, ShardFraction(samples=batch_fraction))) for work, count in self._distinct)
        return sum(count * (times.forward + times.backward) for count, times in passes)

    def recompute_s(self, work: CallWork, fraction: ShardFraction, config: ParallelConfig) -> float:
        """Return the seconds of what is recomputed of it; `selective` keeps the results of products."""
        rings = ring_calls(work, config)
        ranks = (config.context, config.batch_parts) if rings else None
        key = work.call.template, config.recompute, fraction, ranks
        if key not in self._again:
            others = self._without(rings, work)
            recomputed = (op for op in others if config.recompute == "full" or not op.flops)
            plain_s = estimate_passes(recomputed, self.machine.operators, fraction, is_first=True).forward
            self._again[key] = plain_s + sum(ring_again_s(call, self.machine, config) for call in rings)
        return self._again[key]

    def _without(self, rings: Iterable[AttentionCall], work: CallWork) -> tuple[Operator, ...]:
        """Return the operators of a call but the attention of rings."""
        attention = {call.operator for call in rings}
        return tuple(op for at, op in zip(work.call.operators, work.operators, strict=True) if at not in attention)

    def product_bytes(self, work: CallWork, fraction: ShardFraction, config: ParallelConfig) -> float:
        """Return the bytes of the results of products of a part of a call, which `selective` keeps."""
        rings = ring_calls(work, config)
        written_bytes = sum(op.written_bytes for op in self._without(rings, work) if op.flops)
        rings_bytes = sum(ring_product_bytes(call, self.machine, config) for call in rings)
        return written_bytes * fraction.samples * fraction.outer + rings_bytes

    def alike(self, work: CallWork) -> tuple[object, ...]:
        """Return what prices know of a call, but for what came before it: those with the same cost the same."""
        units = (self.unit_of[param.name] for param in work.call.parameters)
        # What sharding adds is a part of what a whole unit takes.
        sizes = tuple((len(unit), sum(param.bytes for param in unit)) for unit in units)
        activations = work.call.saved_bytes, work.call.returned_bytes
        saved = *activations, work.in_block, work.starts_block, work.checkpoint_bytes, work.block_saved_bytes
        others = work.sample_bytes, work.shared_grad_bytes, work.behind_weights_bytes, work.former_bytes
        temporary = work.call.temporary_bytes, work.block_product_bytes, *others
        borders = work.sequence and (work.sequence.is_first, work.sequence.is_last)
        return work.call.template, work.is_first, work.trains, *saved, *temporary, borders, sizes

    def least_s(self, config: ParallelConfig) -> float:
        """Return seconds that one micro-batch takes through all stages and back, whatever the strategies.

        Less what gradients of weights save of a step with zero bubble (`auto/solver/problem`), spread over its
        passes.
        """
        parts = config.model if config.model > 1 else config.data if config.shards_over_data else 1
        samples = 1.0 if config.shards_over_data else 1 / config.batch_parts
        full = ShardFraction(samples=1 / config.batch_parts)
        sharded_fractions = {
            full,
            ShardFraction(samples=samples, outer=1 / parts),
            ShardFraction(samples=samples, inner=1 / parts),
        }
        # A bound has no time to ask of which modules ranks can compute parts. A part may take longer than the whole:
        # products of few rows are cut along their inner dimension too.
        split_samples = ShardFraction(samples=1 / config.batch_parts / config.model)
        least = np.zeros(3)
        for work, count in self._distinct:
            may_be_parts = set() if work.call.is_glue else {split_samples}
            fractions = {split_samples, *sharded_fractions} if _may_be_sharded(work.call) else {full, *may_be_parts}
            if config.context > 1:  # no layer is cut
                parts = config.context if work.sequence is not None else 1
                fractions = {ShardFraction(samples=1 / config.batch_parts / parts)}
            if work.call.experts is not None and config.experts > 1:
                fractions |= {ShardFraction.of_experts(config.batch_parts, config.experts)}
            least += count * np.min([self._passes_s(work, fraction, config) for fraction in fractions], axis=0)
        return float(least.max())

    def _passes_s(self, work: CallWork, fraction: ShardFraction, config: ParallelConfig) -> tuple[float, ...]:
        """Return seconds of which all calls together take the largest sum."""
        is_shared = config.context > 1 and work.sequence is not None
        times = self.shared_times(work, config) if is_shared else self.times(work, fraction)
        recompute_s = self.recompute_s(work, fraction, config) if work.in_block and config.recompute != "none" else 0.0
        seconds = times.forward + times.backward + recompute_s
        if not config.zero_bubble:
            return seconds, seconds, seconds
        # Of (micro-batches + stages - 1) / stages passes. Other seconds that an option has add more than they save.
        saved = (config.stages - 1) / (config.micro_batches + config.stages - 1)
        return tuple(seconds - saved * fills for fills in fills_s(times.forward, times.backward, times.weights))


def ring_calls(work: CallWork, config: ParallelConfig) -> tuple[AttentionCall, ...]:
    """Return the attention of a call that is computed around a ring; none where ranks share no sequence so."""
    is_ring = config.context > 1 and config.attention == "ring"
    return work.sequence.attention if is_ring and work.sequence is not None else ()


def _place(blocks: SequenceBlocks | None, position: int) -> SequencePlace | None:
    if blocks is None or position not in blocks.calls:
        return None
    first, last = blocks.calls[0], blocks.calls[-1]
    return SequencePlace(blocks.attention.get(position, ()), position == first, position == last)


def _first(calls: tuple[ModuleCall, ...], trains: list[bool]) -> list[bool]:
    """Return for every call whether nothing before it trains."""
    first: list[bool] = []
    for call in calls:
        before = [source.source for source in call.inputs if isinstance(source.source, int)]
        first.append(all(first[position] and not trains[position] for position in before))
    return first


def _list_sample_bytes(calls: tuple[ModuleCall, ...]) -> list[float]:
    """Return for every call the bytes of tensors of the batch that no call before reads."""
    seen: set[str] = set()
    sizes = []
    for call in calls:
        read = {source: s.value.bytes for s in call.inputs if (source := str(s.source)).startswith("sample:")}
        sizes.append(float(sum(size for source, size in read.items() if source not in seen)))
        seen |= read.keys()
    return sizes


def _list_shared_grad_bytes(calls: tuple[ModuleCall, ...], operators: Sequence[Operator]) -> list[float]:
    """Return `CallWork.shared_grad_bytes` of every call."""
    uses: dict[str, list[int]] = {}
    for position, call in enumerate(calls):
        for name in itertools.chain.from_iterable(operators[at].trained for at in call.operators):
            uses.setdefault(name, []).append(position)
    sizes = [0.0] * len(calls)
    for param in {param.name: param for call in calls for param in call.parameters if param.trainable}.values():
        counts = Counter(uses.get(param.name, ()))
        first, last = min(counts, default=0), max(counts, default=0)
        for position, count in counts.items():
            if position < last or count > 1:  # its own, which torch adds up to a new sum
                sizes[position] += 2 * param.bytes
        for position in range(first + 1, last + 1):
            sizes[position] += param.bytes
    return sizes


def _list_behind_weights(calls: tuple[ModuleCall, ...], trains: list[bool], pieces: Sequence[int]) -> list[float]:
    """Return `CallWork.behind_weights_bytes` of every call."""
    last = max((position for position, is_trained in enumerate(trains) if is_trained), default=None)
    if last is None or pieces[last] != pieces[-1]:
        return [0.0] * len(calls)
    sizes = [float(call.returned_bytes + (call.saved_bytes if at > last else 0)) for at, call in enumerate(calls)]
    return [0.0] * last + list(itertools.accumulate(sizes[last:]))


def _without_outputs(work: CallWork) -> CallWork:
    """Return a call in a loop that lets go of what the model returns as soon as it has the loss.

    What counts only with stages (`block_saved_bytes`, `behind_weights_bytes`) stays that of the other loop.
    """
    call = work.call.without_outputs()
    checkpoint_bytes = _bytes(source.value for source in call.inputs if not _is_held(source))
    return replace(work, call=call, checkpoint_bytes=checkpoint_bytes, former_bytes=0.0)


def _is_held(source: CallInput) -> bool:
    """Return whether an input is there all through a step, or with its micro-batch, whoever reads it."""
    return source.is_returned or str(source.source).startswith("sample:")


def _may_be_sharded(call: ModuleCall) -> bool:
    return call.kind in ("Linear", "Embedding") or call.last_dim_parts > 1 or call.token_parts > 1


def _bytes(tensors: Iterable[TensorShape]) -> float:
    return float(sum(tensor.bytes for tensor in tensors))
