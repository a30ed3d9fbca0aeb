"""Coverage-guided fuzzing of parsers of foreign bytes, by hand: it continues where tests/unit/test_foreign_*.py end.

    pip install atheris
    python tests/fuzz.py rank-table -max_total_time=60     # any of TARGETS; the rest are flags of libFuzzer
    python tests/fuzz.py all -max_total_time=20            # one after the other

What is found stops the run, and the bytes are left in a file `crash-...`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import atheris


def use_plain_imports() -> ModuleType:
    """Let the plain loader import the package, for that of an editable install hides code; return the native core."""
    core = importlib.import_module("phalanx._core")
    folder = Path(sys.modules["phalanx"].__file__ or "").parents[1]
    for name in [name for name in sys.modules if name.partition(".")[0] == "phalanx"]:
        del sys.modules[name]
    sys.modules["phalanx._core"] = core
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirect" not in type(finder).__name__]
    sys.path.insert(0, str(folder))
    return core


CORE = use_plain_imports()
with atheris.instrument_imports(include=["phalanx"]):
    import phalanx

    phalanx._core = CORE
    from phalanx.addresses import parse_endpoint
    from phalanx.checkpoint.tensors.safetensors_file import TensorFile
    from phalanx.cluster.env.environment import expand_hosts
    from phalanx.cluster.rank_table import rank_table
    from phalanx.cluster.rendezvous import Announcement
    from phalanx.data.ctr.slots import SlotSchema, parse_slots
    from phalanx.errors import ConfigError, DataError, PlanError, RoleError, SpecError
    from phalanx.jobs.spec.file import read as read_job
    from phalanx.plan.files import load_plan
    from phalanx.ps.snapshot.records import read_records
    from phalanx.ps.wire import frame

INPUT = tempfile.TemporaryFile()  # noqa: SIM115 -- has no name, and goes with the process however that ends
"""The file of parsers that read files."""


def as_file(data: bytes) -> Path:
    path = Path(f"/proc/self/fd/{INPUT.fileno()}")
    path.write_bytes(data)
    return path


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def fuzz_frame(data: bytes) -> None:
    with suppress(frame.FrameError):
        if len(data) >= frame.HEADER_BYTES:
            header = frame.decode_header(data[: frame.HEADER_BYTES])
            frame.check_object(data[: frame.HEADER_BYTES], data[frame.HEADER_BYTES :])
            frame.layout_from(frame.parse_object(data[frame.HEADER_BYTES :]), 0)
            assert header.payload_bytes <= frame.LARGEST_PAYLOAD


def fuzz_tensors(data: bytes) -> None:
    with suppress(DataError):
        file = TensorFile(as_file(data))
        file.note()
        for slot in file.slots().values():
            file.tensor(slot)


def fuzz_slots(data: bytes) -> None:
    for form in ("columns", "tokens"):
        schema = SlotSchema(dense=("a", "b"), sparse=("u", "v"), format=form)
        native, python = (parse_slots(data, schema, native=is_native) for is_native in (True, False))
        assert (native.broken, native.first_broken) == (python.broken, python.first_broken)
        assert native.rows.dense.tobytes() == python.rows.dense.tobytes()
        assert native.rows.ids.tobytes() == python.rows.ids.tobytes()


def raising(parse: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[bytes], None]:
    """Return a target that may raise these errors and no others."""

    def run(data: bytes) -> None:
        with suppress(*errors):
            parse(data)

    return run


TARGETS: dict[str, Callable[[bytes], None]] = {
    "announcement": raising(lambda data: Announcement.from_json(as_text(data)), ConfigError),
    "endpoint": raising(lambda data: parse_endpoint(as_text(data))),
    "frame": fuzz_frame,
    "hosts": raising(lambda data: expand_hosts(as_text(data)), RoleError),
    "job": raising(lambda data: read_job(as_text(data)), SpecError),
    "plan": raising(lambda data: load_plan(as_file(data)), PlanError),
    "rank-table": raising(lambda data: rank_table.parse(as_text(data), "fuzz"), ConfigError),
    "records": raising(lambda data: list(read_records(as_file(data))), DataError),
    "slots": fuzz_slots,
    "tensors": fuzz_tensors,
}


def main() -> None:
    name, flags = sys.argv[1], sys.argv[2:]
    if name == "all":
        for target in TARGETS:
            subprocess.run([sys.executable, __file__, target, *flags], check=True)
        return
    atheris.Setup([sys.argv[0], *flags], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
