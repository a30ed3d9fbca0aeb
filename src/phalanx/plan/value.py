"""`Plan` and its parts: mesh axes, parameter and module rules, updates, tables, schedule (frozen, serialisable).

A Plan is frozen and serialisable. A strategy, a search and a hand-edited file all make one; `apply`, `explain`,
`simulate` and checkpoints all read one. It knows nothing of torch, devices or processes.

*Axis* is an axis of the mesh of ranks, *dim* a dimension of a tensor. Patterns are shell globs on plain names
(`state_dict` names for parameters, `named_modules` names for modules); the last matching rule wins.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from phalanx.plan.styles import ContextAttention, StyleName


class Value(BaseModel):
    """Base of every part of a Plan: frozen, strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Axis(Value):
    """One axis of the mesh of ranks; the first axis of a mesh varies slowest."""

    name: str = Field(min_length=1)
    size: PositiveInt


# --- where a tensor lives -------------------------------------------------------------------------------------------


class Replicate(Value):
    """Every rank of the axis holds the whole tensor."""

    kind: Literal["replicate"] = "replicate"


class Shard(Value):
    """Every rank of the axis holds a slice along one dim."""

    kind: Literal["shard"] = "shard"
    dim: int
    sizes: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Rows of each rank's slice; an even split (larger slices first) when None."""


Placement = Annotated[Replicate | Shard, Field(discriminator="kind")]
Layout = dict[str, Placement]
"""One placement per mesh axis, by axis name; an axis that is not named replicates."""


class OnRanks(Value):
    """The parameter lives on the ranks, laid out over the mesh."""

    kind: Literal["ranks"] = "ranks"
    layout: Layout = Field(default_factory=dict)


class Server(Value):
    """The parameter lives in a table on the parameter servers."""

    kind: Literal["server"] = "server"
    table: str


Place = Annotated[OnRanks | Server, Field(discriminator="kind")]


# --- how a parameter is updated -------------------------------------------------------------------------------------


class _Reduced(Value):
    """What every update over ranks states: which axes carry different rows, and how their gradients combine."""

    axes: tuple[str, ...] | None = None
    """Mesh axes that carry different rows for this parameter; the step's batch axes when None."""

    reduce: Literal["mean", "sum"] = "mean"


class AllReduce(_Reduced):
    """Gradients are reduced so that every rank has all of them (data parallel)."""

    kind: Literal["all_reduce"] = "all_reduce"
    bucket_bytes: PositiveInt = 25 * 2**20
    """Gradients travel together until they fill this many bytes."""

    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype on the wire; the gradient's own when None."""

    route: Literal["flat", "hierarchical"] = "flat"
    host_ranks: PositiveInt | None = None
    """Ranks of one host, for the hierarchical route; what the job says when None."""


class ReduceScatter(_Reduced):
    """Each rank keeps the slice of gradient, optimizer state and (ZeRO 3) parameter that it updates."""

    kind: Literal["reduce_scatter"] = "reduce_scatter"
    zero: Literal[1, 2, 3]
    reshard: bool = True
    """Whether gathered parameters are freed after the forward pass (ZeRO 3)."""

    offload: Literal["none", "cpu"] = "none"
    along: tuple[str, ...] | None = None
    """Mesh axes along which the slices are cut; those that carry different rows when None. Along the rest of these,
    slices are copies, whose gradients are all-reduced."""

    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of gradients on the wire; their own when None."""

    mirror: Literal[0, 1] = 0
    """Whose optimizer state a rank keeps beside its own: that of so many ranks after it, where ranks may leave."""


class Average(_Reduced):
    """Ranks train apart and average their parameters every `every` steps (LocalSGD)."""

    kind: Literal["average"] = "average"
    every: PositiveInt
    begin_step: int = Field(default=1, ge=0)
    adaptive: bool = False


class TopK(_Reduced):
    """Only the largest gradient entries travel, the rest is kept as a local residual (deep gradient compression)."""

    kind: Literal["top_k"] = "top_k"
    sparsity: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(min_length=1)
    """Share of the entries that stay behind, over `rampup_steps` from the first to the last."""

    rampup_begin_step: int = Field(default=0, ge=0)
    rampup_steps: PositiveInt = 1
    dense_below: PositiveInt = 16384
    """Parameters with fewer elements travel whole, as in Fleet."""


class Push(_Reduced):
    """Gradients go to the parameter server."""

    kind: Literal["push"] = "push"
    mode: Literal["sync", "async", "half_async", "geo", "bounded"]
    steps: PositiveInt | None = None
    """Steps between pushes (geo), steps added up into one push (half_async), or the staleness bound (bounded)."""

    local_optimizer: bool = False
    """Whether geo may train its replica with another rule than SGD."""

    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """As what rows of ids and their gradients travel."""

    @model_validator(mode="after")
    def _steps_where_needed(self) -> Self:
        if (self.steps is None) == (self.mode in ("geo", "half_async", "bounded")):
            raise ValueError(f"push mode {self.mode!r} {'needs' if self.steps is None else 'takes no'} `steps`")
        return self


class Frozen(Value):
    """The parameter is not trained."""

    kind: Literal["frozen"] = "frozen"


Update = Annotated[AllReduce | ReduceScatter | Average | TopK | Push | Frozen, Field(discriminator="kind")]


# --- rules ----------------------------------------------------------------------------------------------------------


class ParamRule(Value):
    """Where the parameters whose plain name matches live, and how they are updated."""

    match: str
    place: Place = OnRanks()
    update: Update = AllReduce()
    managed: Literal["phalanx", "module"] = "phalanx"
    """`module`: the layer itself holds its shard and communicates; its gradient is only scaled."""


class ModuleRule(Value):
    """How the modules whose name matches are computed."""

    match: str
    style: StyleName | None = None
    inputs: Layout | None = None
    outputs: Layout | None = None
    attention: ContextAttention = "all_gather"
    """How attention of style `context` meets the keys and values of other ranks: `ring` never holds all of them."""

    stage: int | None = Field(default=None, ge=0)
    """Pipeline stage."""

    unit: bool = False
    """Whether the module's parameters are gathered together (ZeRO 3)."""

    recompute: Literal["none", "selective", "full"] = "none"
    offload: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the arithmetic; the parameters' when None."""

    pure: bool = False
    """Whether parameters have that dtype too, with a float32 copy in the optimizer."""


