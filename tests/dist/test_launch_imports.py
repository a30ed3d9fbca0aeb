"""Old import lines lead to the same objects, and starting is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launching import launch

pytestmark = pytest.mark.dist


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first", ["from phalanx.distributed import fleet as a", "import phalanx.distributed.fleet as a"]
)
def test_both_import_lines_give_the_same_module(first: str) -> None:
    code = f"{first}\nimport phalanx.distributed.fleet as b, phalanx.fleet as c\nprint(a is b is c)"
    assert python(code) == "True"


def test_the_basic_verbs_are_found_under_the_old_name() -> None:
    code = "import phalanx.distributed as old, phalanx.parallel.distribute as new\n"
    code += "print(old.DataParallel is new.DataParallel)"
    assert python(code) == "True"


def test_an_unknown_name_gets_the_nearest() -> None:
    code = "import phalanx.distributed as d\ntry: d.DataParalel\nexcept AttributeError as e: print(e)"
    assert "Did you mean 'DataParallel'?" in python(code)


def test_the_launcher_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, phalanx.launch.cli.flags, phalanx.launch.job.launcher, phalanx.cli.group\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_a_model_that_is_not_planned_waits_for_no_planner() -> None:
    code = (
        "import sys, phalanx.train.model.model\n"
        "print(sorted(name for name in sys.modules if name.startswith('phalanx.auto.')))"
    )
    assert python(code) == "[]"


def test_who_serves_tables_and_who_has_only_orders_of_rows_wait_for_no_torch() -> None:
    code = (
        "import sys, phalanx.cli.serve_table, phalanx.ps.serving.app, phalanx.ps.serving.servers_replica\n"
        "import phalanx.ps.serving.snapshot_replica, phalanx.data.sampling.hash64\n"
        "print('torch' in sys.modules)"
    )
    assert python(code) == "False"


STARTS_ANOTHER = """
import subprocess, sys
meet = "from torch.distributed import TCPStore; from os import environ; TCPStore(environ['MASTER_ADDR'], "
meet += "int(environ['MASTER_PORT']), is_master=False).set('a', 'b')"
print("torch here:", "torch" in sys.modules, flush=True)
print("others meet:", subprocess.run([sys.executable, "-c", meet]).returncode)
"""


def test_a_script_of_the_standard_library_waits_for_no_torch_and_has_a_store_for_who_asks(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(STARTS_ANOTHER)
    done = launch(tmp_path, "start.py")
    assert done.code == 0, done.out
    assert done.log("workerlog.0") == "torch here: False\nothers meet: 0\n"
