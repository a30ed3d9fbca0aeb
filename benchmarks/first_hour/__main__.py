"""The first hour of a new user, step by step: install a wheel, train, break it, plan, submit a job, open the console.

    make first-hour                                        builds the wheel first
    python -m benchmarks.first_hour --wheel dist/*.whl     takes one that is there
    python -m benchmarks.first_hour --installed            begins after it, in the environment of the last run

Every command is one that README or docs show. What each prints is kept in a folder, checked, and timed; the first
step that does not do or say what it must ends the run with exit code 1. The environment is empty but for Python; the
packages come from wherever pip takes them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.first_hour.console import check_job_page, server, take_screenshots
from benchmarks.first_hour.scripts import FAULTS, OWN, ROOT, parallel, scripts_of_page
from benchmarks.first_hour.step import StepError, Terminal, environment_of


def main() -> int:
    """Run the steps and print the table; return 1 if one fails."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--wheel", type=Path, help="Wheel to install. Default: build one.")
    # Outside the repository: code that its .gitignore excludes would not be part of a job.
    outside = Path(tempfile.gettempdir()) / "phalanx-first-hour"
    parser.add_argument("--folder", type=Path, default=outside, help="Made anew, outside a repository.")
    parser.add_argument("--installed", action="store_true", help="Use the environment that the last run made.")
    parser.add_argument("--json", action="store_true", help="Print the steps as one JSON object at the end.")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    tools = folder / "env" / "bin"
    for name in ("work", "outputs", "home", *(() if args.installed else ("env", "wheel"))):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("work", "outputs"):
        (folder / name).mkdir(parents=True)
    terminal = Terminal(folder / "work", folder / "outputs", environment_of(tools, folder / "home"))
    try:
        if not args.installed:
            install(terminal, tools, args.wheel)
        check_installation(terminal)
        train(terminal)
        run_broken_scripts(terminal)
        plan(terminal)
        submit_job(terminal, tools / "phalanx")
    except StepError as reason:
        sys.stdout.write(f"FAILED after {len(terminal.steps)} steps: {reason}\n")
        return 1
    sys.stdout.write(f"\n{table(terminal)}\nEvery output is in {terminal.outputs}\n")
    if args.json:
        steps = [{"name": step.name, "command": step.command, "seconds": step.seconds} for step in terminal.steps]
        sys.stdout.write(json.dumps({"steps": steps}) + "\n")
    return 0


def table(terminal: Terminal) -> str:
    """Return the steps as a table in Markdown."""
    rows = [f"| {step.name} | `{step.command}` | {step.seconds:.1f} | {step.lines} |" for step in terminal.steps]
    total = f"| all | | {sum(step.seconds for step in terminal.steps):.1f} | |"
    return "\n".join(["| step | command | seconds | lines |", "|---|---|---|---|", *rows, total])


def install(terminal: Terminal, tools: Path, wheel: Path | None) -> None:
    """Make an empty environment and install the wheel into it, as docs/install.md says."""
    if wheel is None:
        wheels = terminal.folder.parent / "wheel"
        terminal.run(
            "build the wheel", f"{sys.executable} -m pip wheel --quiet --no-deps -w {wheels} {ROOT}", limit_s=1800
        )
        wheel = next(wheels.glob("*.whl"))
    else:
        wheel = wheel.resolve()
    subprocess.run([sys.executable, "-m", "venv", str(tools.parent)], check=True)
    terminal.run("install torch", "pip install --quiet torch>=2.13,<2.14", limit_s=1800)
    terminal.run("install the wheel", f"pip install --quiet {wheel}[examples]", limit_s=1800)


def check_installation(terminal: Terminal) -> None:
    """Print the version and the state of the machine."""
    terminal.run("version", "phalanx --version", must_print=[r"phalanx, version \d"])
    terminal.run("doctor", "phalanx doctor", must_print=[r"torch\s.*ok", r"failed: 0"])


def train(terminal: Terminal) -> None:
    """Run the quickstart, the scripts of the docs, and another script on one process and on two."""
    quickstart = re.search(r"phalanx (run .*train\.py.*)", (ROOT / "Makefile").read_text())
    assert quickstart is not None
    shutil.copytree(ROOT / "examples", terminal.folder / "examples")
    terminal.run(
        "quickstart", f"phalanx {quickstart[1]}", must_print=[r"global batch 32 = 16 per rank x 2", r"RESULT \{"]
    )

    plain, converted = scripts_of_page("get-started.md")[:2]
    (terminal.folder / "single.py").write_text(plain)
    (terminal.folder / "train.py").write_text(converted)
    terminal.run("script of the docs alone", "python single.py", must_print=["epoch 2: loss "])
    alone = terminal.run("script of the docs on 1 process", "python train.py", must_print=["epoch 2: loss "])
    both = terminal.run("script of the docs on 2 processes", "phalanx run -n 2 train.py", must_print=["epoch 2: loss "])
    losses = [re.findall(r"^epoch .*", text, re.MULTILINE) for text in (alone, both)]
    if losses[0] != losses[1]:
        raise StepError(f"1 and 2 processes print different losses: {losses}")

    for name, text in (("own.py", OWN), ("own2.py", parallel(OWN))):
        (terminal.folder / name).write_text(text)
    terminal.run("own script", "python own.py", must_print=[r"epoch 7: accuracy 0\.9"])
    terminal.run("own script on 2 processes", "phalanx run -n 2 own2.py", must_print=[r"epoch 7: accuracy 0\.9"])


def run_broken_scripts(terminal: Terminal) -> None:
    """Run the script with each fault, and check the messages."""
    for fault in FAULTS:
        file = f"{fault.name.replace(' ', '_')}.py"
        (terminal.folder / file).write_text(fault.script())
        patterns = [p.format(file=re.escape(file), line=fault.line()) for p in fault.must_print]
        terminal.run(fault.name, f"phalanx run {fault.flags} {file}", must_print=patterns, exit_code=-1, limit_s=120)
    terminal.run(
        "a flag that does not exist", "phalanx run --nproces 2 train.py",
        must_print=[r"^phalanx run: No such option '--nproces'\. Did you mean '--nprocs'\?"], exit_code=2,
    )  # fmt: skip


def plan(terminal: Terminal) -> None:
    """Plan the script for 64 GPUs that are not there."""
    terminal.run(
        "plan for 64 GPUs", "phalanx plan train.py --cluster h100x8,nodes=8 --save plan.json",
        must_print=[r"64", r"plan\.json: train with it"],
    )  # fmt: skip


def submit_job(terminal: Terminal, phalanx: Path) -> None:
    """Submit the script as a job, wait for it, and check its pages in the console."""
    submitted = terminal.run(
        "submit a job", "phalanx job submit --name hello --procs-per-node 2 -- python train.py",
        must_print=["is queued. Watch it: phalanx job logs -f hello-"],
    )  # fmt: skip
    job = submitted.split()[0]
    terminal.run("wait for the job", f"phalanx job wait {job}", must_print=["succeeded"])
    terminal.run("log of the job", f"phalanx job logs {job}", must_print=["epoch 2: loss "])
    terminal.run("show the job", f"phalanx job show {job}", must_print=["succeeded", "preparing"])
    terminal.run("list jobs as JSON", "phalanx job list --json", must_print=[r'"state": "succeeded"'])
    began = time.monotonic()
    with server(terminal, phalanx) as (address, token):
        terminal.check("console starts", "phalanx ui --no-browser --port 0", time.monotonic() - began, address)
        check_job_page(terminal, address, token, job)
        take_screenshots(terminal, address, token, job)


if __name__ == "__main__":
    sys.exit(main())
