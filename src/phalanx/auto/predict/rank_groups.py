"""`group_topology`, `list_block_parameters`: which ranks share what, and where they lie (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.predict.run_parts import Axis
from phalanx.auto.predict.run_spec import RunSpec


def group_topology(run: RunSpec, axis: Axis) -> GroupTopology:
    """Return where the ranks of one axis lie, by the order of the ranks."""
    ranks, stride = getattr(run.parallel, axis), run.parallel.stride(axis)
    per_node = run.cluster.per_node
    return GroupTopology(ranks, max(1, min(ranks, per_node // stride)), min(stride, per_node))


def replicas(run: RunSpec) -> GroupTopology:
    """Return the ranks with the same part of all layers but experts: copies of it, and all parts of their sequences."""
    in_node = group_topology(run, "dp").in_node * group_topology(run, "cp").in_node
    return _topology(run, run.parallel.dp * run.parallel.cp, in_node)


def expert_tensor_ranks(run: RunSpec) -> GroupTopology:
    """Return the ranks that one expert is cut over: neighbours."""
    axis = group_topology(run, "tp")
    return GroupTopology(run.expert_tp, min(run.expert_tp, axis.in_node), axis.sharing)


def expert_ranks(run: RunSpec) -> GroupTopology:
    """Return the ranks that the experts of a layer are dealt to: neighbours but for those that share an expert."""
    return _topology(run, run.parallel.ep, min(run.parallel.ep, _stage_in_node(run) // run.expert_tp))


def expert_replicas(run: RunSpec) -> GroupTopology:
    """Return the ranks with the same part of the same experts."""
    dealt = run.parallel.ep * run.expert_tp
    return _topology(run, run.stage_ranks // dealt, _stage_in_node(run) // dealt)


def _stage_in_node(run: RunSpec) -> int:
    """Return the ranks of one stage on a node."""
    return group_topology(run, "tp").in_node * replicas(run).in_node


def _topology(run: RunSpec, ranks: int, in_node: int) -> GroupTopology:
    """Return a group with as many ranks on a node as fit; groups of its kind have the rest of the node."""
    in_node = max(1, min(ranks, in_node))
    return GroupTopology(ranks, in_node, max(1, run.cluster.per_node // in_node))


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank, and the ranks with the same ones."""

    count: float
    replicas: GroupTopology
    shards: GroupTopology
    """The replicas over which ZeRO shards them: all, or with `hsdp` a part of them."""

    shard_replicas: GroupTopology
    """The ranks with the same shard."""


def place_parameters(run: RunSpec, count: float, holders: GroupTopology) -> RankParameters:
    """Return parameters of a rank that these ranks hold alike: neighbours shard them, and those further off copy."""
    shards = holders.ranks // gcd(holders.ranks, run.parallel.hsdp)
    return RankParameters(
        count,
        holders,
        _topology(run, shards, holders.in_node),
        _topology(run, holders.ranks // shards, holders.in_node // shards),
    )


def list_block_parameters(run: RunSpec) -> list[RankParameters]:
    """Return the parameters of one block on one rank: experts apart, which fewer ranks hold alike."""
    dense = place_parameters(run, run.dense_parameters, replicas(run))
    return [dense, place_parameters(run, run.expert_parameters, expert_replicas(run))] if run.model.experts else [dense]


def block_shard_parameters(run: RunSpec) -> float:
    """Return the parameters of one block on one rank that it shards with other ranks, where ZeRO does."""
    return sum(part.count for part in list_block_parameters(run) if part.shards.ranks > 1)


def place_vocabulary(run: RunSpec) -> RankParameters:
    """Return the rows of one table of the vocabulary on one rank: the embedding, or the projection."""
    return place_parameters(run, run.model.vocab * run.model.hidden / run.parallel.tp, replicas(run))


def count_tables(run: RunSpec) -> int:
    """Return the tables of the vocabulary on the first rank, and as many on the last, unless one rank has both."""
    return 2 if run.has_one_end and not run.model.tied else 1
