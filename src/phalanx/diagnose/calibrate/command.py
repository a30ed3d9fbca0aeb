"""`phalanx calibrate`: measure operators and collectives of this machine for predictions and plans."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phalanx.cluster.calibration.figures import BACKENDS, Measured, Precision, Rates, measured_file
from phalanx.cluster.spec.detect import memory_bytes, processor_name
from phalanx.errors import BackendError
from phalanx.i18n import tr

POLL_S = 0.2
"""How often progress is looked at."""

MIB = 2**20


@click.command(epilog="\b\nExample:\n  phalanx calibrate -n 4\n  phalanx calibrate --quick")
@click.option(
    "-n", "ranks", type=click.IntRange(1), default=2, show_default=True, help="Measure up to that many ranks at once."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to keep it. Default: your cache.")
@click.option("--quick", is_flag=True, help="Few points, for a first look: a plan from them is a guess.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def command(ranks: int, out: Path | None, quick: bool, as_json: bool) -> None:
    """Measure this machine's processors and the links between ranks, for `--cluster here`.

    Takes one minute for 2 ranks, two for 4. Each number of ranks is measured as `phalanx run -n` starts it, with the
    threads that ranks get there. Leave the machine alone meanwhile.
    """
    path = out or measured_file()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        click.echo(
            tr(
                "Load {load} on {cores} cores: other work is running here, and what is measured now will look slow.",
                load=f"{load:.1f}",
                cores=cores,
            ),
            err=True,
        )
    counts = rank_counts(ranks)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    ) as progress:
        bar = progress.add_task("", total=1.0)

        def report_progress(index: int, done: float, part: str) -> None:
            description = tr("ranks: {ranks}, {part}", ranks=counts[index], part=part)
            progress.update(bar, completed=(index + done) / len(counts), description=description)

        measured = measure(counts, quick=quick, report_progress=report_progress)
        progress.update(bar, completed=1.0)
    measured.save(path)
    if as_json:
        click.echo(measured.model_dump_json(by_alias=True))
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table(measured))
    console.print(
        tr("Saved to {path}; the cluster name `here` means this machine.", path=path), highlight=False, soft_wrap=True
    )


def rank_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of ranks to measure: 1, 2, 4 and so on, and the greatest."""
    return tuple(sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}))


def measure(counts: Sequence[int], *, quick: bool, report_progress: Callable[[int, float, str], None]) -> Measured:
    """Return this machine's figures with each of some numbers of ranks.

    Args:
        counts: Numbers of ranks.
        quick: Few points and few samples.
        report_progress: Called with the index in `counts`, the share done and the part that is measured.

    Raises:
        BackendError: If ranks cannot be started or fail; with the last lines they said.
    """
    rates: dict[int, Rates] = {}
    for index, count in enumerate(counts):
        rates[count] = _measure_one(count, quick, partial(report_progress, index))
    return Measured(
        host=socket.gethostname(),
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory=memory_bytes(),
        torch=importlib.metadata.version("torch"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rates=rates,
    )


def _measure_one(count: int, quick: bool, report_progress: Callable[[float, str], None]) -> Rates:
    with tempfile.TemporaryDirectory(prefix="phalanx-calibrate-") as name:
        folder = Path(name)
        arguments = ["-m", "phalanx", "run", "-n", str(count), "--log-dir", str(folder / "log")]
        arguments += ["-m", "phalanx.diagnose.calibrate.rank", name, *(["--quick"] if quick else [])]
        # GPUs are not measured: their rates are presets.
        environment = {k: v for k, v in os.environ.items() if k != "PHALANX_BACKEND"} | {"CUDA_VISIBLE_DEVICES": ""}
        with (folder / "said").open("w") as output:
            process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=output, stderr=output)
            try:
                for done, part in _watch(process, folder / "progress"):
                    report_progress(done, part)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)  # The launcher ends its ranks.
                    process.wait()
        if process.returncode:
            last = "\n".join((folder / "said").read_text().splitlines()[-20:])
            raise BackendError(f"{count} ranks could not be measured (exit code {process.returncode}):\n{last}")
        return combine_rates(
            [Rates.model_validate_json((folder / f"{rank}.json").read_text()) for rank in range(count)]
        )


def _watch(process: subprocess.Popen[bytes], progress: Path) -> Iterator[tuple[float, str]]:
    """Yield how far the ranks are until they end."""
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            lines = progress.read_text().splitlines() if progress.exists() else []
            if lines and len(words := lines[-1].split(maxsplit=2)) == 3:
                yield (int(words[0]) - 1) / int(words[1]), words[2]


def combine_rates(sheets: Sequence[Rates]) -> Rates:
    """Return the medians over ranks that measured the same points."""
    return Rates.model_validate(_median([json.loads(sheet.model_dump_json()) for sheet in sheets]))


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_median(part) for part in zip(*values, strict=True)]
    # Equal numbers stay what they are: a mean of two whole ones would be a float.
    return first if all(value == first for value in values) else statistics.median(values)


# -- showing it ------------------------------------------------------------------------------------------------------


def table(measured: Measured) -> Table:
    """Return the figures a person looks for, a column for each number of ranks."""
    title = f"{measured.host}: {measured.processor}, {measured.cores} cores, torch {measured.torch}"
    grid = Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False)
    grid.add_column("")
    for count in measured.ranks:
        heading = tr("ranks: {ranks}, threads each: {threads}", ranks=count, threads=measured.at(count).threads)
        grid.add_column(heading, justify="right", no_wrap=True)
    for label, cell in _rows():
        cells = [cell(measured.at(count), count) for count in measured.ranks]
        if any(cells):
            grid.add_row(label, *cells)
    return grid


def _rows() -> Iterator[tuple[str, Callable[[Rates, int], str]]]:
    for size in (64, 512, 1024):
        for dtype in get_args(Precision):
            yield f"{tr('matrix product')} {size}³ {dtype}, GFLOP/s", partial(_product, size, dtype)
    yield f"{tr('element-wise')} 1 MiB, GB/s", _stream
    yield f"{tr('one operator, forward + backward')}, µs", _launches
    yield "Adam 1 M, ms", _adam
    for backend in BACKENDS:
        for size, unit in ((64, "64 B, µs"), (MIB, "1 MiB, µs")):
            yield f"all_reduce {backend} {unit}", partial(_all_reduce, size, backend)
        yield f"{tr('seconds lost per second of overlap')}, {backend}", partial(_beside, backend)


def _product(size: int, dtype: Precision, rates: Rates, _: int) -> str:
    return f"{2 * size**3 / rates.matmul_s(size, size, size, dtype) / 1e9:.0f}"


def _stream(rates: Rates, _: int) -> str:
    return f"{2 * MIB / rates.operator_s('elementwise', MIB) / 1e9:.1f}"


def _launches(rates: Rates, _: int) -> str:
    return f"{rates.launch_s * 1e6:.1f} + {rates.backward_launch_s * 1e6:.1f}"


def _adam(rates: Rates, _: int) -> str:
    return f"{rates.optimizer_s('adam', 1e6, 10) * 1e3:.2f}"


def _all_reduce(size: int, backend: str, rates: Rates, ranks: int) -> str:
    return f"{rates.collective_s('all_reduce', size, ranks, backend) * 1e6:.0f}" if ranks > 1 else ""


def _beside(backend: str, rates: Rates, ranks: int) -> str:
    return f"{rates.contention(backend):.2f}" if ranks > 1 else ""
