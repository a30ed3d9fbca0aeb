"""Plans of models that nobody here wrote, in the sizes of their papers, for nodes of eight H100s: a table in Markdown.

Says of every model and number of devices how long its capture and its search take in processor time, how far the Plan
may be from the best, and what it is predicted to take. Nothing is computed and no memory of the models is there.

`--apply` trains small models of the same code on ranks of this machine instead, in float64, under the Plan that is
chosen for them and under others (`published_rank.limits_of`), and says how far losses and parameters are from those of
one process after three steps of SGD with momentum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.published_models import PUBLISHED, batch, build, build_small, import_foreign
from benchmarks.published_rank import ROWS_OF, sample
from benchmarks.report import machine
from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.errors import PlanError
from phalanx.strategy import DistributedStrategy

PER_NODE = 8
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model on one cluster."""

    model: str
    parameters: int
    devices: int
    level: str
    layers: int
    """Calls of modules in a step."""

    capture_s: float
    plan_s: float
    """Of `px.auto_parallel` as a whole, a capture included."""

    plan: str
    """Or why there is none."""

    gap: float | None = None
    """In %."""

    step_ms: float | None = None
    memory_gib: float | None = None


def plan_model(name: str, devices: int, *, quick: bool, return_outputs: bool = True) -> PlannedModel:
    """Capture and plan one model in bfloat16 with Adam, at least on so many devices."""
    published = PUBLISHED[name]
    model, columns = (build_small(name), sample(name)) if quick else (build(name), batch(name, devices))
    started = time.process_time()
    captured = capture(model, columns, published.loss)
    capture_s = time.process_time() - started
    facts: dict[str, Any] = {
        "model": name,
        "parameters": sum(param.numel() for param in model.parameters()),
        "devices": devices,
        "level": captured.level,
        "layers": len(list_module_calls(captured)),
        "capture_s": capture_s,
    }
    strategy = DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    cluster = f"h100x{PER_NODE}" + (f",nodes={devices // PER_NODE}" if devices > PER_NODE else "")
    started = time.process_time()
    try:
        answer = auto_parallel(
            model,
            columns,
            published.loss,
            cluster=cluster,
            strategy=strategy,
            return_outputs=return_outputs,
            top_k=1,
        )
    except PlanError as error:
        return PlannedModel(**facts, plan_s=time.process_time() - started, plan=str(error).partition(" (")[0])
    plan_s, best = time.process_time() - started, answer.search.best
    cut = len(best.sharded_layers)
    return PlannedModel(
        **facts,
        plan_s=plan_s,
        plan=str(best.config) + (f", {cut} layers cut" if cut else ""),
        gap=answer.gap,
        step_ms=answer.seconds * 1e3,
        memory_gib=answer.memory / 2**30,
    )


def format_table(rows: list[PlannedModel]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | parameters | layers | devices | capture, s | plan, s | gap, % | Plan | step, ms | memory, GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    before = ""
    for row in rows:
        model = (row.model, f"{row.parameters / 1e6:,.0f}M", str(row.layers)) if row.model != before else ("", "", "")
        found = ("" if value is None else f"{value:.1f}" for value in (row.step_ms, row.memory_gib))
        gap = "" if row.gap is None else f"{row.gap:.1f}"
        cells = (*model, str(row.devices), f"{row.capture_s:.1f}", f"{row.plan_s:.1f}", gap, row.plan, *found)
        lines.append(f"| {' | '.join(cells)} |")
        before = row.model
    return "\n".join(lines)


def apply_plans(names: Sequence[str], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Train the small models alone and on ranks; return how far apart they are, a row for each model and Plan."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in track((1, *ranks), "training on 1 process, then on ranks", console=Console(stderr=True)):
            command = [
                *(sys.executable, "-m", "phalanx.launch", "-n", str(count), "--log-dir", f"{folder}/log"),
                *(str(ROOT / "benchmarks" / "published_rank.py"), folder, ",".join(names), ",".join(map(str, ranks))),
            ]
            env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
            if done.returncode:
                raise RuntimeError(f"{count} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
            if count > 1:
                rows += json.loads((Path(folder) / ROWS_OF.format(ranks=count)).read_text())
    return sorted(rows, key=lambda row: names.index(row["model"]))


def format_applied(rows: list[dict[str, Any]]) -> str:
    """Return rows of `apply_plans` as a table in Markdown: a line for each model and way."""
    ranks = sorted({row["ranks"] for row in rows})
    heads = [head for count in ranks for head in (f"Plan on {count} ranks", "loss", "parameters")]
    lines = [f"| model | limits | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    before = ""
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in rows):
        cells = ["" if model == before else model, way]
        for count in ranks:
            row = next(row for row in rows if (row["model"], row["way"], row["ranks"]) == (model, way, count))
            plan = row["plan"].replace(" recompute=none", "").replace(" model=1 zero=0", "")
            cells += [plan, f"{row['loss']:.0e}", f"{row['params']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
        before = model
    return "\n".join(lines)


def main() -> None:
    """Plan the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(PUBLISHED), help="which models, separated by commas")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 64], help="in nodes of eight")
    parser.add_argument(
        "--no-return-outputs",
        action="store_true",
        help="for loops that let go of the model's outputs once they have the loss",
    )
    parser.add_argument("--quick", action="store_true", help="small models on eight devices, only to see that it works")
    parser.add_argument("--apply", action="store_true", help="train small models under their Plans, on --ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of --apply")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(PUBLISHED)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(PUBLISHED)}")
    if options.apply and options.no_return_outputs:
        parser.error("--no-return-outputs is of planning, not of --apply")
    if options.apply:
        applied = apply_plans(options.cases.split(","), options.ranks)
        facts = {"bench": "bench_models", "machine": machine(), "applied": applied}
        print(json.dumps(facts) if options.json else format_applied(applied))
        return
    import_foreign()
    cases = list(itertools.product(options.cases.split(","), [PER_NODE] if options.quick else options.devices))
    rows = [
        plan_model(name, devices, quick=options.quick, return_outputs=not options.no_return_outputs)
        for name, devices in track(cases, "planning models", console=Console(stderr=True))
    ]
    if options.json:
        print(json.dumps({"bench": "bench_models", "machine": machine(), "rows": [asdict(row) for row in rows]}))
    else:
        print(format_table(rows))


if __name__ == "__main__":
    main()
