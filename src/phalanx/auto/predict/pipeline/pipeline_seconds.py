"""`PipelineSeconds`: what a step takes beyond the work of its fullest stage: sends, and waits for others (pure)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.auto.predict.pipeline.interleaved_schedule import StageSeconds, interleaved_seconds
from phalanx.auto.predict.pipeline.stage_waits import StagePasses, find_pipeline_seconds

if TYPE_CHECKING:
    from phalanx.auto.predict.step_seconds import StepSeconds


MOST_PASSES = 100_000
"""Passes of a schedule that are computed in its order, which takes 0.3 s."""

_ROUNDS = 3
"""Rounds of micro-batches that are, at least."""


class PipelineSeconds:
    """The stages of one step; one stage sends nothing and waits for nobody.

    Args:
        step: The passes of its blocks.
        most_passes: Schedules with more passes take the formula of equal stages.
    """

    def __init__(self, step: StepSeconds, most_passes: int = MOST_PASSES) -> None:
        self.step, self.run, self.most_passes = step, step.run, most_passes

    @cached_property
    def send(self) -> float:
        """Seconds of sends, but for those of the first micro-batch."""
        return min(self._send, self.waits) if self._needs_order else self._send

    @cached_property
    def waits(self) -> float:
        """Seconds in which the fullest stage waits, for sends or for others."""
        step, count = self.step, self.run.full_micro_batches
        work = step.layers * (step.forward + step.backward) + step.head_on_top + step.constants.micro_batch_s
        if self._follows_schedule:
            return self._schedule_s - count * work
        waits = self._send + self._idle + self._first_sends
        return max(waits, self._chain_s - count * work) if self._needs_order else waits

    @property
    def _chain_s(self) -> float:
        """Seconds of a micro-batch through all stages and back, and of all others through the longest one."""
        step, par = self.step, self.run.parallel
        weights = step.weights if self.run.schedule == "zero-bubble" else 0.0
        block, stages = step.forward + step.backward - weights, par.pp * par.vpp
        through = self.run.model.layers * block + sum(step.ends) + par.pp * step.constants.micro_batch_s
        later = (self.run.full_micro_batches - 1) * (step.layers / par.vpp * block + max(step.ends))
        return through + later + 2 * (stages - 1) * step.send_once

    @property
    def _follows_schedule(self) -> bool:
        """Whether all passes and sends are computed in the order of the schedule: where it takes that, and not long."""
        run, par = self.run, self.run.parallel
        count = min(run.full_micro_batches, _ROUNDS * max(par.pp, run.round_size))
        if run.is_v:  # whose order is written for as many as fill it
            count = max(count, 2 * par.pp - 1)
        kinds = 3 if run.schedule == "zero-bubble" else 2
        return self._needs_order and kinds * par.pp * par.vpp * count <= self.most_passes

    @cached_property
    def _needs_order(self) -> bool:
        """Whether ranks with several stages wait for each other more than a formula says.

        They do where stages have different numbers of blocks, where rounds are not as many micro-batches as stages (the
        first of a larger round waits for the rest before it goes on, and ranks wait for a smaller one), where a send
        takes longer than half a forward pass, and in a V.
        """
        run, par = self.run, self.run.parallel
        if par.pp == 1 or par.vpp == 1 or run.schedule == "gpipe":
            return False
        is_uneven = run.round_size != par.pp or run.full_micro_batches % par.pp or run.model.layers % (par.pp * par.vpp)
        is_slow = run.overlap.pp and 2 * self.step.send_once > self.step.layers / par.vpp * self.step.forward
        return bool(run.is_v or run.all_forward_first or is_uneven or is_slow)

    @property
    def _schedule_s(self) -> float:
        """Seconds of all passes and sends in the order of a schedule of several stages a rank."""
        run, par, splits = self.run, self.run.parallel, self.run.schedule == "zero-bubble"
        return interleaved_seconds(
            [self._pass_seconds(stage, splits=splits) for stage in range(par.pp * par.vpp)],
            run.order,
            run.order_rules,
            contention=self.step.constants.contention if run.overlap.pp else None,
            ranks=par.pp,
            round_size=par.pp if run.is_v else run.round_size,
        )

    def _pass_seconds(self, stage: int, *, splits: bool) -> StageSeconds:
        """Return the seconds of the passes of one stage; gradients of weights apart where a schedule splits them."""
        own, sums = self.step.stage_blocks[stage], self.step.exchanges.vocabulary_sum
        is_last = stage == len(self.step.stage_blocks) - 1
        weights = own * self.step.weights + (self.step.head.weights if is_last else 0.0) if splits else 0.0
        return StageSeconds(
            forward=own * self.step.forward
            + self.step.constants.micro_batch_s / self.run.parallel.vpp
            + (sums if stage == 0 else 0.0)
            + (self.step.head.forward if is_last else 0.0),
            backward=own * self.step.backward
            + (self.step.embedding_backward if stage == 0 else 0.0)
            + (self.step.head.backward + sums if is_last else 0.0)
            - weights,
            weights=weights,
            send=self.step.send_once,
        )

    @property
    def _first_sends(self) -> float:
        """Seconds of the sends of the first micro-batch through all stages and back: nothing runs beside them."""
        par, overlaps = self.run.parallel, self.run.overlap.pp
        if overlaps:
            return 2 * (par.pp * par.vpp - 1) * self.step.send_once
        return 0.0 if par.vpp == 1 else max(0.0, 2 * (par.pp - 1) * self.step.send_once - self._bare_sends)

    @property
    def _bare_sends(self) -> float:
        """Seconds by which sends of a micro-batch that hold up ranks make the fullest rank slower.

        The first rank and the last send to one neighbour only, those between to two.
        """
        par = self.run.parallel
        at_ends, between = 2 * par.vpp - 1, 2 * par.vpp if par.pp > 2 else 0
        head = self.step.head_on_top
        return max(head + at_ends * self.step.send_once, between * self.step.send_once) - head

    @cached_property
    def _send(self) -> float:
        """Seconds a step spends between stages besides `_first_sends`."""
        run, par, count = self.run, self.run.parallel, self.run.micro_batches
        if par.pp == 1:
            return 0.0
        if not self.run.overlap.pp and par.vpp == 1:
            return self._find_pipeline_s(self.step.send_once) - self._find_pipeline_s(0.0)
        if not self.run.overlap.pp:
            return count * self._bare_sends
        once, contention = self.step.send_once, self.step.constants.contention
        ways = [self.step.layers / par.vpp * way for way in (self.step.forward, self.step.backward)]
        shared = [contention * min(once, way) for way in ways]
        if run.schedule == "gpipe":
            return max(0.0, count - 1) * self._added_by_way + sum(shared)
        if par.vpp > 1:
            later, slower = count - par.pp, par.vpp * sum(shared)
            return later * self._added_by_several(slower) + par.pp * slower
        exposed = self._exposed_sends
        hidden = max(0.0, count * self._sends_of_rank * once - exposed)
        return exposed + min(count * sum(shared), contention * hidden)

    @property
    def _added_by_way(self) -> float:
        """Seconds by which sends beside the passes of one way make a micro-batch of GPipe slower, both ways."""
        once, contention, count = self.step.send_once, self.step.constants.contention, self.run.parallel.pp
        stages = [self._pass_seconds(stage, splits=False) for stage in range(count)]
        forward, backward = [own.forward for own in stages], [own.backward for own in stages]
        added = 0.0
        for way, silent in ((forward, count - 1), (backward, 0)):  # what the stage at the end gives, nobody needs
            slower = [contention * min(once, own) * (stage != silent) for stage, own in enumerate(way)]
            added += max(once, *(own + more for own, more in zip(way, slower, strict=True))) - max(way)
        return added

    def _added_by_several(self, slower: float) -> float:
        """Return the seconds by which sends make a micro-batch of the fullest of ranks with several stages slower.

        Args:
            slower: Seconds by which sends that passes hide slow a rank that has both neighbours in every stage.
        """
        blocks, head = self.step.layers * (self.step.forward + self.step.backward), self.step.head_on_top
        at_ends = 2 * self.run.parallel.vpp - 1
        slowest = blocks + head + slower * at_ends / (at_ends + 1)
        if self.run.parallel.pp > 2:
            slowest = max(slowest, blocks + slower)
        return max(slowest, self._sends_of_rank * self.step.send_once) - blocks - head

    @property
    def _sends_of_rank(self) -> int:
        """Sends of a micro-batch of a rank that has most: of two ranks, each has one neighbour in one place."""
        return 2 * self.run.parallel.vpp - (1 if self.run.parallel.pp == 2 else 0)

    @property
    def _exposed_sends(self) -> float:
        """Seconds of sends of 1F1B and of zero bubble that no pass hides: the simulation of equal stages.

        Zero bubble hides beside gradients of weights, of which the first micro-batches have none yet.
        """
        once, par, count = self.step.send_once, self.run.parallel, self.run.micro_batches
        later = max(0.0, count - par.pp)
        a_round = (par.pp - 1) / par.pp * 2 * once
        if self.run.schedule == "zero-bubble":
            filled = (par.pp - 1) / par.pp * self.step.layers * self.step.weights
            first = max(0.0, min(count, par.pp) * (a_round - self._slack) - 2 * once)
            return first + later * max(0.0, a_round - self._slack - filled)
        return max(0.0, count * (a_round - self._slack) - 2 * once)

    @cached_property
    def _slack(self) -> float:
        """Seconds of a micro-batch for which a stage waits on average for the slowest; 1F1B hides no more of its sends.

        It has as many micro-batches on their way as stages: one comes back to the first stage, over all stages and
        sends, before the first stage goes on.
        """
        run, block = self.run, self.step.forward + self.step.backward
        all_stages = (
            run.model.layers * block
            + self.step.head.forward
            + self.step.head.backward
            + self.step.embedding_backward
            + 2 * self.step.exchanges.vocabulary_sum
        )
        return self.step.layers * block + self.step.head_on_top - all_stages / run.parallel.pp

    @property
    def _idle(self) -> float:
        """Seconds for which the fullest stage waits, sends left out.

        Of several stages a rank, the first micro-batch goes through one of each other rank, and in the end a whole
        round comes by the embedding, long after it has passed the projection.
        """
        run, par, count = self.run, self.run.parallel, self.run.micro_batches
        if par.pp == 1:
            return 0.0
        if par.vpp == 1:
            fullest = (
                self.step.layers * (self.step.forward + self.step.backward)
                + self.step.head_on_top
                + self.step.constants.micro_batch_s
            )
            return max(0.0, self._find_pipeline_s(0.0) - count * fullest)
        ends = par.pp * (sum(self.step.ends) - self.step.head_on_top)
        own = self.step.layers / par.vpp
        splits = run.schedule == "zero-bubble"
        weights = own * self.step.weights if splits else 0.0
        forward = own * self.step.forward + self.step.constants.micro_batch_s / par.vpp
        stage = StagePasses(forward, own * self.step.backward - weights, weights)
        return find_pipeline_seconds([stage] * par.pp, par.pp) - par.pp * sum(stage) + ends

    def _find_pipeline_s(self, send: float) -> float:
        """Return the seconds of all passes of one stage a rank, of which each holds its rank up while it sends."""
        run, count = self.run, self.run.parallel.pp
        stages = []
        for stage in range(count):
            own = self._pass_seconds(stage, splits=run.schedule == "zero-bubble")
            onward, backward = (send if stage < count - 1 else 0.0), (send if stage else 0.0)
            stages.append(StagePasses(own.forward + onward, own.backward + backward, own.weights))
        return find_pipeline_seconds(stages, run.micro_batches, in_turn=not run.all_forward_first)
