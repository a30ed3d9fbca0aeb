"""What a planner answers: the Plan, how good it is, what else there is, and why not that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.planner import Candidate, Searched
from phalanx.auto.planner.simulation import simulate_plan
from phalanx.auto.planner.strategies import ways_of
from phalanx.auto.planner.table import planned_table
from phalanx.auto.planner.to_plan import written
from phalanx.auto.planner.traffic import traffic
from phalanx.auto.simulate.values import Simulated
from phalanx.auto.units import some
from phalanx.cluster.messages.messages import meant, text
from phalanx.errors import ConfigError, PlanError
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.table import as_text
from phalanx.units import format_seconds

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planner's answer; `print` shows it, `to_json()` gives it to programs."""

    searched: Searched
    layers: Layers
    work: LayerWork
    speed: Speed
    room: float
    """Bytes that each rank has."""

    where: str
    """The cluster, in words."""

    base: DistributedStrategy
    left_out: tuple[str, ...]
    """What was not searched, and why not."""

    search_again: Callable[..., Searched]
    """The same search with further limits."""

    alone: Callable[[], float | None] = lambda: None
    """Finds the seconds of a step of one process of this machine, without any other; None if that is not known."""

    usd_per_hour: float | None = None
    """What all devices of the cluster cost; None if it is not known."""

    @cached_property
    def plan(self) -> Plan:
        """The fastest Plan."""
        return self._written(self.searched.best)

    @property
    def top_k(self) -> tuple[Plan, ...]:
        """The fastest Plan of each arrangement that came near, best first."""
        return tuple(self._written(one) for one in self.searched.candidates)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.searched.best.seconds

    @property
    def usd_per_step(self) -> float | None:
        """Price of a step on all devices; None if it is not known."""
        return self._price(self.seconds)

    def _price(self, seconds: float) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour / 3600 * seconds

    @cached_property
    def alone_s(self) -> float | None:
        """Predicted seconds of a step of one process alone, where it fits a machine that was measured."""
        return self.alone()

    @property
    def bound(self) -> float:
        """Seconds that no Plan of the space beats, in the planner's model of costs."""
        return self.searched.bound

    @property
    def gap(self) -> float:
        """How much slower than the bound the Plan may be, in %."""
        return self.searched.gap

    @property
    def limited_by(self) -> str:
        """What takes most of a step: `compute`, `collectives of layers` or another of a candidate's parts."""
        parts = self.searched.best.parts
        return max(parts, key=lambda name: parts[name])

    @property
    def memory(self) -> float:
        """Bytes of a rank at the peak."""
        return self.searched.best.peak

    def explain(self, layer: str) -> str:
        """Return the ways in which a layer can be computed under the Plan's arrangement, and what each costs.

        Args:
            layer: Its path, as `named_modules` says.

        Raises:
            ConfigError: If the model calls no such layer.
        """
        places = [i for i, segment in enumerate(self.layers.segments) if segment.path == layer]
        if not places:
            known = list(dict.fromkeys(one.path for one in self.layers.segments if not one.is_glue))
            raise ConfigError(text("explain unknown", layer=layer, nearest=meant(layer, known), known=some(known)))
        best = self.searched.best
        found = ways_of(self.layers, self.work, best.arrangement, self.speed, self.room)
        title = text("explain title", layer=layer, arrangement=best.arrangement)
        grid = Table(title=title, title_justify="left")
        grid.add_column(text("explain way"))
        for name in ("forward", "backward", "sent", "exchange", "update"):
            grid.add_column(text(f"explain {name}"), justify="right")
        grid.add_column("MiB", justify="right")
        picked = str(best.ways.get(layer, "whole"))
        for option in found.choices.nodes[places[0]].options:
            times = (option.forward_s, option.backward_s, option.sent_s, option.exchange_s, option.update_s)
            mark = "> " if option.label == picked else "  "
            cells = [f"{seconds * 1e3:.3f}" for seconds in times]
            grid.add_row(mark + option.label, *cells, f"{(option.held + option.kept) / MIB:.2f}")
        return as_text(grid)

    def why_not(self, *limits: str) -> str:
        """Return what it would cost to keep to further limits, such as `tp=1` or `classifier.4=column`.

        Args:
            *limits: As `px.auto_parallel` takes them.

        Raises:
            ConfigError: If none is given, or one cannot be.
        """
        if not limits:
            raise ConfigError(text("why not nothing"))
        said = ", ".join(limits)
        try:
            other = self.search_again(limits).best
        except PlanError as error:
            return text("why not impossible", limits=said, why=error)
        mine = self.searched.best
        if (other.arrangement, other.ways) == (mine.arrangement, mine.ways):
            return text("why not same", limits=said, arrangement=mine.arrangement, step=format_seconds(mine.seconds))
        changes = {name: other.parts[name] - mine.parts[name] for name in mine.parts}
        cause = max(changes, key=lambda name: changes[name])
        return text(
            "why not",
            limits=said,
            arrangement=other.arrangement,
            cut=self._cut(other),
            step=format_seconds(other.seconds),
            change=f"{other.seconds / mine.seconds - 1:+.1%}",
            memory=f"{(other.peak - mine.peak) / MIB:+.1f} MiB",
            cause=text(f"plan {cause}"),
            more=f"{changes[cause] * 1e3:+.3g} ms",
        )

    def simulate(self, place: int = 0) -> Simulated:
        """Return a step of one of `top_k`, event by event: what every rank does when, and the bytes it holds.

        Args:
            place: Which; the fastest when omitted.
        """
        found = simulate_plan(self.searched.candidates[place], self.layers, self.work, self.speed)
        return replace(found, usd_per_step=self._price(found.simulation.step_time_s))

    def to_json(self) -> dict[str, Any]:
        """Return the answer in plain values."""
        found = self.searched
        return {
            "where": self.where,
            "step_time_s": found.best.seconds,
            "usd_per_step": self.usd_per_step,
            "bound_s": found.bound,
            "gap_percent": found.gap,
            "one_process_s": self.alone_s,
            "limited_by": self.limited_by,
            "memory_bytes": found.best.peak,
            "room_bytes": self.room,
            "captured": self.layers.captured.level,
            "left_out": list(self.left_out),
            "space": {name: list(values) for name, values in self.space.items()},
            "arrangements": len(found.arrangements),
            "listed": found.solved,
            "traffic": self._traffic(),
            "top_k": [_told(one) for one in found.candidates],
            "plan": self.plan.model_dump(mode="json"),
        }

    def _traffic(self) -> list[dict[str, Any]]:
        """Return what a rank exchanges in a step, the most bytes first; by place along the stages if there are any."""
        best = self.searched.best
        told = [
            {"stage": stage, "kind": kind, "bytes": size, "count": count}
            for stage in range(best.arrangement.stages)
            for (kind, size), count in traffic(best, self.layers, self.speed, stage).items()
        ]
        return sorted(told, key=lambda one: -one["bytes"] * one["count"])

    @property
    def space(self) -> dict[str, tuple[Any, ...]]:
        """The dimensions that were searched, and their values."""
        names = ("data", "model", "stages", "virtual", "micro_batches", "schedule", "zero", "recompute")
        tried = self.searched.arrangements
        found = {name: _each([getattr(at, name) for at in tried]) for name in names}
        inside = {at.model_inside for at in tried if at.data > 1 and at.model > 1}
        outermost = tuple("data" if one else "model" for one in sorted(inside, reverse=True))
        return {
            **found,
            "outermost": outermost or ("data",),
            "layers": (text("space decisions", count=len({one.like for one in self.layers.segments})),),
        }

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        return planned_table(
            self.where,
            self.searched,
            self.space,
            self._notes(),
            lambda one: self._cut(one) if one.cut else "",
        )

    def _notes(self) -> Iterator[str]:
        """Yield what is to be known of the model, and what was not searched."""
        captured = self.layers.captured
        if self.usd_per_step is not None:
            yield text("plan price", usd=f"{self.usd_per_step:.4g}")
        if self.alone_s is not None and self.alone_s < self.seconds:
            yield text("plan alone", step=format_seconds(self.alone_s))
        if captured.reasons:
            yield text("plan captured", level=captured.level, why=captured.reasons[0])
        if self.searched.best.arrangement.stages > 1:
            yield text("plan stages train")
        yield from (text("plan not searched", why=why) for why in self.left_out)

    def _cut(self, candidate: Candidate) -> str:
        """Return the layers that are cut, each repeated one once."""
        shown = []
        for place in dict.fromkeys(segment.like for segment in self.layers.segments):
            segment = self.layers.segments[place]
            way = candidate.cut.get(segment.path)
            if way is not None and not segment.is_glue:
                count = len({one.path for one in self.layers.segments if one.like == segment.like})
                shown.append(f"{segment.path} {way}" + (f" x {count}" if count > 1 else ""))
        return ", ".join(shown) or text("none cut")

    def _written(self, candidate: Candidate) -> Plan:
        return written(candidate, self.layers, self.base)


def _each(values: list[Any]) -> tuple[Any, ...]:
    """Return the different ones of values: numbers by size, words as they come."""
    distinct = dict.fromkeys(values)
    return tuple(sorted(distinct) if all(isinstance(value, int) for value in distinct) else distinct)


def _told(candidate: Candidate) -> dict[str, Any]:
    return {
        "arrangement": str(candidate.arrangement),
        "layers": {path: str(way) for path, way in candidate.cut.items()},
        "step_time_s": candidate.seconds,
        "memory_bytes": candidate.peak,
        **{f"{name.replace(' ', '_')}_s": seconds for name, seconds in candidate.parts.items()},
    }
