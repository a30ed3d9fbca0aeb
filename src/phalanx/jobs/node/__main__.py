"""`python -m phalanx.jobs.node FOLDER --node K`: the entry of what runs on every node of an attempt (`node_run`)."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.node.agent import Node

_MOST_REPORTED = 4000
"""Bytes of an exit record that Kubernetes keeps of a container."""


def _secrets(folder: Path, node: int, descriptor: int | None, file: Path | None) -> dict[str, str]:
    """Secrets by name, from a pipe, a pod's file, or the file that only this node reads, which is gone then."""
    if file is not None:
        text = file.read_bytes()
    elif descriptor is not None:
        with os.fdopen(descriptor, "rb") as pipe:
            text = pipe.read()
    else:
        path = paths.secrets(folder, node)
        if not path.exists():
            return {}
        text = path.read_bytes()
        path.unlink()
    found: dict[str, str] = json.loads(text or b"{}")
    return found


def _node(said: str) -> int:
    """A node's number, or the variable that holds it."""
    return int(said if said.isdigit() else os.environ[said])


def _report(folder: Path, node: int, file: Path) -> None:
    """Leave the exit record where Kubernetes keeps it with the pod."""
    end = attempt_files.read_end(folder, node)
    if end is None:
        return
    for keep in (2000, 500, 100):
        text = attempt_files.end_json(replace(end, detail=end.detail[-keep:], message=end.message[:keep]))
        if len(text) <= _MOST_REPORTED:
            break
    file.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one node; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.jobs.node", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the attempt, with attempt.json in it")
    parser.add_argument("--node", required=True, help="number of this node, or the variable that holds it")
    parser.add_argument("--first-node", type=int, default=0, help="number to add to that of --node")
    parser.add_argument("--hosts", help="addresses of all nodes, in order; default: loopback addresses of this machine")
    parser.add_argument(
        "--port", type=int, default=launch_command.PORT, help="first of the ports that the attempt may use"
    )
    parser.add_argument("--secrets-fd", type=int, help="pipe to read {name: value} from")
    parser.add_argument("--secrets-file", type=Path, help="file to read {name: value} from")
    parser.add_argument("--signals-reach-all", action="store_true", help="signals come to all processes below this one")
    parser.add_argument("--pod", action="store_true", help="in a pod: no other node sees this folder")
    parser.add_argument("--report", type=Path, help="file to leave the exit record in, shortened")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    node = asked.first_node + _node(asked.node)
    secrets = _secrets(asked.folder, node, asked.secrets_fd, asked.secrets_file)
    order = attempt_files.read(asked.folder)
    hosts = (
        asked.hosts.split(",")
        if asked.hosts
        else launch_command.own_hosts(order.job, order.attempt, order.spec.resources.nodes)
    )
    place = launch_command.Place(node, tuple(hosts), asked.port)
    code = Node(asked.folder, place, secrets, in_pod=asked.pod, signals_reach_all=asked.signals_reach_all).run()
    if asked.report:
        _report(asked.folder, node, asked.report)
    return code


if __name__ == "__main__":
    # Threads that still wait for a network must not hold up the end.
    os._exit(main())
