"""`ranks_per_node`: choose the number of ranks per node and the GPUs of each."""

from __future__ import annotations

from phalanx.errors import LaunchError
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options


def ranks_per_node(options: Options, machine: Machine) -> int:
    """Return how many workers this host runs in collective mode.

    What the user said; else one per GPU; else 1: on CPU one process already uses every core through its threads, and a
    second one changes the global batch, so that is never done unasked.

    Raises:
        LaunchError: If GPUs were asked for that are not there, or more ranks than GPUs.
    """
    gpus = select_gpus(options, machine)
    if options.nproc_per_node is None:
        return len(gpus) or 1
    if options.least_nproc is not None and gpus:
        _check_enough(f"-n {options.least_nproc}:{options.nproc_per_node}", options.least_nproc, gpus)
        return min(options.nproc_per_node, len(gpus))
    _check_enough(options.describe_option("nproc_per_node"), options.nproc_per_node, gpus)
    return options.nproc_per_node


def select_gpus(options: Options, machine: Machine) -> tuple[str, ...]:
    """Return the GPUs of this job: those of `--gpus`, else every usable one, which `--gpus all` demands.

    Under CUDA_VISIBLE_DEVICES a GPU is called what that list calls it, as Fleet's launcher does.

    Raises:
        LaunchError: If `--gpus` cannot be had.
    """
    if options.gpus is None:
        return machine.usable_gpus
    requested = tuple(part.strip() for part in options.gpus.split(",") if part.strip())
    if not requested:
        raise LaunchError(f"--gpus '{options.gpus}' lists no GPU. Write e.g. --gpus 0,1, or leave it out to use all.")
    _check_cuda(options, machine)
    if requested == ("all",):
        return machine.usable_gpus
    for gpu in requested:
        if gpu not in machine.gpus:
            limit = f" (limited by {machine.hidden_by})" if machine.hidden_by else ""
            offered = ", ".join(machine.gpus)
            raise LaunchError(
                f"{options.describe_option('gpus')} asks for GPU {gpu}, but this host offers {offered}{limit}. "
                "Choose among those."
            )
        if requested.count(gpu) > 1:
            raise LaunchError(f"--gpus lists GPU {gpu} twice. Each process needs a GPU of its own.")
    return requested


def _check_cuda(options: Options, machine: Machine) -> None:
    if machine.gpus and machine.has_cuda_build:
        return
    if not machine.has_cuda_build:
        problem = "the installed torch is a CPU build"
    else:
        problem = f"no GPU is visible ({machine.hidden_by})" if machine.hidden_by else "no NVIDIA GPU was found"
    has_servers = any((options.server_num, options.worker_num, options.servers, options.workers))
    instead = "leave --gpus out: --worker-num says how many" if has_servers else "give the number of processes: -n 2"
    raise LaunchError(f"--gpus {options.gpus} needs CUDA, but {problem}. To compute on the CPU, {instead}.")


def _check_enough(source: str, count: int, gpus: tuple[str, ...]) -> None:
    if gpus and count > len(gpus):
        raise LaunchError(
            f"{source} asks for {count} processes, but there are {len(gpus)} GPUs ({', '.join(gpus)}). "
            f"Give at most {len(gpus)}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPU."
        )


def assign_gpus(
    options: Options, machine: Machine, workers: int, *, only_if_asked: bool
) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of each local worker, in order; empty on CPU.

    With more GPUs than workers the first workers get one more.

    Args:
        options: What the user typed.
        machine: What is there.
        workers: Workers on this host.
        only_if_asked: Parameter-server workers compute on CPU unless `--gpus` is given.

    Raises:
        LaunchError: If there are more workers than GPUs.
    """
    if not workers or (only_if_asked and options.gpus is None):
        return ()  # also where the same command runs on a host of servers, which needs no GPU
    gpus = select_gpus(options, machine)
    if not gpus:
        return ()
    _check_enough(f"{workers} workers on this host", workers, gpus)
    base, extra = divmod(len(gpus), workers)
    dealt, start = [], 0
    for index in range(workers):
        size = base + (index < extra)
        dealt.append(gpus[start : start + size])
        start += size
    return tuple(dealt)
