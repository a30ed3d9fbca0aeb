"""The same faults under torchrun: what torch's timeout, debug server and flight recorder, and py-spy say of them.

All four see one run. Its process group has a timeout of `timeout_s` seconds in place of 30 minutes, so that torch
speaks at all, and its script starts the debug server, which torch does not do by itself. `ask_after_s` seconds after
the fault the server is asked for stacks and for its analysis of the flight recorders, and `py-spy dump` looks at each
rank.

Stacks are data, so a rule stands for who reads them: a rank waits if torch.distributed or the backward pass is above
the innermost line of the script in its main thread; those who do not wait are to blame, at that line. Where all wait,
their lines must be those that contradict each other.
"""

from __future__ import annotations

import html
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from benchmarks.doctor_faults import Fault
from benchmarks.doctor_outcome import Found, Outcome, find_in_tracebacks
from benchmarks.doctor_trial import Trial
from benchmarks.elastic_jobs import marked

Stack: TypeAlias = list[tuple[str, int]]
"""File and line of each frame of a main thread, innermost first."""

TOOLS = ("timeout", "debug server", "flight recorder", "py-spy")
_BIN = Path(sys.executable).parent
_FETCH_S = 6.0
_GET = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read().decode())"
_SPY_S = 10.0
_SECTION = re.compile(r"<h2>Rank (\d+):.*?</h2>(.*?)(?=<h2>|\Z)", re.DOTALL)
_FAULTHANDLER = re.compile(r'^\s*File "(.+)", line (\d+) in .*$')
_SPY_FRAME = re.compile(r"^\s+.+ \((.+):(\d+)\)$")
_SERVER = ("torch/distributed/debug/", "torch/distributed/flight_recorder/")
_FAILURE = re.compile(r"when handling /fr_trace\n(?:.*\n)*?.*code 500, message Exception: (.+)")
_WAITS = ("torch/distributed/", "torch/autograd/graph.py")


def ask_tools(fault: Fault, *, timeout_s: float, ask_after_s: float) -> dict[str, Outcome]:
    """Run a fault under torchrun, and return what each tool says of it."""
    port = _free_port()
    with Trial(fault, _script_of_torch(fault.script, timeout_s, port)) as trial:
        _start(trial)
        trial.wait_until(lambda: trial.fault_at is not None)
        trial.wait_until(lambda: trial.seconds() >= ask_after_s)
        asked_s, answers = trial.seconds(), _ask(trial, port)
        trial.wait_until(lambda: False, limit_s=2 * timeout_s)
        ended_s, output = trial.seconds(), _without_server(trial.output)
    errors = [line.strip() for line in output.splitlines() if "Error" in line or "imed out" in line]
    outcomes = {
        "timeout": Outcome(
            fault.name, find_in_tracebacks(fault, output), ended_s if errors else None, errors[0] if errors else ""
        )
    }
    for tool, (found, words) in answers.items():
        outcomes[tool] = Outcome(fault.name, found, asked_s if words else None, words)
    return outcomes


def _start(trial: Trial) -> None:
    if trial.spaces is None:
        trial.start([_BIN / "torchrun", "--standalone", "--nproc_per_node", trial.fault.ranks, "train.py"])
        return
    for node in range(trial.nodes):
        host = ("--master-addr", trial.spaces.addresses[0], "--master-port", 29500, "--nproc-per-node", 1)
        command = (_BIN / "torchrun", "--nnodes", trial.nodes, "--node_rank", node, *host, "train.py")
        trial.start(command, node, GLOO_SOCKET_IFNAME="eth0")


def _script_of_torch(script: str, timeout_s: float, port: int) -> str:
    """The same script, line by line, on gloo, with a shorter timeout and torch's debug server."""
    begin = (
        f'dist.init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds={timeout_s:g})); '
        f"import torch.distributed.debug; torch.distributed.debug.start_debug_server({port}, fetch_timeout={_FETCH_S})"
    )
    script = script.replace("import phalanx as px\n", "\n").replace("px.init()", begin)
    return script.replace('dist.init_process_group("gloo")', begin)