class OpRule(Value):
    """Placement of one operator's outputs; only valid with the digest of the captured graph it was made for."""

    site: str
    outputs: tuple[Layout, ...]


class Table(Value):
    """A table of rows on the parameter servers."""

    name: str
    module: str
    dim: PositiveInt
    optimizer: str | None = None
    """Rule of the rows, such as `adagrad(lr=0.05)`; the wrapped torch optimizer's when None."""

    entry: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


class Schedule(Value):
    """Order of micro-batches through pipeline stages."""

    kind: Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"] = "none"
    microbatches: PositiveInt = 1
    microbatch_rows: PositiveInt | None = None
    """Rows of a micro-batch; the rank's batch cut into `microbatches` when None."""

    virtual: PositiveInt = 1
    """Stages held by each rank."""

    @property
    def is_v(self) -> bool:
        """Whether a rank's second stage is as far from the end as its first is from the start (zero-bubble V)."""
        return self.kind == "zero_bubble" and self.virtual == 2

    def holder(self, stage: int, ranks: int) -> int:
        """Return which of the ranks along the stage axis holds a stage."""
        turn, index = divmod(stage, ranks)
        return ranks - 1 - index if self.is_v and turn else index


class Scaler(Value):
    """Loss scaling for float16."""

    initial: float = Field(default=32768.0, gt=0, allow_inf_nan=False)
    growth_every: PositiveInt = 1000
    growth: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    backoff: float = Field(default=0.8, gt=0, le=1)
    backoff_after: PositiveInt = 1
    """Steps with an infinite or undefined gradient, one after another, until the scale falls."""

    dynamic: bool = True


def _read_balance(value: Any) -> Any:
    """Return what is balanced; Plans once said only whether replicas move."""
    return {True: "replicas", False: None}.get(value, value) if isinstance(value, bool) else value


class Step(Value):
    """How one optimizer step runs."""

    batch_axes: tuple[str, ...] = ()
    """Mesh axes along which the rows of a global batch are split."""

    accumulate: PositiveInt = 1
    """Batches whose gradients are added before one update."""

    accumulate_mean: bool = True
    """Whether that update uses their mean; their sum otherwise."""

    compiled: bool = False

    scaler: Scaler | None = None
    sync_bn: bool = False
    broadcast: bool = True
    """Whether parameters and buffers start as rank 0's."""

    sync_buffers: bool = True
    """Whether floating-point buffers are kept equal on the ranks (batch-norm statistics averaged, others rank 0's)."""

    replicas: PositiveInt | None = None
    """Logical replicas over which a global batch is split: the result has the same bits on any number of ranks up to
    this. One for each rank that reads its own samples when None, and nothing is promised for other numbers."""

    balance: Annotated[Literal["replicas", "samples"] | None, BeforeValidator(_read_balance)] = None
    """What faster ranks get more of: logical replicas, or samples of each global batch. Even parts when None."""

    shares: tuple[PositiveInt, ...] | None = None
    """With `balance`, the units that each rank which reads its own samples starts with: replicas, or samples in
    proportion. Even parts when None. What ranks measure changes them."""

    replica_threads: PositiveInt = 1
    """Threads with which a logical replica computes on a CPU; other numbers give other bits."""

    @property
    def dynamic_shapes(self) -> bool | None:
        """Return `dynamic` for torch.compile.

        Once a shape has changed, torch takes one graph for all, with other bits than before: with replicas each shape
        has its own, whatever came before.
        """
        return False if self.replicas else None


class Reason(Value):
    """Why the Plan says what it says: the setting or finding, and what follows from it."""

    setting: str
    effect: str


