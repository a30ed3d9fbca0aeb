"""A script that speaks the membership protocol and trains nothing, and what a test sees of it.

It takes up every view at once, ends when `end` exists, and sends what it finds in `say.MEMBER`, a JSON message.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import Launch

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


@dataclass
class ElasticJob:
    """A launcher that runs the stand-in, and its members."""

    launcher: Launch

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
        found: dict[str, str] = self.seen(member)[0]["environment"]
        return found

    def say(self, member: str, **message: Any) -> None:
        """Have a member send a message, or do something."""
        hidden = self.folder / f".say.{member}"
        hidden.write_text(json.dumps(message))
        hidden.rename(self.folder / f"say.{member}")

    def wait_for_view(self, member: str, epoch: int, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait until a member is told a view of at least this epoch; returns the first such."""
        return self.wait_until(
            lambda: next((view for view in self.views(member) if view["epoch"] >= epoch), None), timeout_s
        )

    def wait_until(self, look: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Wait until `look` returns something; fails with all the launcher said where that does not come."""
        deadline = time.monotonic() + timeout_s
        while not (value := look()):
            if self.launcher.process.poll() is not None or time.monotonic() > deadline:
                self.launcher.process.kill()
                out, err = self.launcher.process.communicate()
                seen = {path.name: path.read_text() for path in self.folder.glob("seen.*")}
                raise AssertionError(f"it did not come:\n{out}\n{err}\n{seen}")
            time.sleep(0.01)
        return value

    def kill(self, member: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a member; returns its pid."""
        pid = next(m["pid"] for view in self.views(member) for m in view["members"] if m["id"] == member)
        os.kill(pid, number)
        return int(pid)

    def end(self) -> Launch:
        """Let every member end well, and see that no process is left."""
        (self.folder / "end").touch()
        self.launcher.wait()
        self.launcher.gone_within(0.5)
        return self.launcher


def ids(view: dict[str, Any]) -> list[str]:
    """Return the member ids of a view by rank."""
    return [member["id"] for member in view["members"]]


def start(folder: Path, *arguments: str, script_arguments: tuple[str, ...] = (), **more: Any) -> ElasticJob:
    """Start a launcher in a folder and wait until each first member knows view 0."""
    (folder / "job.py").write_text(JOB)
    return ElasticJob(Launch((*arguments, "job.py", *script_arguments), folder, **more))
