"""`FAULTS`, `parallel`, `scripts_of_page`: a script, its two-line change, faults in it, and scripts of the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

OWN = """\
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(1)
points = torch.rand(4000, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
train, test = random_split(TensorDataset(points, inside), [3200, 800])

net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loader = DataLoader(train, batch_size=50, shuffle=True)

for epoch in range(8):
    net.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
    net.eval()
    with torch.no_grad():
        correct = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, batch_size=200))
    print(f"epoch {epoch}: accuracy {correct / len(test):.3f}, {time.process_time():.1f} s of CPU", flush=True)
"""
"""A single-process script that knows nothing of Phalanx."""


def parallel(script: str) -> str:
    """Return a script with the two lines that make it parallel: an import, and `px.distribute`."""
    script = script.replace("import torch\n", "import torch\nimport phalanx as px\n", 1)
    last = re.search(r"^loader = .*$", script, re.MULTILINE)
    if last is None:
        raise ValueError("the script makes no loader")
    call = "net, optimizer, loader = px.distribute(net, optimizer, loader)"
    return f"{script[: last.end()]}\n{call}{script[last.end() :]}"


@dataclass(frozen=True)
class Fault:
    """A fault in the parallel script.

    Attributes:
        name: Of its step, and of its file.
        before: A piece of the script.
        after: What stands there instead.
        must_print: What the message must match: the cause, the file and line, what to do.
        flags: Of `phalanx run`.
    """

    name: str
    before: str
    after: str
    must_print: tuple[str, ...]
    flags: str = "-n 2"

    def script(self) -> str:
        """Return the broken script."""
        whole = parallel(OWN)
        if self.before not in whole:
            raise ValueError(f"{self.name}: {self.before!r} is not in the script")
        return whole.replace(self.before, self.after, 1)

    def line(self) -> int:
        """Return the number of the line that is at fault: the first that the change brings."""
        whole, broken = (script.splitlines() for script in (parallel(OWN), self.script()))
        return 1 + next(n for n, line in enumerate(broken) if line != whole[n])


FAULTS = (
    Fault(
        "a rank raises",
        "        optimizer.zero_grad()\n",
        '        optimizer.zero_grad()\n        if px.init().rank == 1 and epoch == 1: raise ValueError("label 12")\n',
        (r"rank 1", r"ValueError: label 12", r"{file}\D+{line}", r"workerlog\.1"),
    ),
    Fault(
        "shapes that do not fit",
        "nn.Linear(32, 2))",
        "nn.Linear(64, 2))",
        (r"rank \d", r"mat1 and mat2 shapes cannot be multiplied \(50x32 and 64x2\)", r"{file}"),
    ),
    Fault(
        "a rank that hangs",
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        while px.init().rank == 1 and epoch: time.sleep(1)\n",
        (r"rank 1 is at {file}:{line}", r"rank 0 waits", r"--hang-timeout"),
        flags="-n 2 --hang-after 3 --hang-timeout 5",
    ),
    Fault(
        "a collective on one rank",
        '    print(f"epoch',
        '    if px.init().rank == 0: loss = px.global_mean(loss)\n    print(f"epoch',
        (r"ranks wait for each other", r"{file}\D+{line}", r"look for an `if` on the rank"),
        flags="-n 2 --hang-after 3 --hang-timeout 5",
    ),
)


def scripts_of_page(page: str) -> list[str]:
    """Return the Python blocks with a title of a page of the docs."""
    return re.findall(r'```python title="[^"]*"\n(.*?)```', (ROOT / "docs" / page).read_text(), re.DOTALL)
