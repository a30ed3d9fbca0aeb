"""`run_child`: entry of a forked rank: reset the process, set its environment, run the script, record its exit."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib.machinery
import json
import logging
import os
import random
import re
import runpy
import select
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import PeerLostError, RoleError
from phalanx.files import write_atomically
from phalanx.i18n import tr
from phalanx.launch.process import log_format
from phalanx.launch.rank import rank_output
from phalanx.launch.rank.lost_worker import lost_worker

logger = logging.getLogger("phalanx.launch")

_PEER_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|heartbeat"
    r"|timed out waiting \d+ms|recvvalue failed|failed to recv|failed to send|not all ranks|store is closed"
    r"|remote process exited|nccl communicator was aborted",
    re.IGNORECASE,
)

_OUR_FRAMES = (__file__, runpy.run_module.__code__.co_filename)
"""Files between the server and the script, which say nothing about the script's mistake."""


def run_child(message: dict[str, Any], fds: list[int]) -> NoReturn:
    """Turn a freshly forked child into what `message` asks for. Never returns.

    Args:
        message: `target` ("script", "store" or "link"), `env` (changes; None removes), `env_file` (where to write the
            environment, or empty), `cwd`, `log` (file for both output streams), `log_format`, and for a script
            `script`, `args`, `error_file`, `rank`; for others `config`.
        fds: Descriptors that came with the message; a script's endpoint socket, and in an elastic job the channel to
            its agent, are announced to it in the environment.
    """
    code = 1
    try:
        _reset_process(message, fds)
        code = _run_script(message) if message["target"] == "script" else _run_service(message, fds)
    except BaseException:  # noqa: BLE001 -- nothing may escape into the server's own code after a fork
        traceback.print_exc()
    finally:
        rank_output.flush()
        os._exit(code)


def _run_service(message: dict[str, Any], fds: list[int]) -> int:
    if message["target"] == "store":
        return _serve_store(fds[0], **message["config"])
    from phalanx.launch.process.node_link import join

    return join(fds, **message["config"])


def _serve_store(listen_fd: int, host: str, port: int) -> NoReturn:
    """Serve the job's key-value store until this process is stopped, so that it outlives every rank.

    In a server without torch it is imported when somebody connects, and who waits in the queue until then is served.
    """
    if "torch" not in sys.modules:
        select.select([listen_fd], [], [])
    from torch._C._distributed_c10d import TCPStore

    _store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listen_fd)
    while True:
        signal.pause()


def _reset_process(message: dict[str, Any], fds: list[int]) -> None:
    """Undo what the child inherited from the server: signals, streams, environment, random state."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank_output.redirect(message["log"])
    for name, value in message["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if message["target"] == "script":
        for name, fd in zip(("PHALANX_ENDPOINT_FD", "PHALANX_MEMBERSHIP_FD"), fds, strict=False):
            os.environ[name] = str(fd)
    os.chdir(message["cwd"])
    if path := message.get("env_file"):
        try:
            _write_environment(Path(path))
        except OSError as problem:
            warning = tr("{what} was not written ({why}). The job is not affected.", what=path, why=problem.strerror)
            sys.stderr.write(f"{warning}\n")
    random.seed()
    if "numpy" in sys.modules:
        # Seeded from the system when numpy was imported, that is once for all ranks.
        sys.modules["numpy"].random.seed()
    gc.enable()


def _write_environment(path: Path) -> None:
    """Write every variable of this process but no secret, for its owner alone: not all secrets are known by name."""
    from phalanx.cluster.env.settings import shown_value

    path.touch(mode=0o600)
    lines = [f"{name}={shown_value(name, os.environ[name])}\n" for name in sorted(os.environ)]
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def _run_script(message: dict[str, Any]) -> int:
    faulthandler.enable()
    log_format.configure_rank(message["log_format"])
    sys.argv = [message["script"], *message["args"]]
    _watch_isolated_ranks()
    _spare_shared_memory()
    _observe_steps()
    _start_reporting()
    failed = False
    try:
        code = _run_script_to_end(message["script"])
    except KeyboardInterrupt:
        _ignore_children()
        _write_error_record(message, *_current_error())
        _print_error(*_current_error())
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 -- whatever the script raises is its failure, to be recorded
        failed = True
        _ignore_children()
        _explain_out_of_memory(*_current_error())
        failure = _failure()
        _write_error_record(message, *failure)
        _print_error(*failure)
        code = 1
    return _finish(code, failed)


def _ignore_children() -> None:
    """Let no child that ends interrupt what follows: torch's DataLoader raises where it learns of a lost worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _watch_isolated_ranks() -> None:
    """Have rank 0 say so when the workers of a job train without having met; with servers they meet there."""
    world_size = int(os.environ["PHALANX_WORLD_SIZE"])
    is_worker = os.environ["PHALANX_ROLE"] == "WORKER" and not os.environ.get("PHALANX_SERVER_ENDPOINTS")
    # In a server without torch there is nothing to watch, and importing it would cost the script a second.
    if world_size > 1 and is_worker and os.environ["PHALANX_RANK"] == "0" and "torch" in sys.modules:
        from phalanx.launch.rank.isolated_ranks import watch_steps

        watch_steps(world_size)


