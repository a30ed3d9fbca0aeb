"""Run every `bench_*` in this folder, one after the other, with the flags given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Return 0 when every benchmark ran."""
    worst = 0
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        worst = max(worst, subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}", *sys.argv[1:]]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
