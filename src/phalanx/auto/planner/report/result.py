"""`PlanResult`: the Plan that `px.auto_parallel` returns, with step time, gap, runners-up and `why_not`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.layer_limits import format_names
from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.planner import PlanSearch
from phalanx.auto.planner.report.table import build_result_table
from phalanx.auto.planner.report.traffic import count_traffic
from phalanx.auto.planner.simulation import simulate_assignment
from phalanx.auto.planner.strategies import StrategyCatalog, build_problem
from phalanx.auto.planner.to_plan import build_plan
from phalanx.auto.search.result import why_not
from phalanx.auto.simulate.values import SimulatedStep, step_price
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.table import as_text
from phalanx.units import format_seconds

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A planner's answer; `print` shows it, `to_json()` gives it to programs."""

    search: PlanSearch
    catalog: StrategyCatalog
    """The strategies that were searched."""

    work: LayerWork
    room: float
    """Bytes that each rank has."""

    where: str
    """The cluster, in words."""

    base: DistributedStrategy
    left_out: tuple[str, ...]
    """What was not searched, and why not."""

    search_again: Callable[..., PlanSearch]
    """The same search with further limits."""

    alone: Callable[[], float | None] = lambda: None
    """Finds the seconds of a step of one process of this machine, without any other; None if that is not known."""

    usd_per_hour: float | None = None
    """What all devices of the cluster cost; None if it is not known."""

    bound: float = field(init=False)
    """Seconds that no Plan of the space beats, in the planner's model of costs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", self.search.bound)

    @property
    def layers(self) -> Layers:
        """The model."""
        return self.work.layers

    @cached_property
    def plan(self) -> Plan:
        """The fastest Plan."""
        return self._build_plan(self.search.best)

    @property
    def top_k(self) -> tuple[Plan, ...]:
        """The fastest Plan of each parallel config that came near, best first."""
        return tuple(self._build_plan(candidate) for candidate in self.search.top_k)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.search.best.step_time_s

    @property
    def usd_per_step(self) -> float | None:
        """Price of a step on all devices; None if it is not known."""
        return step_price(self.seconds, self.usd_per_hour)

    @cached_property
    def alone_s(self) -> float | None:
        """Predicted seconds of a step of one process alone, where it fits a machine that was measured."""
        return self.alone()

    @property
    def gap(self) -> float:
        """How much slower than the bound the Plan may be, in %."""
        return self.search.gap

    @property
    def limited_by(self) -> str:
        """What takes most of a step: `compute`, `collectives of layers` or another of a candidate's parts."""
        parts = self.search.best.parts
        return max(parts, key=lambda name: parts[name])

    @property
    def memory(self) -> float:
        """Bytes of a rank at the peak."""
        return self.search.best.memory_bytes

    def seconds_at(self, load: float) -> float:
        """Return the seconds of a step whose routers send some ranks more tokens than others.

        Predictions are of routers that send experts on every rank as many tokens.

        Args:
            load: Tokens of the rank that gets the most, over an even share: from 1 to the number of ranks that hold
                one copy of the experts together.

        Raises:
            ConfigError: If it is outside that range.
        """
        best = self.search.best
        if not 1 <= load <= best.config.experts:
            raise ConfigError(
                tr(
                    "seconds_at was asked for a load of {load}, and {ranks} ranks hold the experts together. Give a "
                    "number from 1 to {ranks}.",
                    load=load,
                    ranks=best.config.experts,
                )
            )
        loaded = replace(best, config=replace(best.config, load=load))
        return simulate_assignment(loaded, self._work_of(best)).simulation.step_time_s

    @cached_property
    def skewed_s(self) -> float | None:
        """Seconds of a step if routers send all tokens to one of the ranks that hold experts together; None if none do.

        What a step takes lies between `seconds` and this, in the planner's model of costs.
        """
        ranks = self.search.best.config.experts
        return self.seconds_at(ranks) if ranks > 1 else None

    def explain(self, layer: str) -> str:
        """Return the strategies of a layer under the Plan's parallel config, and what each costs.

        Args:
            layer: Its path, as `named_modules` says.

        Raises:
            ConfigError: If the model calls no such layer.
        """
        places = [i for i, call in enumerate(self.layers.calls) if call.path == layer]
        if not places:
            paths = list(dict.fromkeys(call.path for call in self.layers.calls if not call.is_glue))
            raise ConfigError(
                tr(
                    "explain was asked for {layer!r}, which this model does not call.{nearest} It calls {known}.",
                    layer=layer,
                    nearest=suggest(layer, paths),
                    known=format_names(paths),
                )
            )
        best = self.search.best
        problem = build_problem(self._work_of(best), best.config, self.catalog.of(best.config), self.room)
        title = tr("{layer} under {arrangement}", layer=layer, arrangement=best)
        grid = Table(title=title, title_justify="left")
        grid.add_column(tr("strategy"))
        for name in (tr("forward ms"), tr("backward ms"), tr("of these comm ms"), tr("grad sync ms"), tr("update ms")):
            grid.add_column(name, justify="right")
        grid.add_column("MiB", justify="right")
        picked = str(best.strategies.get(layer, "whole"))
        for option in problem.problem.nodes[places[0]].options:
            times = (option.forward_s, option.backward_s, option.comm_s, option.grad_sync_s, option.update_s)
            mark = "> " if option.label == picked else "  "
            cells = [f"{seconds * 1e3:.3f}" for seconds in times]
            grid.add_row(
                mark + option.label, *cells, f"{(option.persistent_bytes + option.activation_bytes) / MIB:.2f}"
            )
        return as_text(grid)

    def why_not(self, *limits: str) -> str:
        """Return what it would cost to keep to further limits, such as `tp=1` or `classifier.4=column`.

        Args:
            *limits: As `px.auto_parallel` takes them.

        Raises:
            ConfigError: If none is given, or one cannot be.
        """
        return why_not(self.search, limits, self.search_again, self._describe)

    def simulate(self, index: int = 0) -> SimulatedStep:
        """Return a step of one of `top_k`, event by event: what every rank does when, and the bytes it holds.

        Args:
            index: Which; the fastest when omitted.
        """
        return simulate_assignment(self.search.top_k[index], self._work_of(self.search.top_k[index]), self.usd_per_hour)

    def to_json(self) -> dict[str, Any]:
        """Return the answer in plain values."""
        search = self.search
        return {
            "where": self.where,
            "step_time_s": search.best.step_time_s,
            "usd_per_step": self.usd_per_step,
            "bound_s": search.bound,
            "gap_percent": search.gap,
            "one_process_s": self.alone_s,
            "limited_by": self.limited_by,
            "memory_bytes": search.best.memory_bytes,
            "room_bytes": self.room,
            "return_outputs": self.layers.return_outputs,
            "skewed_step_time_s": self.skewed_s,
            "captured": self.layers.captured.level,
            "left_out": list(self.left_out),
            "space": {name: list(values) for name, values in self.space.items()},
            "arrangements": len(search.configs),
            "listed": search.listed,
            "traffic": self._traffic(),
            "top_k": [_candidate_as_json(candidate) for candidate in search.top_k],
            "plan": self.plan.model_dump(mode="json"),
        }

    def _work_of(self, candidate: Candidate) -> LayerWork:
        """Return the work of the rank that decides what a candidate takes."""
        return candidate.work or self.work

    def _traffic(self) -> list[dict[str, Any]]:
        """Return what a rank exchanges in a step, the most bytes first; by place along the stages if there are any."""
        best = self.search.best
        transfers = [
            {"stage": stage, "kind": kind, "bytes": size, "count": count}
            for stage in range(best.config.stages)
            for (kind, size), count in count_traffic(best, self._work_of(best), stage).items()
        ]
        return sorted(transfers, key=lambda transfer: -transfer["bytes"] * transfer["count"])

    @property
    def space(self) -> dict[str, tuple[Any, ...]]:
        """The dimensions that were searched, and their values."""
        names = (
            "data",
            "context",
            "attention",
            "experts",
            "model",
            "stages",
            "virtual",
            "micro_batches",
            "schedule",
            "zero",
            "recompute",
        )
        tried = self.search.configs
        values = {name: _distinct_values([getattr(config, name) for config in tried]) for name in names}
        if values["experts"] == (1,):
            del values["experts"]
        if values["context"] == (1,):
            del values["context"], values["attention"]
        inside = {config.model_inside for config in tried if config.data > 1 and config.model > 1}
        outermost = tuple("data" if is_inside else "model" for is_inside in sorted(inside, reverse=True))
        return {
            **values,
            "outermost": outermost or ("data",),
            "layers": (tr("{count} decisions", count=len({is_inside.template for is_inside in self.layers.calls})),),
        }

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        return build_result_table(
            self.where,
            self.search,
            self.space,
            self._notes(),
            lambda candidate: self._describe_sharded(candidate) if candidate.sharded_layers else "",
        )

    def _notes(self) -> Iterator[str]:
        """Yield what is to be known of the model, and what was not searched."""
        captured = self.layers.captured
        if self.usd_per_step is not None:
            yield tr("{usd} USD a step", usd=f"{self.usd_per_step:.4g}")
        if self.alone_s is not None and self.alone_s < self.seconds:
            yield tr("a single process is faster: {step} a step", step=format_seconds(self.alone_s))
        if self.skewed_s is not None:
            yield tr(
                "assumes that routers send as many tokens to each of {ranks} ranks that hold experts together; {step} "
                "a step if they send all of them to one",
                ranks=self.search.best.config.experts,
                step=format_seconds(self.skewed_s),
            )
        if captured.reasons:
            yield tr("captured at level {level} only: {why}", level=captured.level, why=captured.reasons[0])
        if self.search.best.config.stages > 1:
            yield tr(
                "stages train through px.Model or px.train_step; for a loop that calls loss.backward() add the limit "
                "pp=1"
            )
        yield from (tr("not searched: {why}", why=why) for why in self.left_out)

    def _describe(self, candidate: Candidate) -> str:
        return tr("{config}, sharded layers: {layers}", config=candidate, layers=self._describe_sharded(candidate))

    def _describe_sharded(self, candidate: Candidate) -> str:
        """Return the layers that are cut, each repeated one once."""
        shown = []
        for position in dict.fromkeys(call.template for call in self.layers.calls):
            call = self.layers.calls[position]
            strategy = candidate.sharded_layers.get(call.path)
            if strategy is not None and not call.is_glue:
                count = len({other.path for other in self.layers.calls if other.template == call.template})
                shown.append(f"{call.path} {strategy}" + (f" x {count}" if count > 1 else ""))
        return ", ".join(shown) or tr("none")

    def _build_plan(self, candidate: Candidate) -> Plan:
        return build_plan(candidate, self.layers, self.base)


def _distinct_values(values: list[Any]) -> tuple[Any, ...]:
    """Return the different ones of values: numbers by size, words as they come."""
    distinct = dict.fromkeys(values)
    return tuple(sorted(distinct) if all(isinstance(value, int) for value in distinct) else distinct)


def _candidate_as_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "arrangement": str(candidate),
        "shares": {"unit": candidate.share_unit, "ranks": list(candidate.shares)} if candidate.shares else None,
        "layers": {path: str(strategy) for path, strategy in candidate.sharded_layers.items()},
        "step_time_s": candidate.step_time_s,
        "memory_bytes": candidate.memory_bytes,
        **{f"{name.replace(' ', '_')}_s": seconds for name, seconds in candidate.parts.items()},
    }
