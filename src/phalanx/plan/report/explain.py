"""`Explanation`: a Plan as a table: placement, communication, memory, reasons."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from phalanx.plan.buckets import all_reduce_buckets
from phalanx.plan.memory import Memory, StateOf, memory_of, memory_table
from phalanx.plan.mesh import reduced_along, sharded_along, slice_shape
from phalanx.plan.report.layer_profile import LayerKind, fractions, fractions_table
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.stages import shares_of, stage_of
from phalanx.plan.styles import STYLES, ContextAttention
from phalanx.plan.value import AllReduce, Frozen, OnRanks, ParamRule, Plan, Push, Server, Shard, Table
from phalanx.strategy.table import as_text

_JSON_KEYS = {"location": "place"}
"""Keys of a row in JSON that differ from its fields."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule and what it covers."""

    match: str
    tensors: int
    elements: int
    bytes: int
    rank_bytes: int
    """Of what one rank holds, the largest slice where slices differ; 0 on servers."""

    location: str
    update: str


@dataclass(frozen=True, slots=True)
class TableRow:
    """One table of the Plan."""

    table: str
    module: str
    dim: int
    rule: str
    entry: str
    dtype: str
    lives: str
    pushed: str


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a pipeline."""

    stage: int
    holder: int
    """Which rank along the stage axis."""

    units: tuple[str, ...]
    bytes: int
    """Of the parameters in these units."""


@dataclass(frozen=True, slots=True)
class TokensRow:
    """Modules in which ranks hold different tokens of the same rows."""

    match: str
    style: str
    axis: str
    ranks: int
    attention: ContextAttention
    """Of style `context`: how attention meets the keys and values of other ranks."""


_ATTENTION: dict[ContextAttention, str] = {
    "all_gather": ", whose keys and values every rank gathers",
    "ring": ", whose keys and values go around the ranks",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a Plan does to one model; prints as a table and dumps as JSON."""

    plan: Plan
    rows: tuple[RuleRow, ...]
    gradients: int
    """Gradients that are reduced over ranks; of the rank with most, where stages differ."""

    collectives: int
    """All-reduces issued per step for them."""

    reduced_bytes: int
    """Bytes of gradients in one step's all-reduces, per rank."""

    tables: tuple[TableRow, ...] = ()
    kinds: tuple[LayerKind, ...] = ()
    """Kinds of layers, when they were measured."""

    stages: tuple[StageRow, ...] = ()
    tokens: tuple[TokensRow, ...] = ()
    rank: int = 0
    """The rank whose memory is shown."""

    memory: Memory | None = None
    activation_bytes: int | None = None
    """What one forward pass keeps for its backward pass, when it was measured."""

    step: tuple[str, ...] = ()
    """What `optimizer.step()` does, in order, when there is an optimizer."""

    def to_json(self) -> str:
        """Return everything the table shows as one JSON object."""
        return json.dumps(
            {
                "mesh": {axis.name: axis.size for axis in self.plan.mesh},
                "rules": [
                    {_JSON_KEYS.get(name, name): getattr(row, name) for name in RuleRow.__slots__} for row in self.rows
                ],
                "gradients": self.gradients,
                "collectives_per_step": self.collectives,
                "reduced_bytes_per_step": self.reduced_bytes,
                "tables": [{name: getattr(row, name) for name in TableRow.__slots__} for row in self.tables],
                "fractions": fractions(self.kinds),
                "stages": [{name: getattr(row, name) for name in StageRow.__slots__} for row in self.stages],
                "tokens": [{name: getattr(row, name) for name in TokensRow.__slots__} for row in self.tokens],
                "operators": len(self.plan.ops),
                "memory": None if self.memory is None else dataclasses.asdict(self.memory) | {"rank": self.rank},
                "activation_bytes": self.activation_bytes,
                "optimizer_step": self.step,
                "because": [reason.model_dump() for reason in self.plan.because],
            }
        )

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        mesh = " x ".join(f"{axis.name}={axis.size}" for axis in self.plan.mesh) or "one rank"
        grid = Grid(title=f"Plan over {mesh}", title_justify="left")
        for name in ("parameters", "tensors", "elements", "MB", "MB a rank", "lives", "updated by"):
            grid.add_column(name, justify="left" if name in ("parameters", "lives", "updated by") else "right")
        for row in self.rows:
            sizes = (f"{row.tensors}", f"{row.elements:,}", f"{row.bytes / 1e6:.1f}", f"{row.rank_bytes / 1e6:.1f}")
            grid.add_row(row.match, *sizes, row.location, row.update)
        parts: list[RenderableType] = [grid, *self._tables()]
        if self.kinds:
            parts.append(fractions_table(self.kinds))
        if self.memory is not None:
            parts.append(memory_table(self.memory, self.rank))
        lines = [Text(f"{self.gradients} gradients in {self.collectives} all-reduces per step")]
        if self.activation_bytes is not None:
            lines.append(Text(f"one forward pass keeps {self.activation_bytes:,} bytes of activations"))
        lines += [Text(line) for line in (*self._stages(), *self._placement_lines())]
        if self.step:
            lines.append(Text(f"optimizer.step(): {', '.join(self.step)}"))
        lines += [Text(f"{reason.setting}: {reason.effect}") for reason in self.plan.because]
        return Group(*parts, *lines)

    def _stages(self) -> list[str]:
        if not self.stages:
            return []
        schedule = self.plan.schedule
        cut = f"of {schedule.microbatch_rows} rows" if schedule.microbatch_rows else f"{schedule.microbatches} a step"
        lines = [f"stages by schedule {schedule.kind}, micro-batches: {cut}"]
        return lines + [
            f"stage {row.stage} on rank {row.holder} of its axis: {', '.join(row.units)} ({row.bytes / 1e6:.1f} MB)"
            for row in self.stages
        ]

    def _placement_lines(self) -> Iterator[str]:
        for row in self.tokens:
            sees = f"; attention sees all{_ATTENTION[row.attention]}" if STYLES[row.style].spans_attention else ""
            yield f"{row.match}: each rank along {row.axis}={row.ranks} computes 1/{row.ranks} of the tokens{sees}"
        if self.plan.ops:
            yield f"{len(self.plan.ops)} operators of the forward pass are placed one by one"

    def _tables(self) -> list[RenderableType]:
        if not self.tables:
            return []
        grid = Grid(title="Tables", title_justify="left")
        for name in TableRow.__slots__:
            grid.add_column(name, justify="right" if name == "dim" else "left")
        for row in self.tables:
            grid.add_row(*(str(getattr(row, name)) for name in TableRow.__slots__))
        return [grid]


