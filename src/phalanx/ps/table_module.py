"""`TableModule`: what `SparseEmbedding` and `EmbeddingBag` share, a module whose rows are in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.client.parameter import TableParameter, TableSettings, is_named, shared_parameter
from phalanx.ps.features import Feature, FeatureRows, read_features
from phalanx.ps.gathers import rows_per_bag, rows_per_id
from phalanx.ps.ids import like_jagged
from phalanx.ps.pooling.bags import Bags
from phalanx.ps.table.rules import EntryPolicy, Init, Uniform
from phalanx.ps.table.update_rules import SGD, Rule

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}

FILE_DTYPES = DTYPES | {torch.int8: "int8", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Query:
    """One call of a module: what it reads, and what it makes of the rows."""

    feature: Feature
    bags: Bags | None = None
    """Whose rows are pooled; there is a row per id when None."""

    jagged: Tensor | None = None
    """The ids, if they are jagged and the rows are to be so too."""


class TableModule(nn.Module):
    """A module that looks up rows of a table.

    Args:
        dim: Values per row.
        entry: Which ids get a row.
        optimizer: Rule of the rows.
        init: Values of a row before training.
        padding_idx: An id that reads as zeros and is not trained.
        name: Name of the table.
        dtype: Stored precision of the rows.
        seed: Seed of the initial values.
        max_bytes: Most bytes of memory the table may use on one server.
        evict: What happens to rows that `max_bytes` has no room for.
        file_dtype: How files hold the values of rows.
        unseen_days: Days after which rows that were not trained go.

    Raises:
        ConfigError: If an argument cannot work, or a table of this name has other settings.
    """

    handle: TableParameter

    def __init__(
        self,
        dim: int,
        *,
        entry: EntryPolicy | None,
        optimizer: Rule | None,
        init: Init | None,
        padding_idx: int | None,
        name: str | None,
        dtype: torch.dtype | str,
        seed: int,
        max_bytes: int | None,
        evict: Literal["spill", "drop"],
        file_dtype: torch.dtype | str,
        unseen_days: int | None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype of rows must be torch.float32 or torch.bfloat16, found {dtype!r}.")
        if file_dtype not in FILE_DTYPES:
            raise ConfigError(
                f"file_dtype of rows must be torch.float32, torch.bfloat16 or torch.int8, found {file_dtype!r}."
            )
        self.settings = _check_settings(
            type(self).__name__,
            dim=dim,
            optimizer=optimizer,
            entry=entry,
            init=init or Uniform(),
            dtype=DTYPES[dtype],
            seed=seed,
            max_bytes=max_bytes,
            evict=evict,
            file_dtype=FILE_DTYPES[file_dtype],
            padding_idx=padding_idx,
            unseen_days=unseen_days,
        )
        self._connect(name)

    def query(self, *args: Any, **kwargs: Any) -> Query:
        """Return what a call of `forward` with these arguments reads.

        Raises:
            ConfigError: If the arguments cannot be looked up.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        fields = {"name": self.handle.table, "optimizer": self.settings.optimizer}
        return ", ".join([str(self.settings.dim), *(f"{k}={v!r}" for k, v in fields.items() if v is not None)])

    def _look_up(self, query: Query) -> Tensor:
        return results_of([query], self._read([query.feature]))[0]

    def _connect(self, name: str | None) -> None:
        self.handle = shared_parameter(name, self.settings)
        # Imports torch's compiler, as every torch optimizer does when it is made.
        self._read: Callable[[Sequence[Feature]], list[FeatureRows]] = torch.compiler.disable(read_features)

    # Rows are in snapshots of the servers, not in state_dict; the parameter has nothing to save.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None: ...

    def _load_from_state_dict(self, *_args: Any) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_read"}
        return {**state, "_parameters": {}, "_table": self.handle.table, "_first_values": self.handle.first_values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, first_values = state.pop("_table"), state.pop("_first_values", None)
        is_new = not is_named(name)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect(name)
        if is_new:
            self.handle.first_values = first_values


def results_of(queries: Sequence[Query], feature_rows: Sequence[FeatureRows]) -> list[Tensor]:
    """Return what each query makes of the rows of its feature; the bags of all are pooled together."""
    looked_up = list(zip(queries, feature_rows, strict=True))
    pooled = iter(rows_per_bag([(rows, query.bags) for query, rows in looked_up if query.bags is not None]))
    return [_rows_per_id(query, rows) if query.bags is None else next(pooled) for query, rows in looked_up]


def _rows_per_id(query: Query, feature: FeatureRows) -> Tensor:
    rows = rows_per_id(feature, query.feature.ids.shape)
    return rows if query.jagged is None else like_jagged(query.jagged, rows)


_settings: dict[str, TypeAdapter[Any]] = {
    "optimizer": TypeAdapter(Rule | None),
    "entry": TypeAdapter(EntryPolicy | None),
    "init": TypeAdapter(Init),
}


def _check_settings(module: str, **settings: Any) -> TableSettings:
    """Return the settings, checked as a table's specification checks them."""
    for name, kind in _settings.items():
        try:
            kind.validate_python(settings[name])
        except ValidationError:
            examples = {"optimizer": "phalanx.ps.Adagrad(0.05)", "entry": "phalanx.ps.CountFilter(10)"}
            raise ConfigError(
                f"{module}({name}=) takes a value such as {examples.get(name, 'phalanx.ps.Uniform(0.01)')}, "
                f"found {settings[name]!r}."
            ) from None
    checked = TableSettings(**settings)
    try:
        checked.spec("checked", checked.optimizer or SGD(lr=0.0))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{module}({first['loc'][0]}={first['input']!r}): {first['msg']}.") from None
    return checked
