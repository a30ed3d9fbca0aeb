"""`Measured`, `Rates`: measured times of operators and collectives on a machine, interpolated between sizes (pure).

`phalanx calibrate` writes one file a machine. What stands in it was measured on all ranks at once, for several numbers
of ranks, so that a rate is what a rank gets while the others work too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phalanx.cluster.validation_errors import why_wrong
from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.i18n import tr

SCHEMA: Literal[4] = 4
"""Version of the file; goes up with every change that an older reader would misread."""

Precision = Literal["fp32", "bf16"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
LayerKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
LAYER_KINDS: tuple[LayerKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that cut layers call."""

Sharding = Literal["kept", "freed"]
"""Whether what was gathered for the forward pass is kept for the backward pass, or gathered again."""

BACKENDS = ("shm", "gloo")

FULL_INNER = 16
"""Inner dimension from which on libraries compute products with other kernels. Below it products of large matrices take
longer: on an AMD EPYC those of (2048, 8) by (8, 2048) take 3.4 ms, with 16 in place of 8 they take 2.4."""

_ROUNDING = 1e-6
"""Elements by which a size may be off that is a part of another one."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Grid(_Frozen):
    """Seconds at every crossing of some axes, never falling along any of them."""

    axes: tuple[tuple[float, ...], ...] = Field(min_length=1)
    """Measured coordinates of each axis, rising."""

    seconds: tuple[float, ...]
    """One for each crossing, the last axis fastest."""

    powers: tuple[float, ...]
    """How seconds grow beyond the end of each axis: with this power of the coordinate."""

    @model_validator(mode="after")
    def _fits(self) -> Grid:
        if len(self.powers) != len(self.axes) or math.prod(map(len, self.axes)) != len(self.seconds):
            raise ValueError(f"{len(self.seconds)} seconds do not fit axes of {[len(a) for a in self.axes]} points")
        if not all(0 < a < b for axis in self.axes for a, b in itertools.pairwise((*axis, math.inf))):
            raise ValueError("axes must rise, above 0")
        if not all(0 < value < math.inf for value in self.seconds):
            raise ValueError("seconds must be above 0")
        if self.seconds != never_falling(self.axes, self.seconds):
            raise ValueError("seconds fall along an axis")
        return self

    @cached_property
    def _logs(self) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
        return tuple(tuple(map(math.log, axis)) for axis in self.axes), tuple(map(math.log, self.seconds))

    def at(self, *coordinates: float) -> float:
        """Return the seconds at a place: exact at measured points, linear in logarithms between them.

        Below an axis the seconds of its first point hold, beyond its end they grow with the axis's power. More work
        never takes less time.
        """
        axes, logs = self._logs
        beyond = 0.0
        corners = [(0, 1.0)]
        for axis, power, value in zip(axes, self.powers, coordinates, strict=True):
            x = math.log(value) if value > 0 else axis[0]
            beyond += power * max(0.0, x - axis[-1])
            low, share = _between(axis, x)
            taken = [(low, 1 - share), (low + 1, share)] if share else [(low, 1.0)]
            corners = [(i * len(axis) + j, w * v) for i, w in corners for j, v in taken]
        return math.exp(math.fsum(logs[i] * w for i, w in corners) + beyond)


def _between(axis: tuple[float, ...], x: float) -> tuple[int, float]:
    """Return the last point at or before x, and how far x is towards the next, from 0 to 1."""
    if x <= axis[0]:
        return 0, 0.0
    for i in range(len(axis) - 1):
        if x < axis[i + 1]:
            return i, (x - axis[i]) / (axis[i + 1] - axis[i])
    return len(axis) - 1, 0.0


def never_falling(axes: tuple[tuple[float, ...], ...], seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Return seconds of which none is above one further along an axis: disturbances only ever make things slower."""
    values, stride = list(seconds), 1
    for axis in reversed(axes):
        for i in range(len(values) - stride - 1, -1, -1):
            if i // stride % len(axis) < len(axis) - 1:
                values[i] = min(values[i], values[i + stride])
        stride *= len(axis)
    return tuple(values)


