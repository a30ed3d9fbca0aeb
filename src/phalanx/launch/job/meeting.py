"""`join_link`, `meet_elastic`: meet the launchers of other nodes before an attempt, over a link or as elastic nodes."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.launch.job.fork_server_handle import ForkServerHandle
from phalanx.launch.process import wire
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.process.node_link_handle import NodeLinkHandle
from phalanx.launch.request import machine
from phalanx.launch.request.request import LaunchRequest
from phalanx.launch.request.topology import NodeOffer

if TYPE_CHECKING:
    from phalanx.launch.job.elastic_start import ElasticStart

logger = logging.getLogger("phalanx.launch")

POLL_S = 0.05
"""How often to look whether the job is to end."""


class InterruptedJobError(Exception):
    """The user or a scheduler ended the job before its processes started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def join_link(server: ForkServerHandle, request: LaunchRequest, *, timeout_s: float, log_dir: str) -> NodeLinkHandle:
    """Start the process that talks to the other hosts.

    Args:
        server: Which starts it.
        request: The job.
        timeout_s: How long to wait for the other hosts.
        log_dir: Folder of its log.
    """
    ours, theirs = wire.pair()
    nodes, port = request.nodes, request.meeting_port
    fds = [theirs.fileno()]
    with theirs:
        meeting = None
        if nodes.rank == 0:
            meeting = machine.bind(nodes.address, port, flag="--http-port", listen=True)
            fds.append(meeting.fileno())
        server.spawn(
            "link",
            "link",
            fds,
            env={},
            cwd=os.getcwd(),
            log=f"{log_dir}/launcher.link",
            config={
                "host": nodes.hosts[0],
                "port": port,
                "node_rank": nodes.rank,
                "node_count": nodes.count,
                "timeout_s": timeout_s,
                "hosts": list(nodes.hosts),
                "names": [nodes.name(rank) for rank in range(nodes.count)],
            },
        )
        if meeting is not None:
            meeting.close()
    logger.info("meeting %d hosts at %s:%d", nodes.count, nodes.hosts[0], port)
    return NodeLinkHandle(ours)


def exchange_offers(
    link: NodeLinkHandle, attempt: int, offer: NodeOffer, stops: StopSignals, server: ForkServerHandle
) -> list[NodeOffer]:
    """Meet the other hosts; returns what each brings.

    Raises:
        InterruptedJobError: If a signal ended it.
    """
    link.offer(attempt, offer)
    while (offers := link.offers(attempt)) is None:
        if number := stops.take():
            raise InterruptedJobError(number)
        readable, _, _ = select.select([link.socket, server.socket], [], [], POLL_S)
        if server.socket in readable:
            server.receive()
        if link.socket in readable:
            link.take()
    return offers


def meet_elastic(
    request: LaunchRequest,
    offer: NodeOffer,
    stops: StopSignals,
    server: ForkServerHandle,
    *,
    timeout_s: float,
    variables: Mapping[str, str],
) -> ElasticStart:
    """Return this node's place in an elastic job; waits for other nodes where there may be some.

    Raises:
        InterruptedJobError: If a signal ended it.
    """
    from phalanx.launch.job.elastic_meeting import ElasticMeeting, meeting_key
    from phalanx.launch.job.elastic_start import ElasticStart

    if not request.nodes.is_multi_node:
        return ElasticStart(request=request, offer=offer)
    key = meeting_key(request.nodes, variables)
    meeting = ElasticMeeting(request=request, timeout_s=timeout_s, offer=offer, key=key)
    if number := meeting.run(stops, server):
        raise InterruptedJobError(number)
    return ElasticStart(request=request, offer=offer, meeting=meeting)
