"""`TableSpec`: settings of a table: optimizer, entry policy, initializer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.ps.table.update_rules import Rate, Rule

_frozen = ConfigDict(extra="forbid")

Days = Annotated[int, Field(ge=1, lt=2**31)]
"""Calls of `shrink`."""

FileDtype = Literal["float32", "bfloat16", "int8"]


# --- entry policies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_frozen)
class CountFilter:
    """An id gets a row once it occurred `count` times in training; before that it reads as zeros.

    Each `shrink` (a day) forgets the counts of ids that did not occur for `waiting_days` days.
    """

    count: Annotated[int, Field(ge=1, le=2**24 - 2)]
    waiting_days: Days = 7
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
    unseen_days: Days = 30
    kind: Literal["show_click"] = "show_click"


EntryPolicy = Annotated[CountFilter | Probability | ShowClick, Field(discriminator="kind")]

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
    entry: EntryPolicy | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    max_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Most memory of the rows and the index of one server. No limit when None."""

    unseen_days: Days | None = None
    """Each `shrink` drops rows that were not trained for so many days; None keeps them. `ShowClick` has its own."""

    evict: Literal["spill", "drop"] = "spill"
    """What happens to rows that `max_bytes` has no room for: they move to files and come back when used, or they are
    dropped, the least recently trained ones first."""

    file_dtype: FileDtype = "float32"
    """How files hold the values of rows that left memory: as memory does, or rounded, to bfloat16 or to int8 with one
    scale a row. Optimizer state stays float32."""

    dense: int | None = None
    """For a table that holds a dense parameter cut into rows 0, 1, ...: how many rows; None for ids."""

    @field_validator("unseen_days")
    @classmethod
    def _check_unseen_days(cls, days: int | None, info: ValidationInfo) -> int | None:
        if days is not None and isinstance(info.data.get("entry"), ShowClick):
            raise ValueError(f"ShowClick drops rows by its own unseen_days: give entry=ShowClick(unseen_days={days})")
        return days

    @field_validator("file_dtype")
    @classmethod
    def _check_file_dtype(cls, file_dtype: FileDtype, info: ValidationInfo) -> FileDtype:
        if file_dtype == "float32":
            return file_dtype
        if info.data.get("max_bytes") is None or info.data.get("evict") == "drop":
            raise ValueError("no rows of this table move to files: give max_bytes=, without evict='drop'")
        if info.data.get("dtype") == "bfloat16":
            raise ValueError("rows of dtype='bfloat16' move to files as they are: leave out file_dtype, or dtype")
        return file_dtype

    @property
    def spills(self) -> bool:
        """Whether rows move to files when `max_bytes` has no room for them."""
        return self.max_bytes is not None and self.evict == "spill"

    @property
    def rounds_in_files(self) -> bool:
        """Whether a row that moves to a file is rounded."""
        return self.file_dtype != "float32"

    @property
    def row_days(self) -> int:
        """Days without training after which a row goes; 0 for never."""
        return self.entry.unseen_days if isinstance(self.entry, ShowClick) else self.unseen_days or 0

    @property
    def waiting_days(self) -> int:
        """Days after which the count of an id that waits for its row goes; 0 where none wait."""
        return self.entry.waiting_days if isinstance(self.entry, CountFilter) else 0

    def without_limit(self) -> TableSpec:
        """Return the specification of the same table with all rows in memory."""
        return dataclasses.replace(self, max_bytes=None, file_dtype="float32")

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


def check_same_spec(existing: TableSpec, spec: TableSpec) -> None:
    """Hold a specification against the one its table was made with.

    Raises:
        ConfigError: If they differ; names the first field and both values.
    """
    for field in dataclasses.fields(TableSpec):
        actual, expected = getattr(existing, field.name), getattr(spec, field.name)
        if actual != expected:
            raise ConfigError(
                f"table {spec.name!r} was made with {field.name}={actual!r} and is now asked with "
                f"{field.name}={expected!r}. Give both the same settings, or another name."
            )
