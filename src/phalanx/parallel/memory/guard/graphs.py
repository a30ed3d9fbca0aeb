"""`reach`: look through autograd graphs: which nodes a backward pass reaches, and let go of what they have saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves


class ReleasedGraphError(RuntimeError):
    """A backward pass needs what was let go of."""


Node = Any
"""Torch's `grad_fn`s."""


def reach(
    roots: Iterable[Node], is_border: Callable[[Node], bool] = lambda _node: False
) -> tuple[set[Node], set[Node]]:
    """Return the nodes that a backward pass from some nodes visits.

    Args:
        roots: Where it begins.
        is_border: Whether not to go beyond a node.

    Returns:
        The nodes within the border, and those of the border.
    """
    within, border = set[Node](), set[Node]()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in within or node in border:
            continue
        if is_border(node):
            border.add(node)
            continue
        within.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return within, border


def nodes_of(tensors: Any) -> list[Node]:
    """Return the nodes that made tensors, or to which gradient edges lead."""
    leaves = tree_leaves(tensors, is_leaf=lambda value: isinstance(value, GradientEdge))  # which is a tuple
    nodes = [leaf.grad_fn if isinstance(leaf, Tensor) else getattr(leaf, "node", None) for leaf in leaves]
    return [node for node in nodes if node is not None]


def is_whole(node: Node) -> bool:
    """Return whether a node has still what it saved, so that no backward pass went through it."""
    try:
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
    except RuntimeError:
        return False
    return True


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """Return the tensors whose gradients nodes accumulate."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def release(nodes: Iterable[Node]) -> None:
    """Let go of all tensors that nodes have saved for a backward pass which will not come to them, whoever holds them.

    A script holds a graph by its loss and outputs, so it cannot be deleted from outside.
    """
    for node in nodes:
        for name in dir(node):
            if name.startswith("_raw_saved"):
                _release_saved(node, name)


def _release_saved(node: Node, name: str) -> None:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed already
        return
    for tensor in saved if isinstance(saved, (tuple, list)) else (saved,):
        try:
            tensor.register_hooks(_drop, _refuse)
        except (RuntimeError, AttributeError):  # freed, None, or packed by someone else, as in activation checkpointing
            continue


def _drop(_tensor: Tensor) -> None:
    return None


def _refuse(_packed: None) -> Tensor:
    raise ReleasedGraphError(
        "a backward pass came to a graph whose activations are gone: memory had run out, and they were let go of. "
        "loss.backward() computes them again, once, and only without retain_graph, create_graph and inputs. For a "
        "second pass, or torch.autograd.grad, compute the outputs again."
    )