class Plan(Value):
    """A whole job: the mesh, where everything lives, how it is computed and updated, and why."""

    version: Literal[1] = 1
    model_digest: str | None = None
    """Digest of parameter names, shapes and dtypes the Plan was made for; any model when None."""

    capture_digest: str | None = None
    mesh: tuple[Axis, ...] = ()
    servers: int = Field(default=0, ge=0)
    params: tuple[ParamRule, ...] = (ParamRule(match="*"),)
    modules: tuple[ModuleRule, ...] = ()
    ops: tuple[OpRule, ...] = ()
    tables: tuple[Table, ...] = ()
    schedule: Schedule = Schedule()
    step: Step = Step()
    because: tuple[Reason, ...] = ()

    @model_validator(mode="after")
    def _refers_only_to_what_exists(self) -> Self:
        names = [axis.name for axis in self.mesh]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh axis names repeat: {names}")
        used = {(f"params[{r.match}]", a) for r in self.params for a in _axes_of(r)}
        used |= {("step.batch_axes", a) for a in self.step.batch_axes}
        used |= {(f"modules[{m.match}]", a) for m in self.modules for a in (*(m.inputs or {}), *(m.outputs or {}))}
        for where, axis in sorted(used):
            if axis not in names:
                raise ValueError(f"{where} names mesh axis {axis!r}; the mesh has {names}")
        tables = {table.name for table in self.tables}
        if len(tables) != len(self.tables):
            raise ValueError(f"table names repeat: {[table.name for table in self.tables]}")
        sizes = {axis.name: axis.size for axis in self.mesh}
        for rule in self.params:
            for axis, placed in rule.place.layout.items() if isinstance(rule.place, OnRanks) else ():
                if isinstance(placed, Shard) and placed.sizes is not None and len(placed.sizes) != sizes[axis]:
                    raise ValueError(f"params[{rule.match}] cuts along {axis}={sizes[axis]} into sizes {placed.sizes}")
            if isinstance(rule.place, Server) and rule.place.table not in tables:
                raise ValueError(f"params[{rule.match}] lives in table {rule.place.table!r}; tables: {sorted(tables)}")
        if self.ops and self.capture_digest is None:
            raise ValueError("rules for operators need the capture digest of the graph they were made for")
        return self

    @model_validator(mode="after")
    def _shares_are_of_its_ranks(self) -> Self:
        shares, step = self.step.shares, self.step
        readers = math.prod(axis.size for axis in self.mesh if axis.name in step.batch_axes)
        if shares is None:
            return self
        if step.balance is None:
            raise ValueError('step.shares are of ranks of unequal speed. Set step.balance = "samples" or "replicas"')
        if len(shares) != readers:
            raise ValueError(f"step.shares has {len(shares)} entries, and {readers} ranks read samples of their own")
        if step.balance == "replicas" and sum(shares) != step.replicas:
            raise ValueError(f"step.shares has {sum(shares)} replicas, and step.replicas is {step.replicas}")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(axis.size for axis in self.mesh)

    def axis_size(self, name: str) -> int:
        """Return the size of one mesh axis."""
        return next(axis.size for axis in self.mesh if axis.name == name)

    def rule_for(self, name: str) -> ParamRule:
        """Return the rule of the parameter with this plain name: the last that matches."""
        return self._rules.find(name)

    @cached_property
    def _rules(self) -> _RuleIndex:
        return _RuleIndex(self.params)

    def __copy__(self) -> Self:
        """Copy without the index of rules: `model_copy` may give the copy other rules."""
        copied = super().__copy__()
        copied.__dict__.pop("_rules", None)
        return copied

    def digest(self) -> str:
        """Return a short digest of everything but the reasons."""
        return digest_of(self.model_dump(mode="json", exclude={"because"}))


class _RuleIndex:
    """Rules by pattern, so that a name is not compared with the thousands that have none but an exact name."""

    def __init__(self, params: tuple[ParamRule, ...]) -> None:
        self.params = params
        self._exact = {rule.match: number for number, rule in enumerate(params)}
        globs = [(number, rule.match) for number, rule in enumerate(params) if set(rule.match) & set("*?[")]
        self._globs = globs[::-1]

    def find(self, name: str) -> ParamRule:
        """Return the last rule that matches a name; an exact name always matches itself, brackets included."""
        exact = self._exact.get(name, -1)
        later = (number for number, match in self._globs if number > exact and fnmatch.fnmatchcase(name, match))
        last = next(later, exact)
        return self.params[last] if last >= 0 else _ANY


_ANY = ParamRule(match="*")


def matches(pattern: str, name: str) -> bool:
    """Return whether a rule's pattern covers a name. An exact name always matches itself, brackets included."""
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def digest_of(value: object) -> str:
    """Return 16 hex digits over the canonical JSON of a value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _axes_of(rule: ParamRule) -> tuple[str, ...]:
    placed = tuple(rule.place.layout) if isinstance(rule.place, OnRanks) else ()
    updated = () if isinstance(rule.update, Frozen) else rule.update.axes or ()
    cut = (rule.update.along or ()) if isinstance(rule.update, ReduceScatter) else ()
    return placed + updated + cut
