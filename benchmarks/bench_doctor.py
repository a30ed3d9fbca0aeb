"""Jobs that do not continue: is the right rank named, at the right line or with the right cause, and how soon.

    python -m benchmarks.bench_doctor                      every fault, with the default --hang-after
    python -m benchmarks.bench_doctor --only sleep --hang-after 2
    python -m benchmarks.bench_doctor --others --jobs 3    and what torch's own tools and py-spy say of them

The faults are those of `doctor_faults`, which tests read too, of `doctor_waits` and of `doctor_limits`. The
rule for the other tools is in `doctor_tools`; torch's debug server needs the packages tabulate, jinja2 and aiohttp. A
fault that the machine cannot have is left out, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.doctor_faults import FAULTS, Fault
from benchmarks.doctor_limits import LIMITS
from benchmarks.doctor_outcome import Outcome, find_in_report
from benchmarks.doctor_tools import TOOLS, ask_tools
from benchmarks.doctor_trial import Trial, why_not
from benchmarks.doctor_waits import WAITS

_BIN = Path(sys.executable).parent
_OURS = "phalanx"
_PATTERNS = {
    "hang": re.compile(r"=+ the job is stalled =+\n(.*?)\n=+\n", re.DOTALL),
    "failure": re.compile(r"=+ (\S+ \d+ failed first =+\n.*?)\n=+\n", re.DOTALL),
    "lost": re.compile(r"(The launcher on .*? is gone: [^\n]*)"),
}
_MARKS = {"line": "right", "rank": "rank only", "nothing": "WRONG"}


def ours(fault: Fault, hang_after_s: float) -> Outcome:
    """Run a fault under `phalanx run` until it has been explained."""
    with Trial(fault) as trial:
        start(trial, hang_after_s)
        is_said = trial.wait_until(lambda: bool(_said(trial)))
        return Outcome(
            fault.name, find_in_report(fault, _said(trial)), trial.seconds() if is_said else None, _said(trial)
        )


def start(trial: Trial, hang_after_s: float) -> None:
    """Start its job, on as many nodes as it has."""
    for node in range(trial.nodes):
        trial.start([_BIN / "phalanx", "run", *_flags(trial, node, hang_after_s), "train.py"], node)


def _flags(trial: Trial, node: int, hang_after_s: float) -> list[object]:
    flags: list[object] = ["--hang-after", hang_after_s, "--hang-timeout", 0]
    if trial.spaces is None:
        return ["-n", trial.fault.ranks, *flags]
    hosts = ("--ips", ",".join(trial.spaces.addresses), "--http-port", 29500, "--node-rank", node)
    return ["-n", 1, *hosts, "--log-dir", f"log{node}", *flags]


def _said(trial: Trial) -> str:
    """Return the report as one line; empty until there is one."""
    if trial.fault.verdict == "slow":
        return _slow_lines(trial.folder / "log" / "slow.json")
    found = _PATTERNS[trial.fault.verdict].search(trial.output)
    return re.sub(r"\s+", " ", found[1]) if found else ""


def _slow_lines(path: Path) -> str:
    try:
        return "; ".join(json.loads(path.read_text())["lines"])
    except (OSError, ValueError):
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the faults and print a table, or one JSON object with `--json`."""
    chosen = _parse(arguments)
    part = slice(*(int(number) if number else None for number in chosen.range.split(":")))
    faults = [fault for fault in (*FAULTS, *WAITS, *LIMITS) if chosen.only in fault.name][part]
    if chosen.quick:
        faults, chosen.hang_after = faults[:1], 1.0
    for fault in faults:
        if reason := why_not(fault):
            print(f"left out: {fault.name} {reason}", file=sys.stderr)
    faults = [fault for fault in faults if not why_not(fault)]

    def run(fault: Fault) -> dict[str, Outcome]:
        found = {_OURS: ours(fault, chosen.hang_after)}
        if chosen.others:
            found |= ask_tools(fault, timeout_s=chosen.torch_timeout, ask_after_s=chosen.ask_after)
        for tool, outcome in found.items():
            print(_row(tool, outcome), file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(chosen.jobs) as pool:
        rows = list(pool.map(run, faults))
    if chosen.json:
        print(json.dumps([{tool: asdict(outcome) for tool, outcome in row.items()} for row in rows], indent=1))
        return
    for tool in (_OURS, *TOOLS) if chosen.others else (_OURS,):
        print(_sum(tool, [row[tool] for row in rows]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--range", default=":", help="which of those, such as 0:10, or 1::2")
    parser.add_argument("--hang-after", type=float, default=10.0)
    parser.add_argument("--others", action="store_true", help="also ask torch's tools and py-spy, under torchrun")
    parser.add_argument("--torch-timeout", type=float, default=25.0, help="seconds, of torch's process group")
    parser.add_argument("--ask-after", type=float, default=12.0, help="seconds after the fault at which they are asked")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once; they mostly wait")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one fault, soon, only to see that it works")
    chosen = parser.parse_args(arguments)
    missing = [name for name in ("tabulate", "jinja2", "aiohttp") if importlib.util.find_spec(name) is None]
    if chosen.others and missing:
        parser.error(f"torch's debug server needs {', '.join(missing)}: pip install {' '.join(missing)}")
    return chosen


def _row(tool: str, outcome: Outcome) -> str:
    seconds = "   -  " if outcome.seconds is None else f"{outcome.seconds:5.1f}s"
    return f"{_MARKS[outcome.found]:9} {seconds} {tool:15} {outcome.fault}: {outcome.said[:120]}"


def _sum(tool: str, outcomes: Iterable[Outcome]) -> str:
    every = list(outcomes)
    times = [outcome.seconds for outcome in every if outcome.seconds is not None]
    median = f", median {statistics.median(times):.1f} s" if times else ""
    named = [sum(outcome.found == found for outcome in every) for found in ("line", "rank")]
    return f"{tool}: {named[0]} of {len(every)} right, of {named[1]} more the rank alone{median}"


if __name__ == "__main__":
    main()
