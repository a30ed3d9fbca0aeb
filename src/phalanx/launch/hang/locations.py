"""`Location`: where a stack is, in the user's terms: the line of the script, and what kind of wait or work (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from phalanx.launch.hang.stacks import Frame, Stacks
from phalanx.launch.process.source_files import is_library, path_for_user

Kind: TypeAlias = Literal[
    "collective", "meeting", "store", "server", "data", "backward", "compile", "lock", "code", "unknown"
]

WAITS: tuple[Kind, ...] = ("collective", "meeting", "store", "server")
"""Kinds of places in which a rank waits for other processes of the job."""

_RULES: tuple[tuple[Kind, re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (kind, re.compile(rf"(^|/){file}$"), re.compile(rf"(.*\.)?({function})$"))  # type: ignore[misc]
    for kind, file, function in (
        ("compile", r"torch/_(dynamo|inductor)/.*\.py", ".*"),
        ("meeting", r"torch/distributed/rendezvous\.py", ".*"),
        (
            "meeting",
            r"torch/distributed/distributed_c10d\.py",
            "init_process_group|_store_based_barrier|_new_process_group_helper|_new_group_with_tag|new_group|split_group",
        ),
        ("collective", r"torch/distributed/distributed_c10d\.py", ".*"),
        ("collective", r"torch/distributed/_functional_collectives\.py", ".*"),
        ("collective", r"torch/distributed/utils\.py", "_verify_param_shape_across_processes|_sync_.*"),
        ("collective", r"phalanx/comm/shared_memory/(native|work|hosts)\.py", ".*"),
        ("meeting", r"phalanx/cluster/rendezvous\.py", ".*"),
        ("store", r"phalanx/comm/(store|agreement)\.py", ".*"),
        ("server", r"phalanx/ps/wire/(channel|message|client/(server_connections|connection|link|dial))\.py", ".*"),
        ("server", r"phalanx/ps/stores/fan_out\.py", ".*"),
        ("data", r"torch/utils/data/dataloader\.py", ".*_data|__next__|_shutdown_workers"),
        ("lock", r"threading\.py", "wait|acquire|join|_wait_for_tstate_lock|wait_for"),
        ("lock", r"queue\.py", "get|put"),
        ("lock", r"multiprocessing/(connection|queues|synchronize|popen_fork)\.py", ".*"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """What a process does, as its stack shows it."""

    kind: Kind
    source: str = ""
    """`FILE:LINE` of the innermost line of the user's."""

    function: str = ""
    """What that line calls in a library, else the function the line is in."""

    verb: str = ""
    """The outermost function of a library that waits, such as `all_reduce`, for a kind of wait."""

    frames: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        """`train.py:81 in DataLoader.__next__`, as far as it is known."""
        if not self.source:
            return self.function or "an unknown place"
        return f"{self.source} in {self.function}" if self.function else self.source


def location_of(stacks: Stacks) -> Location:
    """Return where the process of some stacks is.

    Args:
        stacks: Those of all its threads; the main one counts, unless it waits for a backward pass that runs in another.
    """
    if not (main := stacks.main):
        return Location(kind="unknown")
    location = location_of_frames(main)
    if location.kind == "backward":
        for thread in stacks.threads:
            if not thread.is_main and thread.frames and not is_library(thread.frames[0].file):
                return location_of_frames(thread.frames)  # a hook of the user's, on a thread of autograd
    return location


def location_of_frames(frames: Sequence[Frame]) -> Location:
    """Return where one stack is, its innermost frame first."""
    user = next((n for n, frame in enumerate(frames) if not is_library(frame.file)), None)
    inside = frames[:user]
    kind, verb = _kind_of(inside)
    if user is None:
        return Location(kind=kind, function=frames[0].function, verb=verb, frames=tuple(frames))
    own = frames[user]
    function = _clean(_outermost(inside).function) if inside else ""
    if kind == "data":
        function = "DataLoader.__next__"
    if not function and own.function != "<module>":
        function = own.function
    source = f"{path_for_user(own.file)}:{own.line}"
    return Location(kind=kind, source=source, function=function, verb=verb, frames=tuple(frames))


def _kind_of(inside: Sequence[Frame]) -> tuple[Kind, str]:
    """Kind and verb of the library's frames below the user's, by the innermost that says something."""
    if inside and _is(inside[0], "torch/autograd/graph.py") and inside[0].function.endswith("_engine_run_backward"):
        return "backward", "backward"
    kinds = [kind for frame in inside if (kind := _rule_of(frame)) is not None]
    # A lock or a queue says less than what waits for it.
    kind = next((kind for kind in kinds if kind != "lock"), kinds[0] if kinds else None)
    return ("code", "") if kind is None else (kind, _clean(_outermost(inside).function))


def _rule_of(frame: Frame) -> Kind | None:
    return next((k for k, file, name in _RULES if file.search(frame.file) and name.match(frame.function)), None)


def _outermost(inside: Sequence[Frame]) -> Frame:
    """The function of a library that the user's line calls; decorators of torch stand between."""
    named = [frame for frame in inside if frame.function.rpartition(".")[2] not in ("wrapper", "__call__", "<lambda>")]
    return named[-1] if named else inside[-1]


def _clean(function: str) -> str:
    return function.replace("<locals>.", "")


def _is(frame: Frame, path: str) -> bool:
    return frame.file.endswith(path)