def _spare_shared_memory() -> None:
    """Where /dev/shm may not hold the batches of loader workers, whoever starts them, pass them without it."""
    from phalanx.cluster.host_limits import has_little_shared_memory

    # In a server without torch the script imports it later, if at all, and then it is as without a launcher.
    if "torch" in sys.modules and has_little_shared_memory():
        from phalanx.comm.local.tensor_sharing import share_by_memfd

        share_by_memfd()


def _observe_steps() -> None:
    """Record, log, check or replay the script's steps, as the environment asks."""
    if os.environ["PHALANX_ROLE"] != "WORKER":
        return
    if request := os.environ.get("PHALANX_RECORD"):
        from phalanx.parallel.observe.recorder import record_steps

        record_steps(request)
    if os.environ.get("PHALANX_FLIGHT_LOG", "0") not in ("", "0"):
        from phalanx.parallel.observe.flight_log import begin_flight_log

        begin_flight_log()
    if request := os.environ.get("PHALANX_REPLAY"):
        from phalanx.checkpoint.replay import begin_replay

        begin_replay(request)
    if os.environ.get("PHALANX_CHECK_NAN_INF", "0") not in ("", "0"):
        from phalanx.parallel.numerics.nan_check import check_nan_inf

        check_nan_inf()


def _start_reporting() -> None:
    """Let the launcher see which calls this process is in, where other processes may wait for it."""
    hang_after_s = float(os.environ.get("PHALANX_HANG_AFTER_S") or 0)
    times_itself = float(os.environ.get("PHALANX_SLOW_SHARE") or 0) > 0
    # Who joins an elastic job starts alone.
    has_peers = any(map(os.environ.get, ("PHALANX_SERVER_ENDPOINTS", "PHALANX_MEMBER_ID")))
    if (hang_after_s or times_itself) and (has_peers or int(os.environ["PHALANX_WORLD_SIZE"]) > 1):
        from phalanx.launch.rank.reporter import start_reporting

        with contextlib.suppress(OSError):  # a system without memfd or /proc: a hang is then known by its stack alone
            start_reporting(hang_after_s, times_itself=times_itself)


def _run_script_to_end(script: str) -> int:
    """Run a script and return its exit code; raises what it raises, and if it ended well with its task undone."""
    code = 0
    try:
        _run_as_main(script)
    except SystemExit as stop:
        code = _exit_code(stop)
    if code == 0:
        _check_server_ran()
    return code


