"""`ElasticLaunch`: our launcher, with a script that speaks the membership protocol and trains nothing.

It takes up every view at once, ends when `end` exists, and sends what it finds in `say.MEMBER`, a JSON message.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launching import RUN, Launch

JOB = """
import json, os, select, socket, sys, time

channel = socket.socket(fileno=int(os.environ["PHALANX_MEMBERSHIP_FD"]))
me, partial, is_in = os.environ["PHALANX_MEMBER_ID"], b"", False

def send(message):
    channel.sendall(json.dumps(message).encode() + b"\\n")

def note(message):
    with open(f"seen.{me}", "a") as file:
        file.write(json.dumps(message) + "\\n")

def act_on(message):
    global is_in
    note(message)
    if "joining" in message:
        send({"ready": {}})
    if "refused" in message:
        sys.exit(3)
    if "view" in message:
        view = message["view"]
        ids = [member["id"] for member in view["members"]]
        if me not in ids:
            sys.exit(0)
        if "silent" not in sys.argv:
            send({"joined": {"epoch": view["epoch"], "step": 7, "seconds": 0.25, "redone": 2, "lost": [],
                             "new": [] if is_in else [me]}})
        is_in = True

note({"environment": {k: v for k, v in os.environ.items() if k.startswith(("PHALANX_", "RANK", "WORLD", "LOCAL"))}})
send({"pid": os.getpid()})
print("member", me, "is here", flush=True)
while not os.path.exists("end"):
    if select.select([channel], [], [], 0.01)[0]:
        data = channel.recv(1 << 16)
        if not data:
            sys.exit("the agent is gone")
        *lines, partial = (partial + data).split(b"\\n")
        for line in lines:
            act_on(json.loads(line))
    say = f"say.{me}"
    if os.path.exists(say):
        with open(say) as file:
            order = json.load(file)
        os.remove(say)
        if "raise" in order:
            raise ValueError(order["raise"])
        if "spin" in order:
            until = time.monotonic() + order["spin"]
            while time.monotonic() < until:
                pass
        elif "sleep" in order:
            time.sleep(order["sleep"])
        elif "exit" in order:
            sys.exit(order["exit"])
        else:
            send(order)
send({"done": {}})
"""


_started: list[Launch] = []


@pytest.fixture(autouse=True)
def no_launcher_left() -> Iterator[None]:
    """End what a test that failed has left running."""
    yield
    while _started:
        process = _started.pop().process
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


@dataclass
class ElasticLaunch:
    """A launcher that runs this script, and its members; with several nodes, that of the first, and the others."""

    launcher: Launch
    nodes: list[Launch] = field(default_factory=list)
    hosts: tuple[str, ...] = ()
    """Flags that all nodes have the same."""

    def __post_init__(self) -> None:
        _started.append(self.launcher)

    def start_node(self, node: int, **more: Any) -> Launch:
        """Start the launcher of a node, again or for the first time."""
        arguments = ("--node-rank", str(node), "--log-dir", f"log{node}", *self.hosts, "job.py")
        started = Launch(arguments, self.folder, **more)
        self.nodes.append(started)
        _started.append(started)
        return started

    @property
    def folder(self) -> Path:
        return self.launcher.cwd

    def seen(self, member: str) -> list[dict[str, Any]]:
        """What a member was told, in order."""
        path = self.folder / f"seen.{member}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def views(self, member: str) -> list[dict[str, Any]]:
        return [message["view"] for message in self.seen(member) if "view" in message]

    def environment(self, member: str) -> dict[str, str]:
        self.wait_until(lambda: self.seen(member))
        found: dict[str, str] = self.seen(member)[0]["environment"]
        return found

    def say(self, member: str, **message: Any) -> None:
        """Have a member send a message, or do something."""
        hidden = self.folder / f".say.{member}"
        hidden.write_text(json.dumps(message))
        hidden.rename(self.folder / f"say.{member}")

    def wait_for_view(self, member: str, epoch: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a member is told a view of at least this epoch; returns the first such."""
        return self.wait_until(
            lambda: next((view for view in self.views(member) if view["epoch"] >= epoch), None), timeout_s
        )

    def wait_until(self, look: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Wait until `look` returns something; fails with all the launcher said where that does not come."""
        deadline = time.monotonic() + timeout_s
        while not (value := look()):
            is_alive = any(launcher.process.poll() is None for launcher in (self.launcher, *self.nodes))
            if not is_alive or time.monotonic() > deadline:
                raise AssertionError(f"it did not come:\n{self.describe()}")
            time.sleep(0.01)
        return value

    def describe(self) -> str:
        """Kill the launchers; returns all they said, and what members have seen."""
        texts = []
        for launcher in dict.fromkeys(map(id, (self.launcher, *self.nodes))):
            process = next(one.process for one in (self.launcher, *self.nodes) if id(one) == launcher)
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                texts += process.communicate()
        return "\n".join(texts + [f"{path.name}: {path.read_text()}" for path in self.folder.glob("seen.*")])

    def kill(self, member: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a member, once it is told a view; returns its pid."""
        pid = int(
            self.wait_until(
                lambda: next((m["pid"] for view in self.views(member) for m in view["members"] if m["id"] == member), 0)
            )
        )
        os.kill(pid, number)
        return pid

    def end(self) -> Launch:
        """Let every member end well, and see that no process is left."""
        (self.folder / "end").touch()
        self.end_nodes()
        return self.launcher

    def end_nodes(self) -> None:
        """Wait for the end of launchers that still run, and see that no process is left."""
        for launcher in self.nodes or [self.launcher]:
            if launcher.process.stdout is not None and not launcher.process.stdout.closed:
                launcher.wait()
            launcher.gone_within(0.5)


def start_nodes(
    folder: Path,
    count: int,
    port: str,
    *arguments: str,
    nodes: Sequence[int] | None = None,
    ips: Sequence[str] = (),
    enter: Callable[[int], tuple[str, ...]] = lambda _: (),
) -> ElasticLaunch:
    """Start launchers with loopback addresses that stand for hosts.

    Args:
        folder: Where all run.
        count: Nodes in the list.
        port: Where the launchers meet.
        arguments: Further flags.
        nodes: Those that are started at once; all when omitted.
        ips: Other addresses than loopback's.
        enter: Returns what to write before the command of a node.
    """
    (folder / "job.py").write_text(JOB)
    addresses = ips or [f"127.0.0.{node + 2}" for node in range(count)]
    hosts = ("--ips", ",".join(addresses), "--http-port", port, *arguments)
    job: ElasticLaunch | None = None
    for node in range(count) if nodes is None else nodes:
        if job is None:
            flags = ("--node-rank", str(node), "--log-dir", f"log{node}", *hosts, "job.py")
            first = Launch(flags, folder, program=(*enter(node), *RUN))
            job = ElasticLaunch(first, [first], hosts)
        else:
            job.start_node(node, program=(*enter(node), *RUN))
    assert job is not None
    return job


def ids(view: dict[str, Any]) -> list[str]:
    """Return the member ids of a view by rank."""
    return [member["id"] for member in view["members"]]


def start(folder: Path, *arguments: str, script_arguments: tuple[str, ...] = (), **more: Any) -> ElasticLaunch:
    """Start a launcher in a folder, with its flags, those of the script, and what else `Launch` takes."""
    (folder / "job.py").write_text(JOB)
    return ElasticLaunch(Launch((*arguments, "job.py", *script_arguments), folder, **more))
