"""Steps a second of a job whose server and workers are on two hosts, with rows as bfloat16 beside float32.

    python -m benchmarks.bench_rate_limits [--quick] [--json] [--cases "1gbit,100mbit"]

One server and two workers in mode `sync` (`between_hosts_rank.py`): 26 slots, 512 examples, so about 13,000 rows of 16
values pulled and pushed a step and worker, over TLS. Two network namespaces stand for the hosts, with so many bits a
second to the server's and from it. The weights must be those of the job on one host, bit for bit. Needs root.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.network_spaces import NetworkSpaces, are_possible
from benchmarks.parameter_server import jobs
from benchmarks.report import arguments, measure_pairs, show

CASES = {"1gbit": 200, "100mbit": 50}
"""Rates, and how many steps take some seconds at each."""

SCRIPT = Path(__file__).parent / "between_hosts_rank.py"
LAUNCH = [sys.executable, "-m", "phalanx", "run"]


class Jobs:
    """Jobs that differ by their hosts alone, and so must train the same weights."""

    def __init__(self, dtype: str, steps: int) -> None:
        self._settings = {"BENCH_STEPS": str(steps), "BENCH_WIRE_DTYPE": dtype}
        self._weights: set[str] = set()

    def run_on_one_host(self) -> float:
        """Return the steps a second without a network."""
        return self._run([[*LAUNCH, "--server-num", "1", "--worker-num", "2", str(SCRIPT)]])

    def run_on_two_hosts(self, rate: str) -> float:
        """Return the steps a second with at most `rate` to and from the server."""
        with NetworkSpaces(2) as spaces:
            spaces.limit(0, rate)
            server, host = spaces.addresses
            places = ["--servers", f"{server}:6170", "--workers", f"{host}:6171,{host}:6172"]
            return self._run([[*spaces.enter(node), *LAUNCH, *places, str(SCRIPT)] for node in range(2)])

    def _run(self, commands: list[list[str]]) -> float:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs.run(commands, folder, self._settings | {"PHALANX_JOB_SECRET": secrets.token_hex(32)})
            trained = jobs.results(folder, "trained", 2)
        self._weights |= {worker["weights"] for worker in trained}
        if len(self._weights) != 1:
            raise RuntimeError("the job on two hosts has not trained the weights of the one on one host")
        return min(float(worker["steps_per_s"]) for worker in trained)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    if not are_possible():
        sys.exit("not measured: network namespaces need root and `ip`")
    rows = []
    for rate in asked.cases:
        sides = [Jobs(dtype, steps=3 if asked.quick else CASES[rate]) for dtype in ("bfloat16", "float32")]
        for side in sides:
            side.run_on_one_host()
        ours, peer = (partial(side.run_on_two_hosts, rate) for side in sides)
        rows.append(
            measure_pairs(
                rate,
                ours,
                peer,
                pairs=1 if asked.quick else 5,
                unit="steps/s",
                better="higher",
                peer_name="float32",
            )
        )
    show("bench_rate_limits", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