def explain(
    plan: Plan,
    shape: ModelShape,
    kinds: Sequence[LayerKind] = (),
    *,
    rank: int = 0,
    state: StateOf | None = None,
    averaged: bool = False,
    step: tuple[str, ...] = (),
) -> Explanation:
    """Say what a Plan does to a model of this shape. Pure.

    Args:
        plan: The Plan.
        shape: The model's parameters.
        kinds: Its kinds of layers, when they were measured.
        rank: The rank whose memory is shown.
        state: What its optimizer keeps for each parameter.
        averaged: Whether an EMA of the weights is kept.
        step: What `optimizer.step()` does, in order.
    """
    shares = shares_of(plan, shape)
    rounds = [all_reduce_buckets(plan, share) for share in shares] if plan.world_size > 1 else [[]]
    buckets = max(
        rounds, key=lambda bucket_round: sum(param.bytes for bucket in bucket_round for param in bucket.params)
    )
    names_by_rank = [{param.name for param in share.params} for share in shares]
    covered: dict[str, tuple[ParamRule, list[ParamShape]]] = {}
    for param in shape.params:
        rule = plan.rule_for(param.name)
        covered.setdefault(rule.match, (rule, []))[1].append(param)
    rows = (
        RuleRow(
            match=rule.match,
            tensors=len(params),
            elements=sum(p.count for p in params),
            bytes=sum(p.bytes for p in params),
            rank_bytes=max(sum(_rank_bytes(p, plan) for p in params if p.name in names) for names in names_by_rank),
            location=_location(rule, plan),
            update=_update(rule, plan),
        )
        for rule, params in covered.values()
    )
    return Explanation(
        plan=plan,
        rows=tuple(rows),
        gradients=sum(len(bucket.params) for bucket in buckets),
        collectives=len(buckets),
        reduced_bytes=sum(_rank_bytes(p, plan) for bucket in buckets for p in bucket.params),
        tables=tuple(_table(table, plan) for table in plan.tables),
        kinds=tuple(kinds),
        stages=tuple(_stages(plan, shape, len(shares))),
        tokens=tuple(_tokens(plan)),
        rank=rank,
        memory=memory_of(plan, shape, rank, state, averaged=averaged),
        step=step,
    )


