"""`ExchangeSeconds`: what the gradients and parameters that replicas exchange once a step add to it (pure)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.auto.predict.pipeline.gradient_exchange import GradientExchange
from phalanx.auto.predict.rank_groups import count_tables

if TYPE_CHECKING:
    from phalanx.auto.predict.step_seconds import StepSeconds


class ExchangeSeconds:
    """The exchanges of one step; shards that every pass gathers and scatters are in its passes."""

    def __init__(self, step: StepSeconds) -> None:
        self.step, self.run = step, step.run

    @cached_property
    def opening(self) -> float:
        """Seconds of gathers before the first pass, with nothing beside them.

        Of what a sharded optimizer updated (ZeRO 1) all, or where the software gathers it beside the first forward pass
        a block and a table.
        """
        exchanges, par = self.step.exchanges, self.run.parallel
        if par.zero >= 2:
            return self.step.first_gathers
        if par.zero == 0:
            return 0.0
        if self._gathers_updates_beside:
            return exchanges.gather + exchanges.gather_of(exchanges.table)
        blocks = sum(exchanges.gather_of(part, self.step.layers) for part in exchanges.block_parameters)
        return blocks + exchanges.gather_of(exchanges.table, count_tables(self.run))

    @property
    def _gathers_updates_beside(self) -> bool:
        run = self.run
        return run.parallel.zero == 1 and run.overlap.dp and run.habits.gathers_beside_forward

    def added_to_first_pass(self, stage: int) -> float:
        """Return the seconds by which gathers of parameters make the first forward pass of a stage longer.

        Stages of FSDP gather once a step, when their first micro-batch comes; the first block of each rank is gathered
        before (`opening`). Of what a sharded optimizer updated, only the first stage does not wait meanwhile.
        """
        par, exchanges = self.run.parallel, self.step.exchanges
        blocks = self.step.stage_blocks[stage] - (stage < par.pp)
        a_block = self.step.forward_beside(exchanges.gather) - self.step.forward
        if par.zero >= 2 and par.pp > 1:
            return blocks * a_block
        if stage or not self._gathers_updates_beside:
            return 0.0
        others = (count_tables(self.run) - 1) * exchanges.gather_of(exchanges.table)
        tables = self.step.forward_with_tables(exchanges.gather, others) - self.step.forward_with_tables(
            exchanges.gather, 0.0
        )
        return blocks * a_block + tables

    @cached_property
    def gradients(self) -> float:
        """Seconds of the gradients' collectives that nothing hides."""
        run, par, exchanges = self.run, self.run.parallel, self.step.exchanges
        if par.zero >= 2 and par.pp == 1:
            return self.step.first_gathers + self.step.last_scatters
        stages = range(len(self.step.stage_blocks) if par.zero >= 2 else 1)
        bare = exchanges.sum_of_tied_tables + self.opening + sum(map(self.added_to_first_pass, stages))
        if par.zero >= 2:  # torch scatters when all backward passes of a stage are through, and waits for it
            return (
                bare + self.step.layers * exchanges.scatter + count_tables(run) * exchanges.scatter_of(exchanges.table)
            )
        blocks = sum(exchanges.reduce_of(part, self.step.layers) for part in exchanges.block_parameters)
        table = exchanges.reduce_of(exchanges.table)
        if not run.overlap.dp:
            return bare + blocks + count_tables(run) * table
        return bare + self.exchange(blocks, table).seconds(self.step.constants.contention)

    def exchange(self, blocks: float, table: float) -> GradientExchange:
        """Return the exchange of gradients of so many seconds of a rank's blocks, and of a table."""
        run, par, tables = self.run, self.run.parallel, count_tables(self.run)
        splits, own = run.schedule == "zero-bubble" and par.pp > 1, self.step.stage_blocks[0]
        own_tables = tables if par.pp == 1 else 1
        last_pass = own * (self.step.weights if splits else self.step.backward)
        inputs = self.step.backward - (self.step.weights if splits else 0.0)
        if not splits:
            last_pass += self.step.embedding_backward + (self.step.head.backward if par.pp == 1 else 0.0)
        return GradientExchange(
            all_buckets=blocks + tables * table,
            own=blocks * own / self.step.layers + own_tables * table,
            last_bucket=table,
            buckets=own + own_tables,
            last_pass=last_pass,
            before=max(par.pp * inputs, run.round_size * self.step.backward) * (self.step.layers - own),
            busy=min(1.0, run.micro_batches / par.pp),
            passes_in_turn=1 if splits else par.pp,
        )
