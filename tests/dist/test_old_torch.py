"""Whichever import meets an old torch first says so in words, before anything inside torch can fail."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist

WAYS_IN = [
    "import phalanx; phalanx.init",
    "from phalanx import fleet",
    "import phalanx.fleet",
    "import phalanx.distributed.fleet",
    "from phalanx.distributed import init_parallel_env",
    "from phalanx.data import ShardedLoader",
    "import phalanx.parallel.distribute",
    "import phalanx.train.step.step",
    "import phalanx.comm",
]

SCRIPT = """
import importlib.metadata, json, sys
importlib.metadata.version = lambda _: "1.9.0"
said = {}
for way in json.loads(sys.argv[1]):
    try:
        exec(way, {})
        said[way] = "nothing"
    except Exception as error:
        said[way] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_every_way_in_names_an_old_torch():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(WAYS_IN)], capture_output=True, text=True, timeout=60, check=True
    )
    for way, said in json.loads(done.stdout).items():
        assert "ConfigError: Phalanx needs torch >=2.13,<2.14 (a CPU or a CUDA build), found 1.9.0" in said, way