def _stages(plan: Plan, shape: ModelShape, ranks: int) -> Iterator[StageRow]:
    units = {rule.match: rule.stage for rule in plan.modules if rule.stage is not None}
    for stage in sorted(set(units.values())) if ranks > 1 else ():
        bytes_held = sum(param.bytes for param in shape.params if stage_of(plan, param.name) == stage)
        names = tuple(name for name, unit_stage in units.items() if unit_stage == stage)
        yield StageRow(stage, plan.schedule.holder(stage, ranks), names, bytes_held)


def _tokens(plan: Plan) -> Iterator[TokensRow]:
    for rule in plan.modules:
        if rule.style is not None and STYLES[rule.style].shards_tokens:
            for axis, placed in (rule.inputs or {}).items():
                if isinstance(placed, Shard) and plan.axis_size(axis) > 1:
                    yield TokensRow(rule.match, rule.style, axis, plan.axis_size(axis), rule.attention)


def _rank_bytes(param: ParamShape, plan: Plan) -> int:
    """Return the bytes of a parameter that one rank holds."""
    if not isinstance(plan.rule_for(param.name).place, OnRanks):
        return 0
    return math.prod(slice_shape(plan, param)) * param.item_bytes


def _table(table: Table, plan: Plan) -> TableRow:
    pushes = {_update(rule, plan) for rule in plan.params if rule.place == Server(table=table.name)}
    return TableRow(
        table=table.name,
        module=table.module or "the model",
        dim=table.dim,
        rule=table.optimizer or "the optimizer's",
        entry=table.entry or "every id",
        dtype=table.dtype,
        lives=_home(plan),
        pushed=", ".join(sorted(pushes)),
    )


def _home(plan: Plan) -> str:
    return f"{plan.servers} server{'s' * (plan.servers > 1)}" if plan.servers else "this process"


def _location(rule: ParamRule, plan: Plan) -> str:
    if not isinstance(rule.place, OnRanks):
        return f"{_home(plan)}, table {rule.place.table}"
    if rule.managed == "module":
        along = " x ".join(f"{axis}={plan.axis_size(axis)}" for axis in sharded_along(rule))
        return f"cut over {along} by its layer" if along else "a shard, held by its layer"
    split = {axis: placed for axis, placed in rule.place.layout.items() if placed.kind != "replicate"}
    return ", ".join(f"{placed.kind} over {axis}" for axis, placed in split.items()) or (
        "replicated" if plan.world_size > 1 else "this rank"
    )


def _update(rule: ParamRule, plan: Plan) -> str:
    if isinstance(rule.update, Frozen):
        return "nothing (frozen)"
    if rule.managed == "module" and not reduced_along(plan, rule):
        return "its own rank, gradient scaled"
    if isinstance(rule.update, AllReduce):
        if plan.world_size == 1:
            return "this rank"
        return f"all-reduce ({rule.update.reduce}) in buckets of {rule.update.bucket_bytes / 2**20:g} MiB"
    if isinstance(rule.update, Push):
        steps = f", {rule.update.steps} steps" if rule.update.steps else ""
        return f"push ({rule.update.mode}{steps})"
    return rule.update.kind.replace("_", " ")
