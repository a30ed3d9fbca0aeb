"""Detect the hardware of this host as a `Cluster`, without CUDA: GPUs by driver name, else CPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from phalanx.cluster import proc
from phalanx.cluster.calibration.figures import Measured, read_measured
from phalanx.cluster.calibration.interpolation import cores_each, with_ranks
from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.role.role import Role
from phalanx.cluster.spec.cluster import Cluster, Node, usual_gbps
from phalanx.cluster.spec.devices import DEVICES, GIB, Device
from phalanx.errors import ConfigError
from phalanx.i18n import tr

GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
PROCESSORS = Path("/proc/cpuinfo")
HIGHEST_KHZ = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")

FLOPS_A_CYCLE = (("avx512f", 64), ("avx2", 32), ("asimd", 16))
"""Flags of a core and its float32 operations a cycle: two fused multiply-adds of a whole register."""

USUAL_FLOPS_A_CYCLE = 8
USUAL_HZ = 2.5e9
SUSTAINED = 0.7
"""Share of the peak that products reach on a core; 0.6 to 0.8 of 512-bit peaks were seen."""

BYTES_A_CORE = 10e9
"""Bytes/s of memory that one busy core draws."""

CPU_GBPS = 10.0
"""Gb/s of a network port where nothing says what there is."""


def detect(role: Role) -> Cluster:
    """Return the cluster that this process's job runs on, all its nodes taken to be as this one."""
    gpus = _gpu_names()
    if not gpus:
        node, assumed = cpu_node(role.local_world_size, is_bound=_is_bound(role))
    else:
        node, assumed = _gpu_node(gpus)
    if role.node_count > 1:
        assumed += (
            tr("{count} nodes, all as this one", count=role.node_count),
            tr("{rate} Gb/s between them", rate=f"{node.gbps:g}"),
        )
    return Cluster(nodes=(node,) * role.node_count, assumed=assumed)


def _is_bound(role: Role) -> bool:
    """Return whether the launcher gave this rank cores of its own: `srun` and `mpirun` may bind each to some."""
    return role.launcher in ("slurm", "mpi") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def cpu_node(devices: int, *, is_bound: bool = False) -> tuple[Node, tuple[str, ...]]:
    """Return this host as a node of so many devices, and what was assumed.

    Each device is an equal number of its cores; where there are more devices than cores, its share of one.

    Args:
        devices: How many.
        is_bound: Whether the cores that this process may use are those of one device, not of all.
    """
    cores = cores_each(len(os.sched_getaffinity(0)), 1 if is_bound else devices)
    info = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    flags = set(_field(info, "flags", "Features").split())
    cycle = next((flops for flag, flops in FLOPS_A_CYCLE if flag in flags), USUAL_FLOPS_A_CYCLE)
    hertz = _hertz(info)
    peak = cores * cycle * hertz
    device = Device(
        name=f"cpu-{cores:.3g}-core",
        flops={"fp32": peak, "bf16": peak * (2 if "avx512_bf16" in flags else 1)},
        sustained=SUSTAINED,
        memory=memory_bytes() / devices,
        bandwidth=cores * BYTES_A_CORE,
        multiprocessors=max(1, int(cores)),
        link=cores * BYTES_A_CORE / 2,
    )
    assumed = (
        tr("{count} float32 operations a cycle and core at {hertz} GHz", count=cycle, hertz=f"{hertz / 1e9:.2g}"),
        tr(
            "{rate} GB/s of memory a core; `phalanx calibrate` measures, and `here` uses it",
            rate=f"{BYTES_A_CORE / 1e9:g}",
        ),
    )
    return Node(device=device, devices=devices, gbps=CPU_GBPS), assumed


def _hertz(info: str) -> float:
    """Return the highest frequency of a core where the system says it: every rank gets the same."""
    try:
        return float(HIGHEST_KHZ.read_text()) * 1e3
    except (OSError, ValueError):
        now = re.findall(r"^cpu MHz\s*:\s*(\d+(?:\.\d+)?)\s*$", info, re.MULTILINE)
        return max(map(float, now)) * 1e6 if now else USUAL_HZ