class Rates(_Frozen):
    """What each of some ranks gets while all of them work. Every number of seconds includes starting the operator."""

    threads: int = Field(gt=0)
    """Threads each rank had."""

    launch_s: float = Field(gt=0)
    """Seconds of one operator on a tiny tensor in forward, recorded by autograd."""

    backward_launch_s: float = Field(gt=0)
    """Seconds of its backward."""

    checkpoint_s: float = Field(gt=0)
    """Seconds that computing a module again takes, whatever is in it."""

    selective_op_s: float = Field(gt=0)
    """Seconds that selective recomputation adds to each operator, each way."""

    grids: dict[str, Grid]
    """Tables by what was measured, such as `matmul fp32` or `all_reduce shm 2`."""

    shared: dict[str, float] = Field(default_factory=dict)
    """By backend: extra seconds for each second that a collective and computation run side by side."""

    def matmul_s(self, m: float, n: float, k: float, dtype: Precision = "fp32", *, batch: float = 1) -> float:
        """Return the seconds of a linear layer of (n, k) on (m, k), or of a batched product of such matrices.

        A batched product takes as long as one of all their rows: 0.9 to 1.2 times, from 96 of 64 rows to 8 of 1024.
        Single products with an inner dimension from 2 to below `FULL_INNER` have a table of their own if that was
        measured: they may take longer than those with a slightly larger one. Gradients of weights are such products
        where a rank has few rows.
        """
        narrow = self.grids.get(f"narrow matmul {dtype}")
        if narrow is not None and batch == 1 and 1 < math.ceil(k - _ROUNDING) < FULL_INNER:
            return narrow.at(m, n)
        return self._grid(f"matmul {dtype}").at(batch * m, n, k)

    def conv_s(
        self,
        m: float,
        n: float,
        k: float,
        groups: float = 1,
        *,
        backward: bool = False,
        dtype: Precision = "fp32",
        pointwise: bool = False,
    ) -> float:
        """Return the seconds of a convolution. Those of bfloat16 are estimated from matrix products of the same size.

        Args:
            m: Places of the output, all images together.
            n: Channels of the output in one group.
            k: Values that make one output: channels of the input in one group, times the size of the kernel.
            groups: Groups of channels; where each has one channel, what counts is the size of the output.
            backward: Both gradients, of input and weight, in place of the output.
            dtype: Precision.
            pointwise: A kernel of one place, which needs no neighbours.
        """
        if n == 1 and groups > 1:
            return self._grid(f"depthwise {_way(backward)}").at(m * groups)
        seconds = groups * self._grid(f"{'pointwise' if pointwise else 'convolution'} {_way(backward)}").at(m, n, k)
        return seconds if dtype == "fp32" else seconds * self.matmul_s(m, n, k, dtype) / self.matmul_s(m, n, k)

    def attention_s(self, batch_heads: float, seq: float, head_dim: float, *, backward: bool = False) -> float:
        """Return the seconds of fused attention over sequences of all heads."""
        return self._grid(f"attention {_way(backward)}").at(batch_heads, seq, head_dim)

    def operator_s(self, name: str, size: float, *, backward: bool = False) -> float:
        """Return the seconds of an operator bound by memory.

        Args:
            name: `elementwise`, `gelu`, `dropout`, `layer_norm`, `batch_norm`, `softmax`, `max_pool2d` or
                `cross_entropy`; others count as element-wise.
            size: Bytes of its input.
            backward: Its gradient, in place of its output.
        """
        grid = self.grids.get(f"{name} {_way(backward)}") or self._grid(f"elementwise {_way(backward)}")
        return grid.at(size)

    def optimizer_s(self, kind: str, elements: float, tensors: float) -> float:
        """Return the seconds of one step of an optimizer, `sgd`, `momentum` or `adam`, over parameters of that size."""
        return tensors * self._grid(f"optimizer {kind}").at(elements / tensors) if tensors else 0.0

    def collective_s(self, kind: Kind, size: float, group: int, backend: str = "shm") -> float:
        """Return the seconds of a collective while all other groups of its size have theirs.

        Args:
            kind: Which.
            size: Bytes: of the tensor (`all_reduce`, `broadcast`, `send`), of the whole of all ranks (`all_gather`,
                `reduce_scatter`), or of what each rank holds (`all_to_all`).
            group: Ranks of the group.
            backend: What carries it, `shm` or `gloo`.
        """
        return 0.0 if group == 1 else self._grid(f"{kind} {backend} {group}").at(size)

    def layer_s(self, kind: LayerKind, size: float, group: int) -> float:
        """Return the seconds of a collective as a cut layer calls it, with its copies and what autograd adds.

        Of ranks in step: `waiting_s` comes on top. Sizes are those of `collective_s`.
        """
        return 0.0 if group == 1 else self._grid(f"layer {kind} {group}").at(size)

    def waiting_s(self, work_s: float, group: int) -> float:
        """Return how long ranks wait for the slowest of them where they meet after so many seconds of work."""
        if group == 1 or not work_s:
            return 0.0
        grid = self._grid(f"waiting {group}")
        return grid.at(work_s) * min(1.0, work_s / grid.axes[0][0])

    def averaged_s(self, group: int) -> float:
        """Return what each averaged gradient adds to a step, whatever its size: hooks and a place in a bucket."""
        return 0.0 if group == 1 else self._grid(f"averaged {group}").at(1)

    def sharded_s(self, how: Sharding, size: float, tensors: float, group: int) -> float:
        """Return what sharding adds to a step for a unit of so many bytes in so many tensors, optimizer and all."""
        return 0.0 if group == 1 else self._grid(f"sharded {how} {group}").at(tensors, size)

    def placed_s(self, operators: float, parameters: float, group: int) -> float:
        """Return what computing so many operators in parts adds to a step, with such parameters; bytes come on top."""
        if group == 1:
            return 0.0
        return self._grid(f"placed {group}").at(operators) + parameters * self._grid(f"placed parameter {group}").at(1)

    def contention(self, backend: str = "shm") -> float:
        """Return the extra seconds for each second that a collective and computation share; 1 gains nothing."""
        return self.shared.get(backend, 0.0)

    def _grid(self, name: str) -> Grid:
        if name not in self.grids:
            raise ConfigError(
                tr(
                    "Asked for {name!r}, which was not measured. There are {known}. Run `phalanx calibrate -n N` with "
                    "the number of ranks you plan for.",
                    name=name,
                    known=", ".join(sorted(self.grids)),
                )
            )
        return self.grids[name]


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