def _run_as_main(script: str) -> None:
    """Execute `script` as the module `__main__`, the way `python script` does.

    Unlike `runpy.run_path` the module stays `__main__` afterwards, for threads, atexit handlers and pickles
    that look for it.
    """
    if script.startswith("-m "):
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script[3:], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    module.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _check_server_ran() -> None:
    """Raise if this is a parameter server whose script met the others and served nobody: they would wait for it."""
    context = sys.modules.get("phalanx.comm.context")
    if context is None or not context.is_initialized() or "phalanx.ps.server.main" in sys.modules:
        return
    role = context.current().role
    if role.is_server:
        raise RoleError(
            f"the script ended on server {role.rank} without serving. Call fleet.init_server() and fleet.run_server() "
            "where fleet.is_server(); px.distribute serves by itself."
        )


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _current_error() -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    """The error being handled, its traceback starting in the script rather than in this file."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    while trace is not None and trace.tb_frame.f_code.co_filename in _OUR_FRAMES:
        trace = trace.tb_next
    # The interpreter shows the traceback that hangs on the error, whatever it is handed.
    return kind, error.with_traceback(trace), trace


def _failure() -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    """The same, but for a broken pipe of a data worker what broke it."""
    kind, error, trace = _current_error()
    lost = lost_worker(error)
    if lost is None:
        return kind, error, trace
    lost.__context__ = error
    return type(lost), lost, None


def _explain_out_of_memory(_: type[BaseException], error: BaseException, __: types.TracebackType | None) -> None:
    """Add what fills the memory to an error that says that it ran out, if the script distributed a model."""
    if "phalanx.parallel.apply" in sys.modules:
        from phalanx.parallel.memory.out_of_memory import explain_memory

        with contextlib.suppress(MemoryError):  # not enough is left to say more
            explain_memory(error)


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    rank_output.flush()
    sys.excepthook(kind, error, trace)


def error_kind(error: BaseException) -> str:
    """Return "peer" when `error` says that another process is gone or late, else "exception"."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (PeerLostError, ConnectionError)) or _is_torch_peer_error(seen):
            return "peer"
        seen = seen.__cause__
    return "exception"


def _is_torch_peer_error(error: BaseException) -> bool:
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError", "DistQueueEmptyError"):
        return True
    return isinstance(error, RuntimeError) and _PEER_WORDS.search(str(error)) is not None


def _write_error_record(
    message: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    record = {
        "rank": message["rank"],
        "kind": error_kind(error),
        "time": time.time(),
        "type": kind.__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
    }
    target = Path(message["error_file"])
    try:
        write_atomically(target, json.dumps(record))
    except OSError as problem:
        # The folder is full or gone: the traceback itself, shown next, matters more.
        warning = tr("{what} was not written ({why}). The job is not affected.", what=target, why=problem.strerror)
        sys.stderr.write(f"{warning}\n")


def _finish(code: int, failed: bool) -> int:
    """Do what interpreter shutdown does, but so that a communication thread cannot abort the process.

    Backends free tensors from their own threads; during real shutdown that ends in SIGABRT now and then, and a good run
    counts as failed. So: threads, exit handlers, process group, one collection, and then the process ends at once.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if not failed and code == 0:
            _check_gpu(_index_of_device())
            _leave_process_group()
            gc.collect()
    except SystemExit as stop:
        code = code or _exit_code(stop)
    except BaseException:  # noqa: BLE001 -- an exit handler of the script failed: shown, and counted as a failure
        traceback.print_exc()
        code = code or 1
    return code


def _index_of_device() -> int | None:
    """Return the number of the device that the script computed on; None if it used the CPU alone."""
    if not os.environ.get("FLAGS_selected_gpus") or "torch" not in sys.modules:  # noqa: SIM112 -- Fleet's spelling
        return None
    from phalanx.accelerator import device_in_use  # loads torch

    device = device_in_use()
    return None if device is None else device.index


def _check_gpu(index: int | None) -> None:
    """Warn when the script computed on a GPU that the launcher gave to another rank.

    Looked at in the end rather than caught in the act: torch itself is left alone.

    Args:
        index: From `_index_of_device`.
    """
    selected = os.environ.get("FLAGS_selected_gpus", "").split(",")  # noqa: SIM112 -- Fleet's spelling
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if selected == [""] or index is None:
        return
    used = visible[index] if index < len(visible) else str(index)
    if used not in selected:
        logger.warning(
            "This rank computed on GPU %s, but the launcher gave it %s. Choose GPUs with --gpus, not with set_device.",
            used,
            ",".join(selected),
        )


def _leave_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
