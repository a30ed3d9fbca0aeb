"""`EmbeddingBag`: pooled rows of bags of 64-bit ids, stored on the parameter servers."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.conversions import check_convertible, rows_for_torch, start_from_torch
from phalanx.ps.features import Feature
from phalanx.ps.pooling.bags import PoolingMode, read_bags
from phalanx.ps.table.rules import EntryPolicy, Init
from phalanx.ps.table.update_rules import Rule
from phalanx.ps.table_module import Query, TableModule


class EmbeddingBag(TableModule):
    """Looks up bags of ids and pools the rows of each, as `nn.EmbeddingBag` does; the rows are in a table.

    With the same rows it gives the results and gradients of `nn.EmbeddingBag`. What a table is, and how it is trained
    and saved, `SparseEmbedding` says; modules of both kinds that have one `name` share rows. A bag without ids gives
    zeros.

    Args:
        dim: Values per row.
        mode: How the rows of a bag combine: `sum`, `mean` or `max`.
        include_last_offset: Whether `offsets` end with the number of ids, and so have one entry more than bags.
        entry: Which ids get a row: `CountFilter`, `Probability` or `ShowClick`; every trained id when None.
        optimizer: Rule of the rows; that of the torch optimizer that holds the parameter when None.
        init: Values of a row before training: `Uniform`, `Normal` or `Constant`.
        padding_idx: An id that counts in no bag and is not trained; any 64-bit value, so -1 is the id -1.
        name: Name of the table: modules of one name share it. The module's place in the model when None.
        dtype: Stored precision of the rows, `torch.float32` or `torch.bfloat16`. Results have the module's own dtype.
        seed: Seed of the initial values.
        max_bytes: Most bytes of memory the table may use on one server; no limit when None.
        evict: What happens to rows that `max_bytes` has no room for: "spill" moves those that were not used lately to
            files, and back when they are used; "drop" drops the least recently trained ones.
        file_dtype: How files hold the values of rows: `torch.float32`, or smaller and rounded as `torch.bfloat16` or
            `torch.int8`.
        unseen_days: Rows that were not trained for so many days go; `fleet.shrink()` ends a day. They stay when None.
            With any entry policy but `ShowClick`, which has its own.

    Raises:
        ConfigError: If an argument cannot work, or a table of this name has other settings.
    """

    def __init__(
        self,
        dim: int,
        *,
        mode: PoolingMode = "mean",
        include_last_offset: bool = False,
        entry: EntryPolicy | None = None,
        optimizer: Rule | None = None,
        init: Init | None = None,
        padding_idx: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str = torch.float32,
        seed: int = 0,
        max_bytes: int | None = None,
        evict: Literal["spill", "drop"] = "spill",
        file_dtype: torch.dtype | str = torch.float32,
        unseen_days: int | None = None,
    ) -> None:
        if mode not in get_args(PoolingMode):
            raise ConfigError(f"mode must be 'sum', 'mean' or 'max', found {mode!r}.")
        super().__init__(
            dim,
            entry=entry,
            optimizer=optimizer,
            init=init,
            padding_idx=padding_idx,
            name=name,
            dtype=dtype,
            seed=seed,
            max_bytes=max_bytes,
            evict=evict,
            file_dtype=file_dtype,
            unseen_days=unseen_days,
        )
        self.mode: PoolingMode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        clicks: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool bags.

        Args:
            ids: Integers: shape (bags, ids per bag), flat with `offsets`, or a nested tensor of layout `torch.jagged`.
            offsets: Where each bag begins in flat `ids`, shape (bags,); (bags + 1,) with `include_last_offset`.
            per_sample_weights: Factor of each id's row, shape of `ids`, for mode `sum`; gradients reach it.
            clicks: How often each occurrence was clicked, shape of `ids`; for tables with `entry=ShowClick(...)`.

        Returns:
            Shape (bags, dim).

        Raises:
            ConfigError: If ids are no integers, or shapes, offsets, weights and mode do not fit each other.
        """
        return self._look_up(self.query(ids, offsets, per_sample_weights, clicks=clicks))

    @classmethod
    def from_torch(cls, module: nn.EmbeddingBag, *, name: str | None = None, **settings: Any) -> EmbeddingBag:
        """Return a bag whose ids 0 to n - 1 start from the rows of an `nn.EmbeddingBag`; others from `init=`.

        On servers the rows of worker 0 count, and those that the servers have already.

        Args:
            module: It is copied. Device, dtype, `mode`, `include_last_offset` and `padding_idx` are taken over.
            name: Name of the table, which must be a new one.
            settings: Other arguments of `EmbeddingBag`.

        Raises:
            ConfigError: If a table cannot do what the module does, or there is a table of this name.
        """
        check_convertible(module, nn.EmbeddingBag, name)
        bag = cls(
            module.embedding_dim,
            mode=cast(PoolingMode, module.mode),
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
            name=name,
            **settings,
        )
        start_from_torch(bag.handle, module.weight)
        return bag.to(module.weight.device, module.weight.dtype)

    def to_torch(self, ids: int | Tensor) -> nn.EmbeddingBag:
        """Return an `nn.EmbeddingBag` with a copy of rows of the table.

        Args:
            ids: Ids of the rows, shape (n,): row i of the result is that of `ids[i]`. An int n for 0 to n - 1.

        Raises:
            ConfigError: If ids are no integers in one dimension, or occur twice.
        """
        rows, padding = rows_for_torch(self.handle, ids)
        return nn.EmbeddingBag.from_pretrained(
            rows, freeze=False, mode=self.mode, include_last_offset=self.include_last_offset, padding_idx=padding
        )

    def query(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        clicks: Tensor | None = None,
    ) -> Query:
        """Return what a call of `forward` reads. See `TableModule.query`."""
        if per_sample_weights is not None and self.mode != "sum":
            raise ConfigError(
                f"per_sample_weights need mode='sum', as in torch; this EmbeddingBag has mode={self.mode!r}."
            )
        bags = read_bags(self.mode, ids, offsets, per_sample_weights, clicks, has_last_offset=self.include_last_offset)
        return Query(Feature(self.handle, bags.ids, bags.clicks), bags=bags)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
