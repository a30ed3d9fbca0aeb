"""`StepSeconds`: one optimizer step of a transformer run, summed up from the passes of its blocks (pure)."""

from __future__ import annotations

import math
from functools import cached_property

from phalanx.auto.cost.collectives import ClusterLinks
from phalanx.auto.cost.constants import Constants, constants_of
from phalanx.auto.cost.kernels import Kernels
from phalanx.auto.predict.block_collectives import BlockCollectives
from phalanx.auto.predict.pipeline.exchange_seconds import ExchangeSeconds
from phalanx.auto.predict.pipeline.pipeline_seconds import MOST_PASSES, PipelineSeconds
from phalanx.auto.predict.rank_groups import count_tables, group_topology
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.transformer import (
    FLOAT,
    KernelWork,
    block,
    boundary_bytes,
    embedding_backward,
    head,
    keeps_every_second_product,
    shard_copy_bytes,
)


class StepSeconds:
    """One optimizer step of a run, summed up from passes; `auto/simulate/run` lets them run one by one."""

    def __init__(self, run: RunSpec, constants: Constants) -> None:
        constants = constants_of(run.device, constants)
        self.run, self.constants = run, constants
        self.kernels = Kernels(run.device, constants, run.precision, fuses_casts=run.habits.attention == "native")
        self.links = ClusterLinks(run.device, run.cluster.node_gbps, constants, run.cluster.strided)
        self.block, self.head = block(run, self.kernels), head(run, self.kernels)
        self.embedding_backward = embedding_backward(run, self.kernels)
        self.exchanges = BlockCollectives(run, self.links, self.block)
        self.replica_exchange = ExchangeSeconds(self)
        self.layers = math.ceil(run.model.layers / run.parallel.pp)  # of the fullest stage, which all others wait for

    def breakdown(self, most_passes: int = MOST_PASSES) -> dict[str, float]:
        """Return the seconds of a step by cause; pipelines of more passes take a formula of equal stages."""
        count = self.run.micro_batches
        alone = self.layers * (self.compute_forward + self.compute_backward)
        passes = self.layers * (self.forward + self.backward)
        pipeline = PipelineSeconds(self, most_passes)
        return {
            "compute_s": count * (alone + self.head_on_top + self.constants.micro_batch_s),
            "exposed_communication_s": count * (passes - alone + sum(self.table_waits)),
            "pipeline_send_s": pipeline.send,
            "pipeline_bubble_s": pipeline.waits - pipeline.send,
            "gradients_s": self.replica_exchange.gradients,
            "optimizer_s": self.optimizer + self.constants.step_s,
        }

    @property
    def head_on_top(self) -> float:
        """Seconds by which embedding and projection make their stages slower than the fullest of the others."""
        embedding, projection = self.ends
        block = self.forward + self.backward
        if self.run.has_one_end:
            own = self.stage_blocks[0] + (self.stage_blocks[-1] if self.run.parallel.pp > 1 else 0)
            return max(0.0, embedding + projection - (self.layers - own) * block)
        fewer = self.layers - self.run.model.layers // self.run.parallel.pp
        return max(embedding, projection - fewer * block)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Seconds of the embedding on the first stage, and of the projection and the loss on the last."""
        projection = self.head.forward + self.head.backward + self.exchanges.vocabulary_sum
        return self.embedding_backward + self.exchanges.vocabulary_sum, projection

    @cached_property
    def stage_blocks(self) -> list[int]:
        """Blocks of every stage: equal numbers, the first ones have one more where they do not divide."""
        return self.run.stage_blocks

    # -- one block -------------------------------------------------------------------------------------------

    @cached_property
    def _launch(self) -> float:
        return self.constants.compiled_launch_s if self.run.compile else self.constants.launch_s

    @cached_property
    def recompute(self) -> KernelWork:
        """What the backward pass recomputes before it can begin."""
        run, passes = self.run, self.block
        if run.recompute == "full":
            # PyTorch's checkpoints stop as soon as everything that was kept is there again: before the last product.
            left_out = passes.closing_product if run.habits.stops_checkpoints else 0.0
            return KernelWork(forward=passes.forward - left_out, backward=0.0, forward_launches=passes.forward_launches)
        if keeps_every_second_product(run):
            half = (passes.forward - passes.attention - passes.plain) / 2
            return KernelWork(forward=half + passes.plain, backward=0.0, forward_launches=passes.forward_launches / 2)
        if run.recompute == "selective" and not run.model.flash:
            return KernelWork(forward=passes.attention, backward=0.0, forward_launches=passes.attention_launches)
        return KernelWork(forward=0.0, backward=0.0)

    @cached_property
    def _issue_forward(self) -> float:
        return self.block.forward_launches * self._launch

    @cached_property
    def _issue_backward(self) -> float:
        return (self.block.backward_launches + self.recompute.forward_launches) * self._launch

    @cached_property
    def compute_forward(self) -> float:
        """Seconds of a block's forward pass without communication."""
        return max(self.block.forward, self._issue_forward)

    @cached_property
    def compute_backward(self) -> float:
        """Seconds of a block's backward pass, recomputation included, without communication."""
        return max(self.block.backward + self.recompute.forward, self._issue_backward)

    @cached_property
    def forward(self) -> float:
        """Seconds of a block's forward pass."""
        return self.forward_beside(self._gathers)

    def forward_beside(self, gathers: float, more: float = 0.0) -> float:
        """Return the seconds of a block's forward pass, and of more computation, with gathers beside them."""
        device = self.block.forward + self.waits_forward + more
        return max(self._beside(device, self.exchanges.on_links_of_shards[0], gathers), self._issue_forward)

    @cached_property
    def backward(self) -> float:
        """Seconds of a block's backward pass, recomputation included."""
        return self._backward_beside(self._gathers + self._scatters)

    def _backward_beside(self, collectives: float, more: float = 0.0) -> float:
        """Return the same of a backward pass."""
        device = self.block.backward + self.recompute.forward + self.waits_backward + more
        return max(self._beside(device, self.exchanges.on_links_of_shards[1], collectives), self._issue_backward)

    @cached_property
    def collectives(self) -> tuple[float, float]:
        """Seconds of a block's collectives in its forward and its backward pass, hidden ones included."""
        return (
            self.waits_forward + self._gathers,
            self.waits_backward + self._gathers + self._scatters,
        )

    def _beside(self, device: float, on_links: float, shards: float) -> float:
        """Return the seconds of work with collectives of shards beside it.

        Args:
            device: Seconds of the work, waits included.
            on_links: Seconds of it in which other collectives use the links of those of shards.
            shards: Seconds of the collectives of shards.
        """
        if not self.run.overlap.dp or not shards:
            return device + shards
        busy = min(device, on_links)
        shared = min(device - busy, shards)
        return busy + max(device - busy, shards) + self.constants.contention * shared

    # -- communication ---------------------------------------------------------------------------------------

    @cached_property
    def waits_forward(self) -> float:
        """Seconds that a block's forward pass waits for collectives of sharded layers, experts and sequences."""
        exchanges = self.exchanges
        return exchanges.tensor_parallel_forward + exchanges.experts_forward + exchanges.context_forward

    @cached_property
    def waits_backward(self) -> float:
        """Seconds of the same in a backward pass."""
        exchanges = self.exchanges
        return exchanges.tensor_parallel_backward + exchanges.experts_backward + exchanges.context_backward

    @cached_property
    def parameters(self) -> float:
        """Parameters of this rank's layers."""
        return self.run.block_parameters * self.layers

    @cached_property
    def _frees_parameters(self) -> bool:
        """Whether every pass gathers what it needs (ZeRO 3); ZeRO 2 and stages gather once a step."""
        return self.run.parallel.zero == 3 and self.run.parallel.pp == 1

    @cached_property
    def _table_collectives(self) -> tuple[float, float]:
        """Seconds of the gathers and of the scatters of all tables of the vocabulary of a micro-batch."""
        run, exchanges = self.run, self.exchanges
        if run.parallel.zero < 2 or run.parallel.pp > 1:
            return 0.0, 0.0
        tables = count_tables(run)
        gathers = tables * exchanges.gather_of(exchanges.table) if self._frees_parameters else 0.0
        return gathers, tables * exchanges.scatter_of(exchanges.table)

    @cached_property
    def table_waits(self) -> tuple[float, float]:
        """Seconds that collectives of the vocabulary add to a forward and a backward pass.

        They run beside the projection and the block next to it.
        """
        gathers, scatters = self._table_collectives
        return (
            self.forward_with_tables(self._gathers, gathers) - self.forward_with_tables(self._gathers, 0.0),
            self._backward_with_tables(self._scatters, scatters) - self._backward_with_tables(self._scatters, 0.0),
        )

    def forward_with_tables(self, gathers: float, tables: float) -> float:
        """Return the seconds of a block and the projection, with gathers of a block and of tables beside them."""
        head = self.head.forward
        return max(self.forward_beside(gathers) + head, self.forward_beside(gathers + tables, head))

    def _backward_with_tables(self, scatters: float, tables: float) -> float:
        """Return the same of a backward pass, with scatters."""
        head, block = self.head.backward, self._gathers + scatters
        return max(self._backward_beside(block) + head, self._backward_beside(block + tables, head))

    @cached_property
    def first_gathers(self) -> float:
        """Seconds that a step waits for parameters which no pass gathers: first of all with nothing to run beside.

        What is gathered then is not beside the first forward pass. ZeRO 2 gathers the rest beside that pass.
        """
        exchanges, par = self.exchanges, self.run.parallel
        table = exchanges.gather_of(exchanges.table)
        if par.pp > 1:
            return exchanges.gather + table
        others = (count_tables(self.run) - 1) * table
        usual = self.forward_with_tables(self._gathers, self._table_collectives[0])
        first = exchanges.gather + table + self.forward_with_tables(0.0, others)
        if par.zero == 2:
            first += (self.layers - 1) * (self.forward_beside(exchanges.gather) - self.forward)
        return max(0.0, first - usual)

    @cached_property
    def last_scatters(self) -> float:
        """Seconds of the scatters after the last backward pass, of its last block and of the embedding.

        Nothing runs beside them, and they do not run beside that pass.
        """
        exchanges = self.exchanges
        table = exchanges.scatter_of(exchanges.table)
        usual = self._backward_with_tables(self._scatters, self._table_collectives[1])
        bare = exchanges.scatter + table + self._backward_with_tables(0.0, (count_tables(self.run) - 1) * table)
        return max(0.0, bare - usual)

    @cached_property
    def _gathers(self) -> float:
        return self.exchanges.gather if self._frees_parameters else 0.0

    @cached_property
    def _scatters(self) -> float:
        return self.exchanges.scatter if self.run.parallel.zero >= 2 and self.run.parallel.pp == 1 else 0.0

    @cached_property
    def send_once(self) -> float:
        """Seconds until the activations of a micro-batch are at the next stage."""
        run, par = self.run, self.run.parallel
        if par.pp == 1:
            return 0.0
        stride = par.stride("pp")
        across = stride * par.pp > run.cluster.per_node
        activation = boundary_bytes(run)
        # What all tensor-parallel ranks have, each sends, or a part that is gathered at the next stage (D. Narayanan et
        # al., 2021, section 4.1).
        gathers = run.habits.gathers_sends and not par.sequence_parallel
        size = activation / par.tp if gathers or par.sequence_parallel else activation
        send = self.links.send(size, across=across, sharing=min(stride, run.cluster.per_node))
        return send + (self.links.all_gather(activation, group_topology(run, "tp")) if gathers else 0.0)

    @cached_property
    def weights(self) -> float:
        """Seconds of the gradients of weights in a block's backward pass, which zero-bubble schedules compute apart."""
        return self.block.weights * self.compute_backward / (self.block.backward + self.recompute.forward)

    @cached_property
    def optimizer(self) -> float:
        """Seconds of Adam on what this rank updates, and of what copies gradients of stages into shards before."""
        run = self.run
        stage = [(self.layers, part) for part in self.exchanges.block_parameters]
        stage.append((count_tables(run), self.exchanges.table))
        updated = sum(times * part.count / (part.shards.ranks if run.parallel.zero else 1) for times, part in stage)
        moved = self.constants.optimizer_bytes if run.precision != "fp32" else 7 * FLOAT
        copied = shard_copy_bytes(run) * self.layers if run.parallel.pp > 1 else 0.0
        return self.kernels.streamed(moved * updated + copied)