def _ask(trial: Trial, port: int) -> dict[str, tuple[Found, str]]:
    """Ask the tools at one moment; a tool that has no answer gets empty words."""
    fault, ranks = trial.fault, _ranks_of(trial.mark)
    with ThreadPoolExecutor(2 + fault.ranks) as pool:
        # A page of the server is an analysis of what all ranks send it at that moment.
        pages = {path: pool.submit(_fetch, trial, port, path) for path in ("stacks", "fr_trace")}
        dumps = {rank: pool.submit(_spy, pid) for rank, pid in ranks.items()}
        stacks = _stacks_of_page(pages["stacks"].result())
        spied = {rank: _frames(dump.result(), _SPY_FRAME) for rank, dump in dumps.items()}
        pages["fr_trace"].result()
    recorded = _recorded(trial.output)
    return {
        "debug server": (_find_in_stacks(fault, stacks), _words_of(stacks)),
        "flight recorder": (_find_in_record(fault, recorded), recorded),
        "py-spy": (_find_in_stacks(fault, spied), _words_of(spied)),
    }


def _fetch(trial: Trial, port: int, path: str) -> str:
    enter = () if trial.spaces is None else trial.spaces.enter(0)
    url, timeout_s = f"http://localhost:{port}/{path}", str(2 * _FETCH_S)
    done = subprocess.run([*enter, sys.executable, "-c", _GET, url, timeout_s], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


def _spy(pid: int) -> str:
    try:
        command = [_BIN / "py-spy", "dump", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def _ranks_of(mark: str) -> dict[int, int]:
    """Return the process of each rank: the one whose parent is none."""
    found: dict[int, int] = {}
    for pid in marked(mark):
        try:
            rank, parent = _rank_of(pid), int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if rank is not None and _rank_of(parent) is None:
            found[rank] = pid
    return dict(sorted(found.items()))


def _rank_of(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(each[5:]) for each in variables if each.startswith(b"RANK=")), None)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _stacks_of_page(page: str) -> dict[int, Stack]:
    sections = {int(found[1]): html.unescape(found[2]) for found in _SECTION.finditer(page)}
    return {rank: _frames(text, _FAULTHANDLER) for rank, text in sections.items()}


def _frames(text: str, pattern: re.Pattern[str]) -> Stack:
    """Return the main thread's frames: of the thread that begins in the script."""
    threads: list[Stack] = [[]]
    for line in text.splitlines():
        if found := pattern.match(line):
            threads[-1].append((found[1], int(found[2])))
        elif threads[-1]:
            threads.append([])
    return next((frames for frames in threads if frames and os.path.basename(frames[-1][0]) == "train.py"), [])


def _line_of(stack: Stack) -> int:
    """Return the innermost line of the script; 0 where there is none."""
    return next((line for file, line in stack if os.path.basename(file) == "train.py"), 0)


def _waits(stack: Stack) -> bool:
    for file, _ in stack:
        if os.path.basename(file) == "train.py":
            return False
        if any(part in file for part in _WAITS):
            return True
    return False


def _find_in_stacks(fault: Fault, stacks: Mapping[int, Stack]) -> Found:
    """Return what whoever reads the stacks by the rule finds."""
    blamed = {rank for rank in range(fault.ranks) if not stacks.get(rank) or not _waits(stacks[rank])}
    if not any(stacks.values()):
        return "nothing"
    lines = {_line_of(stacks.get(rank, [])) for rank in (blamed or fault.culprits)}
    if len(fault.culprits) > 1:
        return "line" if not blamed and lines >= set(fault.lines) else "nothing"
    if blamed != set(fault.culprits):
        return "nothing"
    return "line" if fault.lines and lines <= set(fault.lines) else "rank"


def _words_of(stacks: Mapping[int, Stack]) -> str:
    return "; ".join(
        f"rank {rank} {'waits' if _waits(stack) else 'is'} at line {_line_of(stack)}"
        for rank, stack in stacks.items()
        if stack
    )


def _without_server(output: str) -> str:
    """Return what the job has said, without what the debug server said as it was asked."""
    return "\n".join(line for line in output.splitlines() if not any(part in line for part in _SERVER))


def _recorded(output: str) -> str:
    """Return what torch's analysis of the recorders says of the first call that does not fit, or why it failed."""
    if failure := _FAILURE.search(output):
        return f"its analysis failed: {failure[1]}"
    at = max(output.rfind("Not all ranks joining collective"), output.rfind("has errors"))
    return "" if at < 0 else re.sub(r"\s+", " ", output[max(0, at - 40) : at + 1500])


def _find_in_record(fault: Fault, said: str) -> Found:
    missing = re.search(r"missing ranks: \{([\d, ]+)\}", said)
    named = {int(rank) for rank in missing[1].split(",")} if missing else set()
    named |= {int(rank) for rank in re.findall(r"Culprit rank (\d+)", said)}
    if not named or not named <= set(fault.culprits):
        return "nothing"
    has_lines = bool(fault.lines) and all(re.search(rf"train\.py:{line}\b", said) for line in fault.lines)
    return "line" if has_lines else "rank"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
