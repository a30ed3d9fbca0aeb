"""`LossPoint`: where a backward pass ran out of memory within a cross entropy, and what has arrived there.

The gradient of the logits is as large as they are, and is computed before anything of the model's part. A node that has
failed has still what it saved, so with the gradient that it was called with the pass can continue from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from phalanx.parallel.memory.guard.graphs import Node, is_whole, nodes_of
from phalanx.parallel.memory.guard.guard import MARK, GuardedPass, running
from phalanx.parallel.memory.guard.repetition import GuardedGraph

LEAST_BYTES = 1 << 20
"""Of logits whose backward pass is followed: smaller ones run out of memory hardly ever, and a hook takes 3 us."""

_LOSS = "phalanx.loss"
"""Key of a node's metadata under which its place in a loss is found."""


class _LossArrival:
    """Notes what a node of a loss is called with. The model's last node, which comes after it, forgets that."""

    __slots__ = ()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if running.is_backward:
            running.in_loss = self, gradients


def follow_loss(loss: Tensor, logits: Tensor) -> None:
    """Let a backward pass that runs out of memory in a cross entropy be continued from there."""
    node: Node | None = loss.grad_fn if logits.nbytes >= LEAST_BYTES else None
    for _ in range(2):  # the loss by class, and the logarithm of the softmax
        if node is None or MARK in node.metadata:
            return
        node.metadata[_LOSS] = arrival = _LossArrival()
        node.register_prehook(arrival)
        node = node.next_functions[0][0]


@dataclass(slots=True)
class LossPoint:
    """A node to continue from."""

    graph: GuardedGraph
    edge: GradientEdge
    gradient: Tensor

    @property
    def passes(self) -> list[GuardedPass]:
        """Return the passes that the model's part goes through."""
        return self.graph.passes

    @classmethod
    def of(cls, tensors: Any, own: set[int]) -> LossPoint | None:
        """Return where a backward pass can continue; None if it was not in a loss, or may have been elsewhere too.

        Args:
            tensors: Where the pass began.
            own: The identities of the parameters of all guarded models.
        """
        node = None if running.in_loss is None else _find(tensors, running.in_loss[0])
        if node is None or running.in_loss is None or not is_whole(node):
            return None
        gradient = running.in_loss[1][0]
        graph = GuardedGraph.of(tensors)
        if gradient is None or graph.is_released or graph.why_not_again(own) is not None:
            return None
        return cls(graph, GradientEdge(node, 0), gradient)


def _find(tensors: Any, arrival: object) -> Node | None:
    """Return the node with an arrival in a loss that is a chain: of no other, it is known what else was to come."""
    nodes, at = list(nodes_of(tensors)), None
    while nodes and MARK not in nodes[0].metadata:
        if len(nodes) > 1:
            return None
        if nodes[0].metadata.get(_LOSS) is arrival:
            at = nodes[0]
        nodes = [following for following, _ in nodes[0].next_functions if following is not None]
    return at if len(nodes) == 1 else None
