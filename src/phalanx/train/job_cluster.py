"""`job_cluster`: the `Cluster` of the launched ranks, for the planner."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

import phalanx.comm.context as context_of
from phalanx import accelerator
from phalanx.cluster.role.role import Role
from phalanx.cluster.spec.cluster import Cluster
from phalanx.cluster.spec.detect import measured_node
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.train")


def cluster_of(role: Role, device: torch.device) -> Cluster:
    """Return the cluster of the ranks that were launched: as measured, with as many or others, else as it looks.

    Args:
        role: Who this process is.
        device: Where it computes.
    """
    if device.type == "cpu" and role.node_count == 1:
        try:
            node, measured, assumptions = measured_node(role.world_size, exactly=False)
        except ConfigError as error:
            logger.info("the planner estimates this host, which was not measured: %s", error)
        else:
            for assumption in assumptions:
                logger.info("the planner uses the figures of this host: %s", assumption)
            return Cluster(nodes=(node,), measured=measured, assumed=assumptions)
    cluster = Cluster.detect(role)
    per_node = role.world_size // len(cluster.nodes)
    return replace(cluster, nodes=tuple(replace(node, devices=per_node) for node in cluster.nodes))


def job_cluster() -> Cluster | None:
    """Return the cluster of this process's job; None where nobody launched it and it joined none."""
    if context_of.is_initialized():
        current = context_of.current()
        return cluster_of(current.role, current.device)
    role = Role.detect()
    if role.launcher == "none":
        return None
    return cluster_of(role, torch.device(accelerator.find_kind() or "cpu"))
