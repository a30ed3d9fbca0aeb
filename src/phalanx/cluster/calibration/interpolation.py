"""`with_ranks`: estimate calibration figures for a number of ranks that was not measured (pure).

Time grows as ranks get less of the cores: all of it where ranks share cores, and where each has cores of its own only
what its threads divide, which is what comes on top of the smallest operator of a kind. What a rank exchanges with the
others of a group of n grows with 1 - 1/n.
"""

from __future__ import annotations

import math

from phalanx.cluster.calibration.figures import Grid, Measured, Rates

_EXCHANGES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sharded"}
"""Words of tables of what grows with the group."""

_HOST_SECONDS = ("launch_s", "backward_launch_s", "checkpoint_s", "selective_op_s")


def with_ranks(measured: Measured, ranks: int) -> tuple[Measured, int]:
    """Return a machine with figures for this number of ranks too, and the number of ranks they are estimated from.

    That is the nearest by quotient, the larger of two. What several ranks exchange is only known from several.

    Raises:
        ConfigError: If several ranks are asked for, and only one was measured.
    """
    fitting = [count for count in measured.ranks if count > 1 or ranks == 1]
    if not fitting:
        measured.at(ranks)  # says which were measured
    near = min(fitting, key=lambda count: (abs(math.log(count / ranks)), -count))
    return measured.model_copy(update={"rates": {**measured.rates, ranks: _scale_rates(measured, near, ranks)}}), near


def _scale_rates(measured: Measured, near: int, ranks: int) -> Rates:
    rates, before, after = measured.at(near), cores_each(measured.cores, near), cores_each(measured.cores, ranks)
    single, threaded = min(1.0, before) / min(1.0, after), before / after
    grids = {name: _slower(grid, single, threaded) for name, grid in rates.grids.items() if _group(name) is None}
    for group in (size for size in range(2, ranks + 1) if ranks % size == 0):
        for name, grid in _of_group(rates, group).items():
            grids[name] = _slower(grid, single, single)
    slower = {name: getattr(rates, name) * single for name in _HOST_SECONDS}
    return rates.model_copy(update={**slower, "threads": max(1, int(after)), "grids": grids})


def at_speed(rates: Rates, speed: float) -> Rates:
    """Return the figures of a rank that takes 1 / `speed` times as long for all that it does alone."""
    slower = 1 / speed
    grids = {
        name: _slower(grid, slower, slower) if _group(name) is None else grid for name, grid in rates.grids.items()
    }
    host = {name: getattr(rates, name) * slower for name in _HOST_SECONDS}
    return rates.model_copy(update={**host, "grids": grids})


def cores_each(cores: int, ranks: int) -> float:
    """Return the cores that each of some ranks gets: whole ones, or its share of one."""
    return cores // ranks if ranks <= cores else cores / ranks


def _of_group(rates: Rates, group: int) -> dict[str, Grid]:
    """Return tables of exchanges in groups of this size, from those of the nearest size."""
    sizes = {size for name in rates.grids if (size := _group(name)) is not None}
    near = min(sizes, key=lambda size: (abs(math.log(size / group)), -size))
    more = (1 - 1 / group) / (1 - 1 / near)
    grids = {}
    for name, grid in rates.grids.items():
        if _group(name) == near:
            grown = more if _EXCHANGES & set(name.split()) else 1.0
            grids[f"{name.rpartition(' ')[0]} {group}"] = _slower(grid, grown, grown)
    return grids


def _group(name: str) -> int | None:
    """Return the ranks of a group whose exchanges a table is of; None for tables of what a rank does alone."""
    last = name.rpartition(" ")[2]
    return int(last) if last.isdecimal() else None


def _slower(grid: Grid, single: float, threaded: float) -> Grid:
    """Return a table whose least seconds grow by one factor, and what comes on top of them by the other."""
    least = grid.seconds[0]
    seconds = tuple(least * single + (value - least) * threaded for value in grid.seconds)
    return Grid(axes=grid.axes, seconds=seconds, powers=grid.powers)