def measured_node(devices: int | None, *, exactly: bool = True) -> tuple[Node, Measured, tuple[str, ...]]:
    """Return this host as it was measured, with so many devices, or as many as were measured at most.

    Args:
        devices: How many.
        exactly: Whether so many must have been measured; else figures of the nearest number will do.

    Returns:
        The node, the figures, and in words what changed since, or what they were estimated from.

    Raises:
        ConfigError: If it was not measured, or not with so many ranks.
    """
    measured = read_measured()
    count = devices or measured.ranks[-1]
    notes = _changes_since(measured)
    if not exactly and count not in measured.ranks:
        measured, near = with_ranks(measured, count)
        notes = (
            tr(
                "the figures for {ranks} ranks are estimated from those for {near}: "
                "`phalanx calibrate -n {ranks}` measures them",
                ranks=count,
                near=near,
            ),
            *notes,
        )
    rates, size, stream = measured.at(count), 1024, 2**23
    link = stream / rates.collective_s("send", stream, count) if count > 1 else BYTES_A_CORE
    flops = {kind: 2 * size**3 / rates.matmul_s(size, size, size, kind) for kind in ("fp32", "bf16")}
    device = Device(
        name=f"cpu-{rates.threads}-core-measured",
        flops=flops,
        sustained=1.0,
        memory=measured.memory / count,
        bandwidth=2 * stream / rates.operator_s("elementwise", stream),
        multiprocessors=rates.threads,
        link=link,
        measured=rates,
    )
    return Node(device=device, devices=count, gbps=CPU_GBPS), measured, notes


def _changes_since(measured: Measured) -> tuple[str, ...]:
    pairs = (
        ("torch", measured.torch, importlib.metadata.version("torch")),
        ("cores", str(measured.cores), str(len(os.sched_getaffinity(0)))),
    )
    return tuple(
        tr(
            "measured with {name} {then}, which is {now} now: `phalanx calibrate` measures again",
            name=name,
            then=then,
            now=now,
        )
        for name, then, now in pairs
        if then != now
    )


def processor_name() -> str:
    """Return what the system calls this host's processor."""
    info = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    return _field(info, "model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the bytes of memory this process may use: the machine's, or what its container is given."""
    total, (limit, _) = proc.total_bytes(), ControlGroups().memory_limit()
    return total if limit is None else min(total, limit)


def _field(text: str, *names: str) -> str:
    match = re.search(rf"^(?:{'|'.join(map(re.escape, names))})\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _gpu_names() -> list[str]:
    """Return the names of the GPUs this process may use."""
    if not GPU_FOLDER.is_dir():
        return []
    files = sorted(GPU_FOLDER.glob("*/information"))
    names = [_field(file.read_text(), "Model") for file in files]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if all(entry.isdecimal() and int(entry) < len(names) for entry in entries):
        return [names[int(entry)] for entry in entries]
    return names[: len(entries)]  # Named by their UUID: GPUs of one host are alike.


def _gpu_node(names: list[str]) -> tuple[Node, tuple[str, ...]]:
    preset = preset_for_gpu(names[0])
    if len(set(names)) > 1:
        raise ConfigError(
            tr(
                "Asked to detect this host, found different GPUs: {names}. Choose equal ones with "
                "CUDA_VISIBLE_DEVICES, or describe the cluster in a file (docs/calibrate.md).",
                names=", ".join(names),
            )
        )
    gbps = usual_gbps(preset) * len(names)
    assumed = tr("{gpu} is {device}, with its usual network", gpu=names[0], device=preset.name)
    return Node(device=preset, devices=len(names), gbps=gbps), (assumed,)


def preset_for_gpu(gpu: str) -> Device:
    """Return the preset of a GPU by its driver's name, such as `NVIDIA A100-SXM4-40GB` or `NVIDIA H100 80GB HBM3`.

    Raises:
        ConfigError: If there is none.
    """
    words = set(re.findall(r"[A-Z]+\d+[A-Z]*|\d+GB|PCIE|NVL", gpu.upper()))
    family = [device for name, device in DEVICES.items() if name.split("-")[0] in words]
    same_memory = [device for device in family if f"{round(device.memory / GIB)}GB" in words] or family
    named_forms, cards = words & {"PCIE", "NVL"}, {"PCIE", "NVL"}
    # A driver names the form of a card only where the family has a socket too.
    matches = [
        device
        for device in same_memory
        if cards & set(device.name.upper().split("-")) == named_forms or (len(family) == 1 and not named_forms)
    ]
    if not matches:
        raise ConfigError(
            tr(
                "Asked to detect this host, found {gpu}, which has no preset. Known: {known}. Describe it in a file, "
                "under devices (docs/calibrate.md).",
                gpu=gpu,
                known=", ".join(DEVICES),
            )
        )
    return matches[0]
