"""`python -m phalanx.jobs.node FOLDER --node K`: entry of the agent of a node."""

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
from phalanx.jobs.node.agent import NodeAgent

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
    values: dict[str, str] = json.loads(text or b"{}")
    return values


def _node(text: str) -> int:
    """A node's number, or the variable that holds it."""
    return int(text if text.isdigit() else os.environ[text])


def _report(folder: Path, node: int, file: Path) -> None:
    """Leave the exit record where Kubernetes keeps it with the pod."""
    record = attempt_files.read_exit_record(folder, node)
    if record is None:
        return
    for most in (2000, 500, 100):
        text = attempt_files.exit_record_json(
            replace(record, detail=record.detail[-most:], message=record.message[:most])
        )
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
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    node = options.first_node + _node(options.node)
    secrets = _secrets(options.folder, node, options.secrets_fd, options.secrets_file)
    attempt_spec = attempt_files.read_spec(options.folder)
    hosts = (
        options.hosts.split(",")
        if options.hosts
        else launch_command.loopback_hosts(attempt_spec.job, attempt_spec.attempt, attempt_spec.spec.resources.nodes)
    )
    rendezvous = launch_command.Rendezvous(node, tuple(hosts), options.port)
    code = NodeAgent(
        options.folder, rendezvous, secrets, in_pod=options.pod, signals_reach_all=options.signals_reach_all
    ).run()
    if options.report:
        _report(options.folder, node, options.report)
    return code


if __name__ == "__main__":
    # Threads that still wait for a network must not hold up the end.
    os._exit(main())
