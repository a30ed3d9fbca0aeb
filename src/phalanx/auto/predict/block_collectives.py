"""`BlockCollectives`: seconds of the collectives that a block's passes wait for or hide (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from phalanx.auto.cost.collectives import ClusterLinks, GroupTopology
from phalanx.auto.predict.rank_groups import (
    RankParameters,
    expert_ranks,
    expert_tensor_ranks,
    group_topology,
    list_block_parameters,
    place_vocabulary,
)
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.transformer import (
    KernelWork,
    boundary_bytes,
    keeps_every_second_product,
    routed_rows,
    sent_rows,
)


@dataclass(frozen=True)
class BlockCollectives:
    """Collectives of one block on one rank, per micro-batch."""

    run: RunSpec
    links: ClusterLinks
    block: KernelWork
    """What they run beside."""

    @cached_property
    def tensor_parallel_forward(self) -> float:
        """Seconds of the sums over tensor-parallel ranks in a forward pass: of attention, and of the feed-forward."""
        return self.dense_sum + self._routed_sum

    @cached_property
    def dense_sum(self) -> float:
        """Seconds of those of dense layers, all but experts, that no product hides."""
        return self._beside_products(self._dense_sum)

    @cached_property
    def _dense_sum(self) -> float:
        return (1 if self.run.model.experts else 2) * self._sum_of(boundary_bytes(self.run))

    @cached_property
    def _routed_sum(self) -> float:
        """Seconds of those of experts' tokens, which no product runs beside."""
        run = self.run
        if not run.model.experts:
            return 0.0
        if run.parallel.ep == 1 or not run.parallel.sequence_parallel:
            return self._sum_of(boundary_bytes(run))
        # The ranks that share an expert gather the tokens that were sent to any of them.
        return self._sum_of(run.element_bytes * routed_rows(run) * run.model.hidden, expert_tensor_ranks(run))

    def _sum_of(self, size: float, layout: GroupTopology | None = None) -> float:
        """Return the seconds of an all-reduce, or of an all-gather and a reduce-scatter."""
        # Of the two, gathers of what is multiplied in 8 bit carry 8 bit; reduce-scatters and all-reduces carry 16.
        share = 0.75 if self._gathers_8_bit else 1.0
        return self.links.all_reduce(share * size, layout or group_topology(self.run, "tp"))

    @property
    def _gathers_8_bit(self) -> bool:
        return self.run.precision == "fp8" and self.run.parallel.sequence_parallel

    @property
    def _gather_share(self) -> float:
        """Part of a sum that is its gather, where tokens between two sums are cut over the ranks."""
        return 1 / 3 if self._gathers_8_bit else 1 / 2

    @property
    def _sums_again(self) -> float:
        """Part of the sums of a forward pass that recomputation repeats.

        PyTorch's stops before the last product, so before the sum of what it gives. With its policy of every second
        product, scatters are kept, and whole sums are not.
        """
        run = self.run
        if keeps_every_second_product(run):
            return self._gather_share if run.parallel.sequence_parallel else 1 / 2
        if run.recompute != "full":
            return 0.0
        if not run.habits.stops_checkpoints or run.model.experts:
            return 1.0
        return 1 - (1 - self._gather_share) / 2 if run.parallel.sequence_parallel else 1 / 2

    @property
    def _gathered_again(self) -> float:
        """Seconds of the second gather of inputs in a backward pass, where a rank keeps a part of them."""
        gathers = self.run.habits.adds_in_products and self.run.parallel.sequence_parallel
        return self._gather_share * self._dense_sum if gathers else 0.0

    @cached_property
    def tensor_parallel_backward(self) -> float:
        """Seconds of the same in a backward pass, those of recomputation included.

        Megatron sums the gradient of an input beside the gradients of the weights that the input came to. Where tokens
        are cut over the ranks, only its scatter is there to hide, and the input itself, of which a rank keeps a part,
        is gathered again beside the gradient of the input. Sums of routed tokens run beside nothing.
        """
        sums, contention = self.tensor_parallel_forward * (1 + self._sums_again), self.links.constants.contention
        if not self.run.habits.adds_in_products:
            return sums
        weights = self.block.weights * self._column_share
        if not self.run.parallel.sequence_parallel:
            return sums - (1 - contention) * min(self.dense_sum, weights)
        gathered, scattered = (share * self.dense_sum for share in (self._gather_share, 1 - self._gather_share))
        inputs = min(gathered, weights)  # gradients of inputs take as long as those of weights
        return sums - (1 - contention) * min(scattered, weights) + gathered - (1 - contention) * inputs

    @property
    def _column_share(self) -> float:
        """Part of a block's dense weights in layers that are cut by columns: their input is whole on every rank."""
        model = self.run.sharded_model
        wide = 0 if model.experts else (2 if model.gated else 1) * model.inner
        columns = model.hidden * (model.qkv + wide)
        every = model.attention_parameters + max(1, model.top_k) * model.expert_parameters
        return columns / every

    @cached_property
    def vocabulary_sum(self) -> float:
        """Seconds of the sum over ranks that each have some rows of the embedding, and of the projection's gradient."""
        return self.links.all_reduce(boundary_bytes(self.run), group_topology(self.run, "tp"))

    @cached_property
    def experts_forward(self) -> float:
        """Seconds of sending tokens to the experts and back in a forward pass."""
        run = self.run
        if not run.model.experts or run.parallel.ep == 1:
            return 0.0
        # The busiest rank gets the most tokens, and sends as many back; all others wait for it.
        size = run.expert_load * run.element_bytes * sent_rows(run) * run.model.hidden
        return 2 * self.links.all_to_all(size, expert_ranks(run))

    @cached_property
    def experts_backward(self) -> float:
        """Seconds of the same in a backward pass, those of recomputation included."""
        return self.experts_forward * self._passes_back

    @cached_property
    def context_forward(self) -> float:
        """Seconds by which keys and values, which go round a ring beside attention, make a forward pass longer."""
        return self._beside(self._ring, self.block.attention)

    @cached_property
    def context_backward(self) -> float:
        """Seconds of the same in a backward pass: their gradients go round too. Those of recomputation included."""
        again = self.context_forward if self.run.recompute == "full" else 0.0
        return self._beside(2 * self._ring, self.block.attention_backward) + again

    @cached_property
    def on_links_of_shards(self) -> tuple[float, float]:
        """Seconds in which a forward and a backward pass use the links that collectives of shards need.

        Those cannot run beside them. A ring takes of the links of a node what it carries: all if it stays in the node,
        and a small part if the ports of nodes are slower.
        """
        run, again = self.run, self._passes_back - 1
        sums = self._dense_sum + self._routed_sum
        kinds = (
            (group_topology(run, "tp"), sums, sums * (1 + self._sums_again) + self._gathered_again),
            (expert_ranks(run), self.experts_forward, self.experts_backward),
            (group_topology(run, "cp"), self._ring, self._ring * (2 + again)),
        )
        used = [(self._share_with_shards(layout), forward, backward) for layout, forward, backward in kinds]
        return sum(share * forward for share, forward, _ in used), sum(share * backward for share, _, backward in used)

    def _share_with_shards(self, layout: GroupTopology) -> float:
        """Return for how much of its time a collective of these ranks keeps those of shards from their links."""
        gathers = [(self.gather_of(part) + self.scatter_of(part), part.shards) for part in self.block_parameters]
        total = sum(seconds for seconds, _ in gathers)
        return sum(seconds * self._overlap(layout, shards) for seconds, shards in gathers) / total if total else 0.0

    def _overlap(self, layout: GroupTopology, shards: GroupTopology) -> float:
        if min(layout.ranks, shards.ranks) == 1:
            return 0.0
        if (layout.ranks > layout.in_node) == (shards.ranks > shards.in_node):
            return 1.0
        rates = self.links.bandwidth(layout), self.links.bandwidth(shards)
        return min(rates) / max(rates)

    @cached_property
    def block_parameters(self) -> list[RankParameters]:
        """The parameters of the block on this rank."""
        return list_block_parameters(self.run)

    @cached_property
    def table(self) -> RankParameters:
        """The rows of a table of the vocabulary on this rank."""
        return place_vocabulary(self.run)

    @cached_property
    def sum_of_tied_tables(self) -> float:
        """Seconds to add up the gradients of a table of which the first and the last stage hold a copy each."""
        run, table, par = self.run, self.table, self.run.parallel
        if run.has_one_end or not run.model.tied:
            return 0.0
        stride, per_node = par.stride("pp"), run.cluster.per_node
        size = run.accumulated_bytes * table.count
        if par.zero >= 2:
            size = run.gradient_bytes * table.count / table.shards.ranks
        return self.links.all_reduce(
            size, GroupTopology(2, 2 if stride * par.pp <= per_node else 1, min(stride, per_node))
        )

    @cached_property
    def gather(self) -> float:
        """Seconds to gather the parameters of the block from their shards."""
        return sum(self.gather_of(part) for part in self.block_parameters)

    @cached_property
    def scatter(self) -> float:
        """Seconds to add up its gradients and leave each rank its shard."""
        return sum(self.scatter_of(part) for part in self.block_parameters)

    def gather_of(self, part: RankParameters, times: float = 1.0) -> float:
        """Return the seconds to gather so many times the parameters from their shards."""
        return self.links.all_gather(self.run.element_bytes * times * part.count, part.shards)

    def scatter_of(self, part: RankParameters) -> float:
        """Return the seconds to add up their gradients, and those of shards over all ranks with the same shard."""
        return self._scatter(self.run.gradient_bytes * part.count, part)

    def _scatter(self, size: float, part: RankParameters) -> float:
        copies = self.links.all_reduce(size / part.shards.ranks, part.shard_replicas)
        return self.links.all_gather(size, part.shards) + copies

    def reduce_of(self, part: RankParameters, times: float = 1.0) -> float:
        """Return the seconds to add up gradients that replicas hold whole, of so many times the parameters.

        With ZeRO 1 a replica gets those of its shard alone; it gathers parameters after the update.
        """
        size = self.run.accumulated_bytes * times * part.count
        return self._scatter(size, part) if self.run.parallel.zero else self.links.all_reduce(size, part.replicas)

    @cached_property
    def _ring(self) -> float:
        run, par = self.run, self.run.parallel
        if par.cp == 1:
            return 0.0
        own = 2 * boundary_bytes(run) * run.sharded_model.keys_heads / run.model.heads / par.tp
        return self.links.all_gather(own * par.cp, group_topology(run, "cp"))

    @property
    def _passes_back(self) -> int:
        """How often a backward pass sends what a forward pass sends."""
        return 2 if self.run.recompute == "full" else 1

    def _beside_products(self, seconds: float) -> float:
        if not self.run.overlap.tp:
            return seconds
        return seconds - (1 - self.links.constants.contention) * min(seconds, self.block.forward)

    def _beside(self, communication: float, computation: float) -> float:
        """Return the seconds that communication adds to computation that it runs beside."""
        shared = min(communication, computation)
        return communication - shared + self.links.constants.contention * shared
