"""Count the files whose functions run while a value passes through: `python -m benchmarks.walks`.

Every Python process of a walk notes each file of the package in which a function is called; modules' own lines, which
run at import, do not count. So a count is an upper bound: it has the helpers beside the path too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import phalanx

ROOT = Path(__file__).parent.parent
SOURCE = Path(phalanx.__file__).parent

TRACER = """
import os, sys, threading
_folder, _source = os.environ["WALK_FOLDER"], os.environ["WALK_SOURCE"]
_go, _stop, _seen = os.path.join(_folder, "go"), os.path.join(_folder, "stop"), set()

def _note(frame, event, argument):
    if event != "call" or frame.f_code.co_flags & 0x02 == 0:
        return  # code of modules and classes has no fast locals
    file = frame.f_code.co_filename
    if not file.startswith(_source) or file in _seen:
        return
    if os.environ.get("WALK_MARKED") and (not os.path.exists(_go) or os.path.exists(_stop)):
        return
    _seen.add(file)
    with open(os.path.join(_folder, f"{os.getpid()}.files"), "a") as log:
        log.write(file[len(_source) + 1 :] + "\\n")

def _after_fork():
    _seen.clear()

os.register_at_fork(after_in_child=_after_fork)
sys.setprofile(_note)
threading.setprofile(_note)
"""
"""What every process of a walk runs first, as its sitecustomize."""

GRADIENT = """
import os, torch, phalanx as px
px.init()
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = px.distribute(net, optimizer)[:2]
mark = lambda name: open(os.path.join(os.environ["WALK_FOLDER"], name), "w").close()
for step in range(8):
    loss = net(torch.randn(4, 8)).pow(2).mean()
    if step == 6:
        mark("go")
    loss.backward()
    if step == 6:
        mark("stop")
    optimizer.step()
    optimizer.zero_grad()
"""

ROW = """
import os, torch, phalanx as px
from phalanx import fleet
fleet.init()
strategy = px.DistributedStrategy()
strategy.a_sync = True
model = torch.nn.Sequential(px.ps.SparseEmbedding(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fleet.init(strategy=strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    fleet.init_worker()
    mark = lambda name: open(os.path.join(os.environ["WALK_FOLDER"], name), "w").close()
    for step in range(8):
        loss = model(torch.arange(16)).pow(2).mean()
        loss.backward()
        if step == 6:
            mark("go")
        optimizer.step()
        if step == 6:
            mark("stop")
        optimizer.zero_grad()
    fleet.stop_worker()
"""

PLANNED = """
import torch, phalanx as px
block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
net = torch.nn.Sequential(*[block() for _ in range(4)])
sample = (torch.randn(16, 64), torch.randn(16, 64))
print(px.auto_parallel(net, sample, torch.nn.functional.mse_loss, cluster="a100x4"))
"""


def count(command: list[str], folder: Path, *, is_marked: bool) -> set[str]:
    """Run a command in a folder and return the files, relative to the package, that ran in any of its processes."""
    (folder / "sitecustomize.py").write_text(TRACER)
    variables = {"WALK_FOLDER": str(folder), "WALK_SOURCE": str(SOURCE), "PYTHONPATH": str(folder)}
    variables |= {"PHALANX_HOME": str(folder / "home")} | ({"WALK_MARKED": "1"} if is_marked else {})
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=folder)
    if run.returncode:
        raise RuntimeError(f"{command} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return {line for log in folder.glob("*.files") for line in log.read_text().splitlines()}


WALKS = {
    "gradient": (GRADIENT, ["-m", "phalanx.launch", "-n", "2", "--log-dir", "logs", "script.py"]),
    "row": (ROW, ["-m", "phalanx.launch", "--server-num", "1", "--worker-num", "1", "--log-dir", "logs", "script.py"]),
    "job": (
        "print(1)",
        ["-m", "phalanx", "job", "run", "--name", "walk", "--code", "code", "--", "python", "script.py"],
    ),
    "plan": (PLANNED, ["script.py"]),
}


def main() -> None:
    """Print the files of each walk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)}; all unless named")
    names = parser.parse_args().walks or list(WALKS)
    if unknown := set(names) - set(WALKS):
        parser.error(f"no walk {', '.join(sorted(unknown))}; there are {', '.join(WALKS)}")
    for name in names:
        script, arguments = WALKS[name]
        with tempfile.TemporaryDirectory() as folder:
            for place in (Path(folder), Path(folder, "code")):
                place.mkdir(exist_ok=True)
                (place / "script.py").write_text(script)
            files = sorted(count([sys.executable, *arguments], Path(folder), is_marked="mark(" in script))
        print(f"{name}: {len(files)} files", *files, sep="\n  ")


if __name__ == "__main__":
    main()
