"""Hangs: is the right rank named, at the right line, and how soon; beside it what torch says of the same fault.

    python -m benchmarks.bench_doctor                      every fault, with the default --hang_after
    python -m benchmarks.bench_doctor --only sleep --hang_after 2

The faults are those of `doctor_faults`, which tests read too, and of `doctor_waits`.

torch runs the same script under torchrun, with a timeout of its process group of `--torch_timeout` seconds in place of
30 minutes, so that it speaks at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.doctor_faults import FAULTS, Fault
from benchmarks.doctor_waits import WAITS
from benchmarks.elastic_jobs import MARK, end

_BIN = Path(sys.executable).parent
_LIMIT_S = 120.0
_VERDICT = re.compile(r"=+ the job is stalled =+\n(.*?)\n=+\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of one fault."""

    fault: str
    is_right: bool
    """Whether every rank and line that matters was named."""

    seconds: float | None
    """From the fault to the words; None when nothing was said."""

    said: str


def ours(fault: Fault, hang_after_s: float) -> Outcome:
    """Run a fault under `phalanx run` until it has said why the job is stalled."""
    command = [
        _BIN / "phalanx",
        "run",
        "-n",
        fault.ranks,
        "--hang_after",
        hang_after_s,
        "--hang_timeout",
        "0",
        "train.py",
    ]
    output, seconds = _run(fault, [str(word) for word in command], until=_VERDICT)
    found = _VERDICT.search(output)
    said = re.sub(r"\s+", " ", found[1]) if found else ""
    return Outcome(fault.name, _is_right(fault, said), seconds if found else None, said)


def torch(fault: Fault, timeout_s: float) -> Outcome:
    """Run a fault under torchrun until torch's timeout has ended it."""
    if "px.init()" in fault.script:
        return Outcome(fault.name, False, None, "(not a script of torch alone)")
    timeout = f'"gloo", timeout=__import__("datetime").timedelta(seconds={timeout_s:g})'
    script = fault.script.replace('init_process_group("gloo")', f"init_process_group({timeout})")
    command = [str(_BIN / "torchrun"), "--standalone", "--nproc_per_node", str(fault.ranks), "train.py"]
    output, seconds = _run(fault, command, script=script)
    errors = [line.strip() for line in output.splitlines() if "Error" in line or "imed out" in line]
    return Outcome(fault.name, _is_right(fault, output), seconds if errors else None, errors[0] if errors else "")


def _is_right(fault: Fault, said: str) -> bool:
    ranks = all(re.search(rf"\branks?\b[^;]*\b{rank}\b", said) for rank in fault.culprits)
    first = len(fault.culprits) > 1 or said.startswith(f"rank {fault.culprits[0]} ") or "Traceback" in said
    return ranks and first and all(re.search(rf'train\.py(:|", line ){line}\b', said) for line in fault.lines[:2])


def _run(
    fault: Fault, command: list[str], *, script: str = "", until: re.Pattern[str] | None = None
) -> tuple[str, float]:
    """Return the output, and the seconds from the fault until `until` stood in it, or to the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script or fault.script)
        mark = uuid.uuid4().hex
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark}
        with (folder / "output").open("w") as file:
            job = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            started = time.time()
            while job.poll() is None and time.time() - started < _LIMIT_S:
                time.sleep(0.05)
                if until is not None and until.search((folder / "output").read_text()):
                    break
            ended = time.time()
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        end(mark)  # a rank that holds its interpreter lock hears no SIGTERM, and torchrun may be gone before it
        fault_at = folder / "fault"
        return (folder / "output").read_text(), ended - (float(fault_at.read_text()) if fault_at.exists() else started)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the faults and print a table, and one JSON object with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--range", default=":", help="which of those, such as 0:10, or 1::2")
    parser.add_argument("--hang_after", type=float, default=10.0)
    parser.add_argument("--torch_timeout", type=float, default=0.0, help="also run torchrun, with this timeout")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once; they mostly wait")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one fault, soon, only to see that it works")
    chosen = parser.parse_args(arguments)
    part = slice(*(int(number) if number else None for number in chosen.range.split(":")))
    faults = [fault for fault in (*FAULTS, *WAITS) if chosen.only in fault.name][part]
    if chosen.quick:
        faults, chosen.hang_after = faults[:1], 1.0

    def run(fault: Fault) -> tuple[Outcome, Outcome | None]:
        found = ours(fault, chosen.hang_after)
        other = torch(fault, chosen.torch_timeout) if chosen.torch_timeout else None
        sys.stderr.write(f"{_row(found)}  {_row(other) if other else ''}\n")
        return found, other

    with ThreadPoolExecutor(chosen.jobs) as pool:
        rows = list(pool.map(run, faults))
    if chosen.json:
        print(json.dumps([{"phalanx": asdict(a), "torch": asdict(b) if b else None} for a, b in rows], indent=1))
    right = [found for found, _ in rows if found.is_right]
    times = [found.seconds for found, _ in rows if found.seconds is not None]
    median = statistics.median(times) if times else float("nan")
    print(
        f"{len(right)} of {len(rows)} right, median {median:.1f} s to the verdict (--hang_after {chosen.hang_after:g})"
    )
    if chosen.torch_timeout:
        others = [other for _, other in rows if other is not None and other.is_right]
        print(f"torch alone, with a timeout of {chosen.torch_timeout:g} s: {len(others)} of {len(rows)} right")


def _row(outcome: Outcome) -> str:
    seconds = "   -  " if outcome.seconds is None else f"{outcome.seconds:5.1f}s"
    return f"{'right' if outcome.is_right else 'WRONG'} {seconds} {outcome.fault}: {outcome.said[:150]}"


if __name__ == "__main__":
    main()
