"""`StepSeconds`: one optimizer step of a transformer run, summed up from the passes of its blocks (pure)."""

from __future__ import annotations

import math
from functools import cached_property

from phalanx.auto.cost.collectives import ClusterLinks, GroupTopology
from phalanx.auto.cost.constants import Constants, constants_of
from phalanx.auto.cost.kernels import Kernels
from phalanx.auto.predict.memory_model import FLOAT
from phalanx.auto.predict.run_spec import Axis, RunSpec
from phalanx.auto.predict.transformer import HALF, KernelWork, block, boundary_bytes, head, keeps_every_second_product


def group_topology(run: RunSpec, axis: Axis) -> GroupTopology:
    """Return where the ranks of one axis lie, by the order of the ranks."""
    ranks, stride = getattr(run.parallel, axis), run.parallel.stride(axis)
    per_node = run.cluster.per_node
    return GroupTopology(ranks, max(1, min(ranks, per_node // stride)), min(stride, per_node))


class StepSeconds:
    """One optimizer step of a run, summed up from passes; `auto/simulate/run` lets them run one by one."""

    def __init__(self, run: RunSpec, constants: Constants) -> None:
        constants = constants_of(run.device, constants)
        self.run, self.constants = run, constants
        self.kernels = Kernels(run.device, constants, run.precision, fuses_casts=run.habits.attention == "native")
        self.links = ClusterLinks(run.device, run.cluster.node_gbps, constants, run.cluster.strided)
        self.block, self.head = block(run, self.kernels), head(run, self.kernels)
        self.layers = math.ceil(run.model.layers / run.parallel.pp)  # of the fullest stage, which all others wait for

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of a step by cause."""
        run, count = self.run, self.run.micro_batches
        alone = self.layers * (self.compute_forward + self.compute_backward)
        passes = self.layers * (self.forward + self.backward)
        # While the fullest stage waits, its first micro-batch goes through the blocks of all others, and back.
        each = self._send + self.constants.micro_batch_s
        others = (run.model.layers - self.layers) / self.layers * passes + (run.parallel.pp - 1) * each
        send, bubble = count * self._send, self._idle_share * others / run.parallel.vpp
        if self._is_unevenly_interleaved:
            waits = self._schedule_s - count * (passes + self._head_on_top + self.constants.micro_batch_s)
            send = min(send, waits)
            bubble = waits - send
        return {
            "compute_s": count * (alone + self._head_on_top + self.constants.micro_batch_s),
            "exposed_communication_s": count * (passes - alone),
            "pipeline_send_s": send,
            "pipeline_bubble_s": bubble,
            "gradients_s": self._gradients,
            "optimizer_s": self.optimizer + self.constants.step_s,
        }

    @property
    def _head_on_top(self) -> float:
        """Seconds by which the projection to the vocabulary makes its stage slower than the fullest of the others."""
        fewer = self.layers - self.run.model.layers // self.run.parallel.pp
        return max(0.0, self.head.forward + self.head.backward - fewer * (self.forward + self.backward))

    @property
    def stage_blocks(self) -> list[int]:
        """Blocks of every stage: equal numbers, the first ones have one more where they do not divide."""
        layers, stages = self.run.model.layers, self.run.parallel.pp * self.run.parallel.vpp
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]

    @property
    def _is_unevenly_interleaved(self) -> bool:
        """Whether ranks have several stages with different numbers of blocks, which makes them wait for each other."""
        run, par = self.run, self.run.parallel
        is_interleaved = par.pp > 1 and par.vpp > 1 and run.schedule not in ("gpipe", "zero-bubble")
        return is_interleaved and run.micro_batches % par.pp == 0 and run.model.layers % (par.pp * par.vpp) > 0

    @property
    def _schedule_s(self) -> float:
        """Seconds of all passes and sends in the order of an interleaved schedule."""
        import numpy as np  # which most predictions do without

        from phalanx.auto.solver.interleaved import PassTimes, find_rank_ends

        run, blocks = self.run, np.array(self.stage_blocks)[:, None]
        forward = blocks * self.forward + self.constants.micro_batch_s / run.parallel.vpp
        backward = blocks * self.backward
        forward[-1] += self.head.forward
        backward[-1] += self.head.backward
        sends = np.full((2, *blocks.shape), self.send_once)
        sends[0, -1] = sends[1, 0] = 0.0
        if run.overlap.pp:
            forward += self.constants.contention * np.minimum(sends[0], forward)
            backward += self.constants.contention * np.minimum(sends[1], backward)
            delays = sends
        else:
            forward, backward, delays = forward + sends[0], backward + sends[1], np.zeros_like(sends)
        ways = PassTimes(forward, delays[0]), PassTimes(backward, delays[1])
        return float(find_rank_ends(*ways, run.parallel.pp, int(run.micro_batches)).max())

    # -- one block -------------------------------------------------------------------------------------------

    @cached_property
    def _launch(self) -> float:
        return self.constants.compiled_launch_s if self.run.compile else self.constants.launch_s

    @cached_property
    def recompute(self) -> KernelWork:
        """What the backward pass recomputes before it can begin."""
        run, whole = self.run, self.block
        if run.recompute == "full":
            # PyTorch's checkpoints stop as soon as everything that was kept is there again: before the last product.
            left_out = whole.last if run.habits.stops_checkpoints else 0.0
            return KernelWork(forward=whole.forward - left_out, backward=0.0, forward_launches=whole.forward_launches)
        if keeps_every_second_product(run):
            half = (whole.forward - whole.attention - whole.plain) / 2
            return KernelWork(forward=half + whole.plain, backward=0.0, forward_launches=whole.forward_launches / 2)
        if run.recompute == "selective" and not run.model.flash:
            return KernelWork(forward=whole.attention, backward=0.0, forward_launches=whole.attention_launches)
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
        device = self._beside(self.block.forward + self.tensor_parallel_forward, self._gathers)
        return max(device, self._issue_forward)

    @cached_property
    def backward(self) -> float:
        """Seconds of a block's backward pass, recomputation included."""
        compute = self.block.backward + self.recompute.forward + self.tensor_parallel_backward
        device = self._beside(compute, self._gathers + self._scatters)
        return max(device, self._issue_backward)

    @cached_property
    def collectives(self) -> tuple[float, float]:
        """Seconds of a block's collectives in its forward and its backward pass, hidden ones included."""
        return (
            self.tensor_parallel_forward + self._gathers,
            self.tensor_parallel_backward + self._gathers + self._scatters,
        )

    def _beside(self, device: float, communication: float) -> float:
        """Return the seconds of work with communication beside it."""
        if not self.run.overlap.dp:
            return device + communication
        shared = min(device, communication)
        return max(device, communication) + self.constants.contention * shared

    # -- communication ---------------------------------------------------------------------------------------

    @cached_property
    def tensor_parallel_forward(self) -> float:
        """Seconds of the collectives of one pass through a block that is cut over ranks, or deals tokens to experts."""
        run, par = self.run, self.run.parallel
        layout = group_topology(run, "tp")
        # Gathers of what is multiplied in 8 bit carry 8 bit; reduce-scatters and all-reduces carry 16.
        share = 0.75 if run.precision == "fp8" and par.sequence_parallel else 1.0
        seconds = 2 * self.links.all_reduce(share * boundary_bytes(run), layout)  # or all-gather and reduce-scatter
        if run.overlap.tp:
            beside = min(seconds, self.block.forward)
            seconds -= (1 - self.constants.contention) * beside
        if run.model.experts and par.ep > 1:
            experts = GroupTopology(par.ep, min(par.ep, run.cluster.per_node), min(par.tp, run.cluster.per_node))
            own = boundary_bytes(run) / (par.tp if par.sequence_parallel else 1)
            # The busiest rank gets the most tokens, and sends as many back; all others wait for it.
            seconds += 2 * self.links.all_to_all(run.expert_load * own * run.model.top_k, experts)
        if par.cp > 1:
            kv = 2 * boundary_bytes(run) * run.sharded_model.keys_heads / run.model.heads / par.tp
            ring = group_topology(run, "cp")
            # The ring runs beside attention, and shows where it is the longer.
            seconds += max(0.0, self.links.all_gather(kv * par.cp, ring) - self.block.attention)
        return seconds

    @cached_property
    def tensor_parallel_backward(self) -> float:
        """Seconds of the same collectives in a backward pass, those of recomputation included."""
        hidden = min(self.tensor_parallel_forward / 2, self.block.weights) if self.run.habits.adds_in_products else 0.0
        return self.tensor_parallel_forward * (2 if self.run.recompute == "full" else 1) - hidden

    @cached_property
    def replicas(self) -> GroupTopology:
        """The ranks that hold the same part of the model: all copies of it, and all parts of their sequences."""
        par = self.run.parallel
        in_node = group_topology(self.run, "dp").in_node * group_topology(self.run, "cp").in_node
        return GroupTopology(par.dp * par.cp, in_node, max(1, self.run.cluster.per_node // in_node))

    @cached_property
    def parameters(self) -> float:
        """Parameters of this rank's layers."""
        return self.run.block_parameters * self.layers

    @cached_property
    def shard_step(self) -> float:
        """Seconds to gather the parameters of one block from their shards, or to scatter its gradients."""
        replicas = self.replicas
        shards = replicas.ranks // self.run.parallel.hsdp
        layout = GroupTopology(shards, min(replicas.in_node, shards), replicas.sharing)
        return self.links.all_gather(HALF * self.parameters / self.layers, layout)

    @cached_property
    def scatter_step(self) -> float:
        """Seconds to add up the gradients of one block and leave each rank its shard."""
        return self.shard_step * self.run.gradient_bytes / HALF

    @cached_property
    def _gathers(self) -> float:
        return self.shard_step if self.run.parallel.zero == 3 and self.run.parallel.pp == 1 else 0.0

    @cached_property
    def _scatters(self) -> float:
        return self.scatter_step if self.run.parallel.zero >= 2 and self.run.parallel.pp == 1 else 0.0

    @cached_property
    def send_once(self) -> float:
        """Seconds until the activations of a micro-batch are at the next stage."""
        run, par = self.run, self.run.parallel
        if par.pp == 1:
            return 0.0
        stride = par.stride("pp")
        across = stride * par.pp > run.cluster.per_node
        size = boundary_bytes(run) / par.tp
        return self.links.send(size, across=across, sharing=min(stride, run.cluster.per_node))

    @cached_property
    def _send(self) -> float:
        """Seconds a micro-batch spends between stages, both ways."""
        once, par = self.send_once, self.run.parallel
        if self.run.overlap.pp:
            chunk = self.layers / par.vpp * self.forward
            once = max(0.0, once - chunk) + self.constants.contention * min(once, chunk)
        return 2 * par.vpp * once

    @cached_property
    def weights(self) -> float:
        """Seconds of the gradients of weights in a block's backward pass, which zero-bubble schedules compute apart."""
        return self.block.weights * self.compute_backward / (self.block.backward + self.recompute.forward)

    @cached_property
    def _idle_share(self) -> float:
        """What a stage waits, of the passes of all others: with zero bubble less what gradients of weights fill.

        That is forward + inputs - weights for each of the others, and no less than either pass for which others wait
        (`auto/solver/problem`).
        """
        if self.run.schedule != "zero-bubble":
            return 1.0
        inputs = self.backward - self.weights
        idle = max(self.forward + inputs - self.weights, self.forward, inputs)
        return idle / (self.forward + self.backward)

    @cached_property
    def _gradients(self) -> float:
        """Seconds of the gradients' collectives that nothing hides."""
        par, model = self.run.parallel, self.run.model
        first_and_last = self.shard_step + self.scatter_step
        if par.zero >= 2 and par.pp == 1:
            return first_and_last  # have nothing beside them
        edges = model.vocab * model.hidden / par.tp
        if par.zero >= 2:  # stages gather and scatter once a step
            whole = self.layers * first_and_last
        else:
            whole = self.links.all_reduce(self.run.reduced_bytes * (self.parameters + edges), self.replicas)
        if not self.run.overlap.dp:
            return whole
        beside = min(whole, self.layers * self.backward)
        return whole - beside + self.constants.contention * beside

    @cached_property
    def optimizer(self) -> float:
        """Seconds of Adam on what this rank updates."""
        par = self.run.parallel
        updated = self.parameters + self.run.model.vocab * self.run.model.hidden / par.tp
        shards = par.dp * par.cp // par.hsdp if par.zero else 1
        moved = self.constants.optimizer_bytes if self.run.precision != "fp32" else 7 * FLOAT
        return self.kernels.streamed(moved * updated / shards)
