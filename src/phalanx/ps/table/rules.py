"""How rows are updated, admitted and started: the settings of a table, as values that travel as JSON.

Update rules follow `torch.optim` on the rows a step touches; FTRL follows H. B. McMahan et al., "Ad Click Prediction:
a View from the Trenches", 2013, algorithm 1.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

_frozen = ConfigDict(extra="forbid")
Rate = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


# --- update rules ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_frozen)
class SGD:
    """`row -= lr * (gradient + weight_decay * row)`; no state."""

    lr: Rate
    weight_decay: Rate = 0.0
    kind: Literal["sgd"] = "sgd"


@dataclass(frozen=True, config=_frozen)
class Momentum:
    """SGD with momentum, as `torch.optim.SGD`; one state value per element."""

    lr: Rate
    momentum: Share = 0.9
    dampening: Share = 0.0
    nesterov: bool = False
    weight_decay: Rate = 0.0
    kind: Literal["momentum"] = "momentum"


@dataclass(frozen=True, config=_frozen)
class Adagrad:
    """As `torch.optim.Adagrad`; one state value per element."""

    lr: Rate
    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Positive = 1e-10
    kind: Literal["adagrad"] = "adagrad"


@dataclass(frozen=True, config=_frozen)
class RowWiseAdagrad:
    """Adagrad whose accumulator is the mean of the squared gradient over the row: one state value per row."""

    lr: Rate
    initial_accumulator_value: Rate = 0.0
    eps: Positive = 1e-10
    kind: Literal["row_wise_adagrad"] = "row_wise_adagrad"


@dataclass(frozen=True, config=_frozen)
class Adam:
    """As `torch.optim.Adam`, a row's step counting the updates of that row; two state values per element and one."""

    lr: Rate = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    decoupled: bool = False
    """Whether weight decay acts on the row instead of the gradient (`torch.optim.AdamW`)."""

    kind: Literal["adam"] = "adam"


@dataclass(frozen=True, config=_frozen)
class RMSprop:
    """As `torch.optim.RMSprop` without momentum, not centered; one state value per element."""

    lr: Rate = 1e-2
    alpha: Share = 0.99
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    kind: Literal["rmsprop"] = "rmsprop"


@dataclass(frozen=True, config=_frozen)
class FTRL:
    """FTRL-proximal with L1 and L2; two state values per element (z and n).

    A row that never had a gradient is served as its initial value.
    """

    lr: Positive
    """Alpha of the paper."""

    beta: Rate = 1.0
    l1: Rate = 0.0
    l2: Rate = 0.0
    kind: Literal["ftrl"] = "ftrl"


Rule = Annotated[
    SGD | Momentum | Adagrad | RowWiseAdagrad | Adam | RMSprop | FTRL,
    Field(discriminator="kind"),
]

# --- entry policies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_frozen)
class CountFilter:
    """An id gets a row once it occurred `count` times in training; before that it reads as zeros."""

    count: Annotated[int, Field(ge=1, le=2**24 - 2)]
    kind: Literal["count"] = "count"


@dataclass(frozen=True, config=_frozen)
class Probability:
    """An id gets a row with this probability, decided by a hash of (seed, table, id): the same in every run."""

    p: Annotated[float, Field(ge=0, le=1)]
    kind: Literal["probability"] = "probability"


@dataclass(frozen=True, config=_frozen)
class ShowClick:
    """An id gets a row at once and keeps show and click counts; `shrink` decays them and drops rows of low score.

    Score = show_weight * (show - click) + click_weight * click. Each `shrink` (a day) multiplies show and click by
    `decay`, then drops rows whose score is below `drop_below` or that were not trained for `unseen_days` days.
    """

    show_weight: Rate = 0.1
    click_weight: Rate = 1.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    drop_below: Rate = 0.8
    unseen_days: Annotated[int, Field(ge=1)] = 30
    kind: Literal["show_click"] = "show_click"


Entry = Annotated[CountFilter | Probability | ShowClick, Field(discriminator="kind")]

# --- initial values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_frozen)
class Uniform:
    """Values drawn evenly from [-scale, scale)."""

    scale: Rate = 0.01
    kind: Literal["uniform"] = "uniform"


@dataclass(frozen=True, config=_frozen)
class Normal:
    """Values drawn from a normal distribution of mean 0."""

    std: Rate = 0.01
    kind: Literal["normal"] = "normal"


@dataclass(frozen=True, config=_frozen)
class Constant:
    """Every value the same."""

    value: float = 0.0
    kind: Literal["constant"] = "constant"


Init = Annotated[Uniform | Normal | Constant, Field(discriminator="kind")]

# --- a table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_frozen)
class TableSpec:
    """All that defines a table. Workers send it with their first request; servers need no model code."""

    name: Annotated[str, Field(min_length=1)]
    dim: Annotated[int, Field(ge=1, le=65536)]
    rule: Rule
    init: Init = Uniform()
    entry: Entry | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    max_bytes: Annotated[int, Field(gt=0)] | None = None
    """Hard budget for the rows of one server; the least recently trained rows go first. No limit when None."""

    dense: int | None = None
    """For a table that holds a dense parameter cut into rows 0, 1, ...: how many rows; None for ids."""

    def to_json(self) -> dict[str, object]:
        """Return a JSON object that `table_spec` reads back."""
        return _spec.dump_python(self, mode="json")  # type: ignore[no-any-return]


_spec: TypeAdapter[TableSpec] = TypeAdapter(TableSpec)


def table_spec(value: object) -> TableSpec:
    """Return the specification in a JSON object.

    Raises:
        pydantic.ValidationError: If it is none; names the field.
    """
    return _spec.validate_python(value)