class Measured(_Frozen):
    """One machine, measured."""

    schema_version: Literal[4] = Field(default=SCHEMA, alias="schema")
    host: str
    processor: str
    cores: int = Field(gt=0)
    memory: int = Field(gt=0)
    """Bytes."""
    torch: str
    date: str
    """When, in ISO 8601 and UTC."""
    rates: dict[int, Rates] = Field(min_length=1)
    """By the number of ranks that worked at once."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that were measured."""
        return tuple(sorted(self.rates))

    def at(self, ranks: int) -> Rates:
        """Return what each of that many ranks gets.

        Raises:
            ConfigError: If that number of ranks was not measured.
        """
        if ranks not in self.rates:
            measured = ", ".join(map(str, self.ranks))
            raise ConfigError(
                tr(
                    "Asked for {ranks} ranks of {host}, which was measured with {known}. Run `phalanx calibrate -n "
                    "{ranks}` there.",
                    ranks=ranks,
                    host=self.host,
                    known=measured,
                )
            )
        return self.rates[ranks]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(by_alias=True, indent=1) + "\n")


def measured_file() -> Path:
    """Return where this machine's file is kept: in the user's cache, by the host's name, as homes may be shared."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "phalanx" / "measured" / f"{socket.gethostname()}.json"


def read_measured(path: Path | None = None) -> Measured:
    """Return a machine from its file; this one's own when no path is given.

    Raises:
        ConfigError: If there is none, or it is of another version or broken; says what to do.
    """
    path = measured_file() if path is None else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            tr(
                "{path} is not there. Measure this machine with `phalanx calibrate`, or name a cluster as h100x8 or "
                "cpux2.",
                path=path,
            )
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            tr("{path} cannot be read ({why}). Measure again with `phalanx calibrate`.", path=path, why=error)
        ) from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        raise ConfigError(
            tr(
                "{path}: asked for version {version}, found {found!r}. Measure again with `phalanx calibrate`.",
                path=path,
                version=SCHEMA,
                found=version,
            )
        )
    try:
        return Measured.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            tr(
                "{path}: {place}: {why}. Measure again with `phalanx calibrate`.",
                path=path,
                place=field,
                why=why_wrong(first),
            )
        ) from None
